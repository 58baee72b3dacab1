#!/usr/bin/env python3
"""The CUDA backend against the reference outputs in tests/golden/data: score, generate, eval and serve on a device; and
with --fp8 copies in FP8 and W4A8, made here by `tessera quantize`, and in FP8 with dynamic activations, made by
tools/make_variants.py, against the bfloat16 model's task sets.

Needs a build of the preset cuda, a device, and NumPy. Exit status 1 when a limit is exceeded.
"""

import argparse
import json
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.request

try:
    import numpy as np
except ImportError:
    sys.exit("tests/cuda/goldens_cuda.py: needs NumPy: python3 -m pip install numpy")

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "golden" / "data"
SHORT_SETS = ["arith", "code", "facts", "json", "list", "tools"]
RECALL_SETS = ["recall_2048", "recall_8192", "recall_16384", "recall_32768"]
# tests/golden/data/README.md: mean KL(reference || engine) at the last positions; prose_1 holds nearly all of it.
KL_LIMIT, KL_LIMIT_WITHOUT_PROSE_1 = 4.8e-3, 2e-4
MARGIN_MIN = 0.5
ANSWERS_MAX = 2
LONG_CASE_TOKENS = 4096
TOP = 1024


class Checks:
    def __init__(self):
        self.failed = 0

    def check(self, ok, text):
        print(f"{'ok  ' if ok else 'FAIL'} {text}", flush=True)
        self.failed += not ok


class Tessera:
    def __init__(self, binary, model, kv_cache_dtype):
        self.binary, self.model = binary, model
        self.flags = ["--device", "cuda", "--kv-cache-dtype", kv_cache_dtype]

    def lines(self, command, *arguments):
        call = [self.binary, command, self.model, *map(str, arguments), *self.flags, "--json"]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(call)}: status {done.returncode}\n{done.stderr}")
        self.notes = done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def with_ids(self, command, sequences, *arguments):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump([{"ids": ids} for ids in sequences], file)
            file.flush()
            flag = "--ids" if command == "score" else "--prompt-ids"
            return self.lines(command, flag, file.name, *arguments)


def read_tensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    types = {"F32": np.float32}
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], types[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
        if entry["dtype"] in types
    }


def kl_divergence(logits, top_ids, top_logprobs):
    """KL(softmax(logits) || engine). The ids outside the engine's top ones count as one."""
    reference = logits.astype(np.float64) - logits.max()
    reference -= np.log(np.exp(reference).sum())
    p, q = reference[top_ids], np.array(top_logprobs, np.float64)
    rest_p, rest_q = max(1 - np.exp(p).sum(), 1e-12), max(1 - np.exp(q).sum(), 1e-12)
    return float((np.exp(p) * (p - q)).sum() + rest_p * np.log(rest_p / rest_q))


def check_last_positions(tessera, cases, checks, limited):
    tensors = read_tensors(DATA / "model.safetensors")
    rows = tessera.with_ids("score", [case["prompt_ids"] for case in cases], "--top", TOP)
    kl = {}
    for case, row in zip(cases, rows):
        kl[case["name"]] = kl_divergence(
            tensors[case["name"] + ".last_logits"], row["top_ids"][-1], row["top_logprobs"][-1]
        )
    print("     " + ", ".join(f"{name} {value:.1e}" for name, value in kl.items()))
    mean = np.mean(list(kl.values()))
    rest = np.mean([value for name, value in kl.items() if name != "prose_1"])
    for value, limit, what in ((mean, KL_LIMIT, "all"), (rest, KL_LIMIT_WITHOUT_PROSE_1, "all but prose_1")):
        note = f"limit {limit:.1e}" if limited else "no limit"
        checks.check(not limited or value <= limit, f"mean KL at the last positions, {what}: {value:.2e} ({note})")


