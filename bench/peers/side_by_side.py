#!/usr/bin/env python3
"""Prints JSON lines of `tessera bench engine` and of its peers as one table, a row for each task."""

import json
import sys


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: bench/peers/side_by_side.py FILE")
    try:
        with open(sys.argv[1]) as file:
            lines = [json.loads(line) for line in file]
    except (OSError, ValueError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")
    tasks = {}
    for line in lines:
        task = (line["prompt_tokens"], line["context"], line["batch"])
        tasks.setdefault(task, []).append(line)
    print(f"{'task':<30} {'engine':<42} {'weights':<36} {'tokens/s':>10} {'of floor':>9} {'ahead of it':>12}")
    for (prompt, context, batch), entries in tasks.items():
        task = f"prefill {prompt}" if prompt else f"decode batch {batch} context {context}"
        ours = entries[0]["step_us"]
        for entry in entries:
            rate = entry["prefill_tokens_per_s"] or entry["decode_tokens_per_s"]
            floor = f"{entry['floor_us'] / entry['step_us']:.0%}" if entry["floor_us"] else ""
            ahead = "" if entry is entries[0] else f"{entry['step_us'] / ours:.2f}x"
            print(f"{task:<30} {entry['engine']:<42} {entry['dtype']:<36} {rate:>10.0f} {floor:>9} {ahead:>12}")


if __name__ == "__main__":
    main()
