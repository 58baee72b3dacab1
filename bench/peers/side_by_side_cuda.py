#!/usr/bin/env python3
"""Runs `tessera ops bench --device cuda --json` and its peers on the same GPU by the same method, prints one table, and
appends JSON lines with peer (the fastest one) and peer_us.

    bench/peers/side_by_side_cuda.py build/cuda/tessera --append bench/baselines/h200.jsonl
    bench/peers/side_by_side_cuda.py build/cuda/tessera --op moe --op linear
    bench/peers/side_by_side_cuda.py build/cuda/tessera --op moe --only TP8 --family triton_peer
    bench/peers/side_by_side_cuda.py --lines ours.jsonl --only "tokens=64 " --only "tokens=512 "

Peers are optional: a family whose package is missing, or a case that it refuses, is skipped with a word. A case that
differs from its reference is not appended, and makes the exit status 1."""

import argparse
import datetime
import importlib
import itertools
import json
import shutil
import subprocess
import sys

FAMILIES = ("cublas_peer", "sdpa_peer", "flashinfer_peer", "triton_peer", "grouped_mm_peer", "compile_peer")


LINE_KEYS = {"op", "shape", "dtype", "bytes", "wrong", "burst_us", "rms", "seed"}


def load_families(names):
    families = []
    for name in names:
        try:
            families.append((name, importlib.import_module(name)))
        except Exception as error:  # whatever a package fails with at import
            print(f"skipped {name}: {first_line(error)}", flush=True)
    return families


def first_line(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


def read_lines(path, operators, only):
    """Those of `ops bench --json` that were asked for, from a run before this one on the same machine."""
    try:
        with open(path) as file:
            texts = file.read().splitlines()
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")
    found = False
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not (isinstance(line, dict) and LINE_KEYS <= line.keys()):
            sys.exit(f"{path}, line {number}: not as `tessera ops bench --device cuda --json` writes it")
        wanted = any(words in f"{line['shape']} {line['dtype']}" for words in only or [""])
        if wanted and (not operators or line["op"] in operators):
            found = True
            yield line
    if not found:
        of = f" of {' or '.join(operators)}" if operators else ""
        having = f" with {' or '.join(map(repr, only))} in its shape or dtype" if only else ""
        sys.exit(f"{path}: no case{of}{having}")


def our_lines(binary, operators, only):
    """Those of runs of the binary, a case once."""
    seen = set()
    for operator, words in itertools.product(operators or [""], only or [""]):
        command = [binary, "ops", "bench", *([operator] if operator else []), "--device", "cuda", "--json", "--seed", "1",
                   "--only", words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        nothing = done.returncode == 1 and not lines and words  # it has said why: one operator may lack such cases
        if done.returncode != 0 and not nothing and not any(line["wrong"] for line in lines):
            sys.exit(f"{' '.join(command)}: status {done.returncode}")
        for line in lines:
            case = line["op"], line["shape"], line["dtype"]
            if case not in seen:
                seen.add(case)
                yield line
    if not seen:
        sys.exit(f"{binary}: no case was timed")


def measure(line, families, timing):
    """{peer: (cold us, hot us, burst us)}"""
    import torch
    found = {}
    case = timing.Case(line)
    for family, module in families:
        for peer, make in module.peers(case):
            try:
                found[peer] = timing.time_peer(make, case)
            except Exception as error:  # one peer's failure is no reason to lose the others
                print(f"skipped {peer} for {case.op} [{case.shape}] {case.dtype}: {first_line(error)}", flush=True)
                torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return found


def kept(line):
    """What a baseline keeps of a line."""
    return {key: value for key, value in line.items() if key not in ("variant", "wrong", "seed", "bytes", "flops")}


def print_line(line, peers):
    best = f"{line['peer_us'] / line['us']:.2f}x" if line["peer"] else ""
    others = ", ".join(f"{peer} {cold:.2f} (hot {hot:.2f}{f', burst {burst:.2f}' if burst else ''})"
                       for peer, (cold, hot, burst) in sorted(peers.items(), key=lambda p: p[1][:2]))
    print(f"{line['op']:<17} {line['shape']:<58} {line['dtype']:<8} {line['us']:>9.2f} {line['hot_us']:>9.2f} "
          f"{line['burst_us'] or 0:>9.2f} {line['floor_us']:>9.2f} {line['of_floor']:>5.0%} {best:>6}  {others}", flush=True)


def commit():
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout.strip() or None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", nargs="?", help="tessera; with --lines it is not run")
    parser.add_argument("--lines", help="file of `ops bench --device cuda --json`; cases without a peer are left out")
    parser.add_argument("--op", action="append", help="one operator, may be repeated; all when left out")
    parser.add_argument("--only", action="append", help="the cases with this in their shape or dtype, may be repeated")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="of peers; all when left out")
    parser.add_argument("--append", help="file of JSON lines")
    parser.add_argument("--commit", default=commit(), help="written into the lines")
    options = parser.parse_args()
    if not options.lines and not options.binary:
        parser.error("BINARY or --lines is missing")
    if not options.lines and not shutil.which(options.binary):
        sys.exit(f"{options.binary}: is no program; build it with PRESET=cuda make build")
    timing = None
    try:
        timing = importlib.import_module("cuda_peer")
        missing = "" if timing.torch.cuda.is_available() else "torch finds no CUDA device"
    except ImportError as error:
        missing = first_line(error)
    if missing and options.lines:
        sys.exit(f"no peers: {missing}")
    if missing:
        print(f"skipped all peers: {missing}")
    families = [] if missing else load_families(options.family or FAMILIES)
    print(f"{'operator':<17} {'shape':<58} {'dtype':<8} {'us':>9} {'hot_us':>9} {'burst_us':>9} {'floor_us':>9} {'floor':>5} "
          f"{'ahead':>6}  peers, cold us")
    wrong = 0
    lines = (read_lines(options.lines, options.op, options.only) if options.lines
             else our_lines(options.binary, options.op, options.only))
    for line in lines:
        if line["wrong"]:
            print(f"WRONG {line['op']} [{line['shape']}] {line['dtype']}: {line['wrong']} elements", flush=True)
            wrong += 1
            continue
        peers = measure(line, families, timing) if families else {}
        if options.lines and not peers:
            continue  # it is there already
        if peers:
            best = min((peer for peer in peers if not peer.startswith(timing.PART)),
                       key=lambda peer: peers[peer][0], default=None)
            line |= {"peer": best, "peer_us": round(peers[best][0], 3) if best else None,
                     "peers_us": {peer: round(cold, 3) for peer, (cold, _, _) in peers.items()}}
            if line["burst_us"]:
                line["peers_burst_us"] = {peer: round(burst, 3) for peer, (_, _, burst) in peers.items()}
        line |= {"commit": options.commit, "date": datetime.date.today().isoformat()}
        print_line(line, peers)
        if options.append:
            with open(options.append, "a") as file:
                file.write(json.dumps(kept(line), separators=(",", ":")) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