def check_mtp(tessera, cases, checks, limited):
    """The MTP layer's most probable token at the listed positions. Near ties may swap."""
    short = [case for case in cases if len(case["prompt_ids"]) <= 256]
    rows = tessera.with_ids("score", [case["prompt_ids"] for case in short], "--top", 1, "--mtp")
    same = total = 0
    for case, row in zip(short, rows):
        for i, position in enumerate(case["positions"]):
            same += row["mtp_top_ids"][position][0] == case["mtp_top_ids"][i][0]
            total += 1
    checks.check(not limited or same >= 0.97 * total, f"MTP: {same} of {total} most probable tokens equal")


def check_teacher_forced(tessera, cases, checks):
    cases = [case for case in cases if case.get("greedy_ids")]
    sequences = [case["prompt_ids"] + case["greedy_ids"][:-1] for case in cases]
    rows = tessera.with_ids("score", sequences, "--top", 1)
    misses, compared, close = [], 0, 0
    for case, row in zip(cases, rows):
        first = len(case["prompt_ids"]) - 1
        for i, (expected, margin) in enumerate(zip(case["greedy_ids"], case["greedy_margins"])):
            same = row["top_ids"][first + i][0] == expected
            compared += margin > MARGIN_MIN
            close += margin <= MARGIN_MIN and not same
            if margin > MARGIN_MIN and not same:
                misses.append((case["name"], i, margin))
    checks.check(
        not misses, f"greedy, teacher-forced: {compared} tokens with a margin, misses {misses}; {close} close others differ"
    )


def check_long(tessera, cases, checks, limited):
    """The listed positions of the long prompt: the most probable token, where the reference is sure of it."""
    for case in cases:
        row = tessera.with_ids("score", [case["prompt_ids"]], "--top", 16)[0]
        sure = wrong = 0
        largest = 0.0
        for position, ids, logprobs in zip(case["positions"], case["top_ids"], case["top_logprobs"]):
            ours = dict(zip(row["top_ids"][position], row["top_logprobs"][position]))
            largest = max(largest, *(abs(ours.get(i, -99.0) - value) for i, value in zip(ids[:2], logprobs)))
            sure += logprobs[0] - logprobs[1] > MARGIN_MIN
            wrong += logprobs[0] - logprobs[1] > MARGIN_MIN and row["top_ids"][position][0] != ids[0]
        nll = -np.mean(row["token_logprobs"][1:])
        text = f"{case['name']}: {wrong} of {sure} sure positions wrong, top two log-probabilities within {largest:.3f}"
        checks.check(not limited or not wrong, f"{text}; mean NLL {nll:.5f}, reference {case['nll_mean']:.5f}")


def check_generate(tessera, cases, checks):
    cases = [case for case in cases if case.get("greedy_ids")]
    rows = tessera.with_ids("generate", [case["prompt_ids"] for case in cases], "--temperature", 0, "--max-tokens", 200)
    print("     " + tessera.notes.strip().replace("\n", "\n     "))
    equal, wrong = 0, []
    for case, row in zip(cases, rows):
        pairs = enumerate(zip(row["ids"], case["greedy_ids"]))
        first = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if first is None and row["ids"] == case["greedy_ids"] and row["finish_reason"] == "stop":
            equal += 1
        elif first is None or case["greedy_margins"][first] > MARGIN_MIN:
            wrong.append((case["name"], first, row["finish_reason"]))
    checks.check(not wrong, f"generate, greedy: {equal} of {len(cases)} equal, wrong {wrong}")


def check_eval(tessera, sets, checks, expected=None):
    """Exact answers beside `expected` ones by set (the float32 reference's); returns the engine's own."""
    if expected is None:
        rates = json.loads((DATA / "reference_rates.json").read_text())
        expected = {name: rates["eval_" + name] for name in sets}
    files = [next(DATA.glob(f"eval_{name}.jsonl*")) for name in sets]
    rows = dict(zip(sets, tessera.lines("eval", *files)))
    for name, row in rows.items():
        right = expected[name]
        text = f"eval {name}: {row['exact']} of {row['n']}, token rate {row['token_rate']:.4f}; beside {right['exact']}, {right['token_rate']:.4f}"
        checks.check(abs(row["exact"] - right["exact"]) <= ANSWERS_MAX, text)
    return rows


