"""The command line against the reference outputs: score, generate and eval on tests/golden/data."""

import gzip
import json
import os
import pathlib
import struct
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "golden" / "data"
MODEL = ROOT / "models" / "demo"
BINARY = os.environ.get("TESSERA_BINARY", str(ROOT / "build" / "release" / "tessera"))

SHORT_SETS = ["arith", "code", "facts", "json", "list", "tools"]
LONG_CASE_TOKENS = 4096  # recall_31k takes minutes on two cores: by hand


def tessera(*arguments, stdin=None):
    done = subprocess.run([BINARY, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def cases():
    every = json.loads((DATA / "model.json").read_text())["cases"]
    return [case for case in every if len(case["prompt_ids"]) < LONG_CASE_TOKENS]


@pytest.fixture(scope="module")
def ids_file(cases, tmp_path_factory):
    path = tmp_path_factory.mktemp("goldens") / "ids.json"
    path.write_text(json.dumps([{"ids": case["prompt_ids"]} for case in cases]))
    return path


# Known near-ties of two experts (tests/golden/data/README.md): at and after these places a chosen expert may flip.
FLIPS = {"capital": 13, "json": 16, "tool": 172, "recall_1200": 149}


@pytest.mark.parametrize("threads", [1, 2])
def test_score(cases, ids_file, threads):
    rows = tessera("score", MODEL, "--ids", ids_file, "--top", 64, "--mtp", "--threads", threads, "--json")
    assert [row["index"] for row in rows] == list(range(len(cases)))
    for case, row in zip(cases, rows):
        length = len(case["prompt_ids"])
        assert len(row["top_ids"]) == len(row["token_logprobs"]) == len(row["mtp_top_ids"]) == length
        assert row["token_logprobs"][0] is None
        first_flip = FLIPS.get(case["name"], length)
        for i, t in enumerate(case["positions"]):
            ours = dict(zip(row["top_ids"][t], row["top_logprobs"][t]))
            for token, expected in zip(case["top_ids"][i], case["top_logprobs"][i]):
                miss = abs(ours.get(token, -1e9) - expected)
                assert miss <= 1e-3 or t >= first_flip, (case["name"], t, token, miss)
        nll = -sum(row["token_logprobs"][1:]) / (length - 1)
        assert abs(nll - case["nll_mean"]) <= 1e-5 or first_flip < length, (case["name"], nll, case["nll_mean"])


def test_greedy(cases, ids_file):
    rows = tessera("generate", MODEL, "--prompt-ids", ids_file, "--temperature", 0, "--max-tokens", 200, "--json")
    compared = 0
    for case, row in zip(cases, rows):
        expected = case.get("greedy_ids")
        if not expected:
            continue
        compared += 1
        pairs = enumerate(zip(row["ids"], expected))
        first = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if first is None:
            assert row["ids"] == expected, case["name"]
            assert row["finish_reason"] == "stop"
        else:
            assert case["greedy_margins"][first] < 2e-3, (case["name"], first)
    assert compared >= 10


@pytest.mark.parametrize("name", SHORT_SETS)
def test_eval_short_sets(name):
    rates = json.loads((DATA / "reference_rates.json").read_text())
    (row,) = tessera("eval", MODEL, DATA / f"eval_{name}.jsonl", "--mtp", "--json")
    expected = rates[f"eval_{name}"]
    assert row["n"] == expected["n"]
    assert abs(row["exact"] - expected["exact"]) <= 1
    assert abs(row["token_rate"] - expected["token_rate"]) <= 0.01
    assert abs(row["mtp_first_draft"] - expected["mtp_first_draft"]) <= 0.02


def test_eval_two_recall_cases():
    (row,) = tessera("eval", MODEL, DATA / "eval_recall_2048.jsonl.gz", "--limit", 2, "--json")
    assert row["n"] == 2
    assert row["token_rate"] >= 0.9


def test_eval_names_the_bad_line(tmp_path):
    bad = tmp_path / "bad.jsonl"
    with gzip.open(DATA / "eval_recall_2048.jsonl.gz", "rt") as source:
        bad.write_text(source.readline() + '{"prompt_ids": [1, 99999], "answer_ids": [1]}\n')
    done = subprocess.run([BINARY, "eval", MODEL, bad, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "line 2" in done.stderr and "prompt_ids[1]" in done.stderr and "4095" in done.stderr


def test_generate_says_what_is_wrong(tmp_path):
    done = subprocess.run([BINARY, "generate", tmp_path, "--prompt", "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and str(tmp_path) in done.stderr
    done = subprocess.run([BINARY, "generate", MODEL], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--prompt" in done.stderr


def test_the_goldens_header_is_sane():
    """A corrupt copy of the reference tensors would make the comparisons above meaningless."""
    with open(DATA / "model.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    assert header["hello.logits"]["shape"] == [16, 4096]
