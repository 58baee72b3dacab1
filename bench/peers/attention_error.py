#!/usr/bin/env python3
"""The error of attention beside that of its peers: relative RMS against float64, of the same rows of the same inputs.

    for seed in 1 2 3; do
        build/cuda/tessera ops bench attention_decode --device cuda --json --seed $seed
        build/cuda/tessera ops bench attention_prefill --device cuda --json --seed $seed
    done > ours.jsonl
    bench/peers/attention_error.py ours.jsonl

Each line of `ops bench` says its seed and its error on a sample of (row, head) pairs; the inputs are made again from the seed,
each peer attends them, and the same pairs are compared. A case's lines of several seeds become one: the root of the mean
square. The exit status is 1 where ours is over 1.1 times the error of the best peer that multiplies in the same formats (with
e4m3 pages prefill multiplies in e4m3, q and the weights of the softmax too, as does FlashInfer FA3 with q in e4m3), where a case
has no such peer or is wrong, and where nothing was compared. Cases of several queries a sequence are left out."""

import argparse
import collections
import datetime
import importlib
import json
import math
import sys

from side_by_side_cuda import commit, first_line, load_families, read_lines

OPERATORS = ("attention_decode", "attention_prefill")
LIMIT = 1.1


def same_formats(case, peer):
    return case.op == "attention_decode" or not case.fp8 or "q in e4m3" in peer


def peer_errors(case, families, attention):
    """{peer: relative RMS}"""
    import torch
    data, pairs = attention.ours(case)
    want = attention.exact(data, pairs)
    found = {}
    for _, module in families:
        for peer, make in module.peers(case, lambda _: data):
            data.out.fill_(float("nan"))
            try:
                found[peer] = attention.relative_rms(make()(), data, pairs, want)
            except Exception as error:  # one peer's failure is no reason to lose the others
                print(f"skipped {peer} for {case.op} [{case.shape}] {case.dtype}: {first_line(error)}", flush=True)
            torch.cuda.empty_cache()
    return found


def mean_square_root(errors):
    return math.sqrt(sum(error ** 2 for error in errors) / len(errors))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", help="file of `tessera ops bench attention_... --device cuda --json`, with one seed or several")
    parser.add_argument("--only", action="append", help="the cases with this in their shape or dtype, may be repeated")
    parser.add_argument("--append", help="file of JSON lines")
    options = parser.parse_args()
    lines = list(read_lines(options.lines, OPERATORS, options.only))
    try:
        timing, attention = importlib.import_module("cuda_peer"), importlib.import_module("attention_data")
    except ImportError as error:
        sys.exit(f"no peers: {first_line(error)}")
    if not timing.torch.cuda.is_available():
        sys.exit("no peers: torch finds no CUDA device")
    families = load_families(("sdpa_peer", "flashinfer_peer"))
    errors = collections.defaultdict(lambda: collections.defaultdict(list))  # of a case: {who: [of each seed]}
    wrong = 0
    for line in lines:
        case = timing.Case(line)
        if line["wrong"]:
            print(f"WRONG {line['op']} [{line['shape']}] {line['dtype']}: {line['wrong']} elements", flush=True)
            wrong += 1
            continue
        if case.n.get("q_len", 1) > 1:
            continue
        of_case = errors[case.op, case.shape, case.dtype]
        of_case["ours"].append(line["rms"])
        for peer, error in peer_errors(case, families, attention).items():
            of_case[peer].append(error)
    if not errors:
        print("nothing was compared")
    failed = wrong + (not errors)
    for (op, shape, dtype), of_case in errors.items():
        case = timing.Case({"op": op, "shape": shape, "dtype": dtype})
        mean = {who: mean_square_root(found) for who, found in of_case.items()}
        ours = mean.pop("ours")
        fair = [error for peer, error in mean.items() if same_formats(case, peer)]
        worse = bool(fair) and not ours <= LIMIT * min(fair)
        failed += worse or not fair
        print(f"{op:<17} {shape:<24} {dtype:<8} ours {ours:.3e}  " +
              ", ".join(f"{peer} {error:.3e}" for peer, error in sorted(mean.items())) +
              ("" if fair else "  NO PEER") + ("  OVER" if worse else ""), flush=True)
        if options.append:
            with open(options.append, "a") as file:
                file.write(json.dumps({"op": op, "shape": shape, "dtype": dtype, "seeds": len(of_case["ours"]), "rms": ours,
                                       "peers_rms": mean, "commit": commit(), "date": datetime.date.today().isoformat()},
                                      separators=(",", ":")) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
