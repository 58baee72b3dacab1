#!/usr/bin/env python3
"""Compares two files of JSON lines of `tessera ops bench --json`: exit status 1 when an operator became slower.

A case is its (op, shape, dtype); the last line of a case counts. Lines without these fields or `us` are passed over.
Exit status 2 when the files cannot be compared."""

import argparse
import json
import math
import sys


def read_cases(path):
    cases = {}
    with open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.startswith("{"):
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
            if all(entry.get(key) is not None for key in ("op", "shape", "dtype", "us")):
                cases[entry["op"], entry["shape"], entry["dtype"]] = entry["us"]
    return cases


def compare(baseline, new, limit):
    """(slower, faster, missing, added): the first two as (case, old us, new us)."""
    slower, faster = [], []
    for case in sorted(baseline.keys() & new.keys()):
        old, now = baseline[case], new[case]
        if now > old * (1 + limit):
            slower.append((case, old, now))
        elif old > now * (1 + limit):
            faster.append((case, old, now))
    return slower, faster, sorted(baseline.keys() - new.keys()), sorted(new.keys() - baseline.keys())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("baseline")
    parser.add_argument("new")
    parser.add_argument("--limit", type=float, default=0.10, help="slowdown that is still accepted (0.10 = 10 %%)")
    options = parser.parse_args(arguments)
    if not 0 <= options.limit < math.inf:
        parser.error(f"--limit {options.limit}: a share of 0 or more, such as 0.10")
    try:
        baseline, new = read_cases(options.baseline), read_cases(options.new)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not baseline.keys() & new.keys():
        print(f"error: {options.baseline} and {options.new} have no case in common", file=sys.stderr)
        return 2
    slower, faster, missing, added = compare(baseline, new, options.limit)
    for word, cases in (("SLOWER", slower), ("faster", faster)):
        for (op, shape, dtype), old, now in cases:
            print(f"{word} {op} [{shape}] {dtype}: {old:.2f} -> {now:.2f} us ({now / old - 1:+.0%})")
    print(f"{len(baseline.keys() & new.keys())} cases compared: {len(slower)} slower by over {options.limit:.0%}, "
          f"{len(faster)} faster; {len(missing)} of the baseline not measured, {len(added)} new")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