def check_quantised(arguments, cases, own, checks):
    """FP8 with bfloat16 and with e4m3 pages, int4 experts, and experts in e4m3 with dynamic activations, beside the
    engine's own bfloat16 answers."""
    quantize = [arguments.binary, "quantize", arguments.model]
    variants = [sys.executable, ROOT / "tools" / "make_variants.py", arguments.model]
    copies = {
        "fp8": ([*quantize, "{}/fp8", "--scheme", "fp8", "--calibration", arguments.calibration], ("bfloat16", "fp8")),
        "w4a8": ([*quantize, "{}/w4a8", "--scheme", "w4a8"], ("bfloat16",)),
        "fp8_block": ([*variants, "{}", "--only", "fp8_block"], ("bfloat16",)),
        "fp8_dynamic": ([*variants, "{}", "--only", "fp8_dynamic"], ("bfloat16",)),
    }
    for name, (call, all_pages) in copies.items():
        with tempfile.TemporaryDirectory() as folder:
            call = [str(word).replace("{}", folder) for word in call]
            subprocess.run(call, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for pages in all_pages:
                print(f"{name} weights, {pages} pages", flush=True)
                tessera = Tessera(arguments.binary, pathlib.Path(folder) / name, pages)
                check_last_positions(tessera, cases, checks, False)
                check_mtp(tessera, cases, checks, False)
                check_eval(tessera, list(own), checks, own)
                check_serve(tessera, checks)


def check_serve(tessera, checks):
    call = [tessera.binary, "serve", tessera.model, "--port", "0", "--gpu-memory-utilization", "0.1", *tessera.flags]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as server:
        try:
            found = re.search(r"http\S+", server.stdout.readline())
            if found is None:
                sys.exit(f"{' '.join(call)}: status {server.wait()}, see its words above")
            url = found[0].rstrip("/")
            body = {
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_tokens": 40,
                "temperature": 0,
            }
            request = urllib.request.Request(
                url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                reply = json.load(answer)
            choice = reply["choices"][0]
            checks.check(bool(choice["message"]["content"]), f"serve: {choice} {reply['usage']}")
        finally:
            server.terminate()
    checks.check(server.returncode == 0, f"serve ends with status {server.returncode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=str(ROOT / "build" / "cuda" / "tessera"))
    parser.add_argument("--model", default=str(ROOT / "models" / "demo"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--report-only", action="store_true", help="state the KL without a limit (FP8)")
    parser.add_argument("--fp8", action="store_true", help="then quantise the model and check the copies")
    parser.add_argument("--calibration", default=str(ROOT / "models" / "demo" / "calibration.jsonl"))
    parser.add_argument("--recall", action="store_true", help="also the recall sets and the case of 30,718 tokens")
    arguments = parser.parse_args()
    if not shutil.which(arguments.binary):
        sys.exit(f"{arguments.binary}: is no program; build it with PRESET=cuda make build")
    tessera, checks = Tessera(arguments.binary, arguments.model, arguments.kv_cache_dtype), Checks()
    every = json.loads((DATA / "model.json").read_text())["cases"]
    cases = [case for case in every if len(case["prompt_ids"]) < LONG_CASE_TOKENS]
    check_last_positions(tessera, cases, checks, not arguments.report_only)
    check_mtp(tessera, cases, checks, not arguments.report_only)
    if arguments.recall:
        check_long(tessera, [case for case in every if case not in cases], checks, not arguments.report_only)
    if not arguments.report_only:
        check_teacher_forced(tessera, cases, checks)
        check_generate(tessera, cases, checks)
    own = check_eval(tessera, SHORT_SETS + (RECALL_SETS if arguments.recall else []), checks)
    check_serve(tessera, checks)
    if arguments.fp8:
        check_quantised(arguments, cases, own, checks)
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
