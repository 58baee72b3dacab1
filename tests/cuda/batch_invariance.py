#!/usr/bin/env python3
"""--deterministic on a device: a request's tokens and log-probabilities are the same bits whatever runs beside it, however
its prompt is cut into chunks, and after it was preempted and computed again.

Needs a build of the preset cuda and a device. Exit status 1 when a bit differs, or when a run of all requests that is
there for preemptions or cached prefixes had none. With --plain the same is counted without the flag, for comparison.
"""

import argparse
import concurrent.futures
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "golden" / "data"
REQUESTS = 64
OUTPUT_TOKENS = 200
TOP = 3
# (name, requests at a time, flags): the first is what the others are compared with. 40 pages hold some ten requests, which
# grow by three pages each: the scheduler preempts.
RUNS = [
    ("alone", 1, ["--no-enable-prefix-caching"]),
    ("alone again", 1, ["--no-enable-prefix-caching"]),
    ("16 at a time", 16, ["--no-enable-prefix-caching"]),
    ("64 at a time", 64, ["--no-enable-prefix-caching"]),
    ("64 at a time, chunks of 64", 64, ["--no-enable-prefix-caching", "--max-num-batched-tokens", "64"]),
    ("alone, chunks of 100", 1, ["--no-enable-prefix-caching", "--max-num-batched-tokens", "100", "--max-num-seqs", "8"]),
    ("64 at a time, cached prefixes", 64, []),
    ("64 at a time, preempted", 64, ["--num-gpu-blocks-override", "40", "--max-model-len", "2048"]),
]


def prompts():
    """64 different ones of 20 to 1,600 tokens."""
    sets = {name: [json.loads(line) for line in (DATA / f"eval_{name}.jsonl").read_text().splitlines()] for name in
            ("arith", "code", "facts", "list", "tools")}
    cases = json.loads((DATA / "model.json").read_text())["cases"]
    out = [case["prompt_ids"] for case in cases if len(case["prompt_ids"]) < 1700]
    for i in range(REQUESTS - len(out)):
        name = list(sets)[i % len(sets)]
        out.append(sets[name][i // len(sets)]["prompt_ids"])
    return out


class Server:
    def __init__(self, arguments, flags):
        call = [arguments.binary, "serve", arguments.model, "--port", "0", "--device", arguments.device,
                "--gpu-memory-utilization", "0.1",
                "--kv-cache-dtype", arguments.kv_cache_dtype, *flags]
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        if "http" not in line:
            self.log.seek(0)
            sys.exit(f"{' '.join(call)}:\n{self.log.read()}")
        self.url = re.search(r"http\S+", line)[0].rstrip("/")

    def complete(self, prompt, **fields):
        """A completion's token ids and their log-probabilities."""
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "logprobs": TOP, "ignore_eos": True,
                "return_token_ids": True, **fields}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]

    def metric(self, name):
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def run(arguments, flags, at_a_time, requests, expected):
    """The answers to all requests, and to each request followed by its own answer: where prefixes are cached, pages
    that decoding has written are then read."""
    server = Server(arguments, flags)
    try:
        with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
            answers = list(pool.map(server.complete, requests))
            firsts = expected or answers
            longer = [prompt + first[0] for prompt, first in zip(requests, firsts)]
            answers += pool.map(server.complete, longer)
        return answers, server.metric("vllm:num_preemptions_total"), server.metric("vllm:prefix_cache_hits_total")
    finally:
        server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=str(ROOT / "build" / "cuda" / "tessera"))
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", default="", help="only the first run and those whose name contains this")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--plain", action="store_true", help="without --deterministic: only counts")
    arguments = parser.parse_args()
    if not shutil.which(arguments.binary):
        sys.exit(f"{arguments.binary}: is no program; build it with PRESET=cuda make build")
    requests, expected, failed = prompts()[-arguments.requests :], None, 0
    for name, at_a_time, flags in [run for run in RUNS if run is RUNS[0] or arguments.runs in run[0]]:
        if not arguments.plain:
            flags = [*flags, "--deterministic"]
        answers, preemptions, hits = run(arguments, flags, at_a_time, requests, expected)
        expected = expected or answers
        different = sum(a != b for a, b in zip(answers, expected))
        text = sum(a[0] != b[0] for a, b in zip(answers, expected))
        idle = arguments.requests == REQUESTS and (
            ("preempted" in name and not preemptions) or ("cached" in name and not hits)
        )
        failed += different > 0 or idle
        word = "DIFF" if different else "IDLE" if idle else "ok  "
        print(f"{word} {name}: {different} of {len(answers)} differ in a bit, {text} in a token; "
              f"{preemptions:.0f} preemptions, {hits:.0f} cached tokens", flush=True)
    return 1 if failed and not arguments.plain else 0


if __name__ == "__main__":
    sys.exit(main())
