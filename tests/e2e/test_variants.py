"""The forms of a checkpoint that tools/make_variants.py makes, scored beside the original."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("TESSERA_BINARY", str(ROOT / "build" / "release" / "tessera"))
DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    target = tmp_path_factory.mktemp("variants")
    subprocess.run([sys.executable, "-B", ROOT / "tools" / "make_variants.py", DEMO, target], check=True, timeout=600)
    return target


@pytest.fixture(scope="module")
def ids_file(tmp_path_factory):
    cases = json.loads((ROOT / "tests" / "golden" / "data" / "model.json").read_text())["cases"]
    path = tmp_path_factory.mktemp("ids") / "ids.json"
    path.write_text(json.dumps({"ids": next(case["prompt_ids"] for case in cases if case["name"] == "tool")}))
    return path


def logprobs(model, ids_file):
    command = [BINARY, "score", model, "--ids", ids_file, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["token_logprobs"][1:]


# float16 holds bfloat16's tiniest weights less exactly; fp8 is another model, whose mean should stay near.
@pytest.mark.parametrize(("name", "bound"), [("outer", 0), ("single", 0), ("float32", 0), ("float16", 0.02)])
def test_same_weights_in_another_form(variants, ids_file, name, bound):
    expected, got = logprobs(DEMO, ids_file), logprobs(variants / name, ids_file)
    assert max(abs(a - b) for a, b in zip(expected, got, strict=True)) <= bound


@pytest.mark.parametrize("name", ["fp8", "fp8_dynamic", "fp8_block"])
def test_fp8_stays_near(variants, ids_file, name):
    expected, got = logprobs(DEMO, ids_file), logprobs(variants / name, ids_file)
    assert abs(sum(expected) - sum(got)) / len(expected) < 0.2
