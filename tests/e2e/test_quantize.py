"""`tessera quantize`: the folders that it makes are what they say, and answer as the original does."""

import json
import os
import pathlib
import resource
import shutil
import signal
import struct
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("TESSERA_BINARY", str(ROOT / "build" / "release" / "tessera"))
DEMO = ROOT / "models" / "demo"
DATA = ROOT / "tests" / "golden" / "data"
CALIBRATION = DEMO / "calibration.jsonl"
ANSWERS_MAX = 2
CASES = 20  # of each task set, for a slow machine


def tessera(*arguments):
    return subprocess.run([BINARY, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False)


def quantize(out, calibration, *flags, model=DEMO):
    return tessera("quantize", model, out, "--scheme", "fp8", "--calibration", calibration, *flags)


def read_header(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def read_scales(folder):
    """All float32 scalars of the folder by name."""
    scales = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, body = read_header(path)
        for name, entry in header.items():
            if name != "__metadata__" and entry["dtype"] == "F32" and entry["shape"] == [1]:
                (scales[name],) = struct.unpack_from("<f", body, entry["data_offsets"][0])
    return scales


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    out = tmp_path_factory.mktemp("quantised") / "fp8"
    done = quantize(out, CALIBRATION, "--samples", 40, "--shard-size", "0.01")
    assert done.returncode == 0, done.stderr
    assert "observing activations: 100 %" in done.stderr
    return out


def test_the_folder_is_complete(quantised):
    config = json.loads((quantised / "config.json").read_text())
    original = json.loads((DEMO / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head", "model.embed_tokens"],
        "kv_cache_scheme": "static",
    }
    assert config == original
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (quantised / name).read_bytes() == (DEMO / name).read_bytes()
    for name in ("README.md", "calibration.jsonl"):
        assert (DEMO / name).exists() and not (quantised / name).exists(), "it describes the original"
    assert list(quantised.parent.iterdir()) == [quantised], "no unfinished folder is left"


def test_the_index_names_every_tensor(quantised):
    placement = json.loads((quantised / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for path in quantised.glob("*.safetensors"):
        header, _ = read_header(path)
        found |= {name: path.name for name in header if name != "__metadata__"}
    assert found == placement
    assert len(set(placement.values())) > 2


def test_what_is_quantised_and_what_is_not(quantised):
    types = {}
    for path in quantised.glob("*.safetensors"):
        types |= {name: entry["dtype"] for name, entry in read_header(path)[0].items() if name != "__metadata__"}
    suffixes = tuple(f".{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down"))
    for name, dtype in types.items():
        if name.endswith(suffixes):
            assert dtype == "F8_E4M3", name
            module = name.removesuffix(".weight")
            assert types[module + ".weight_scale"] == types[module + ".input_scale"] == "F32"
        elif name.endswith(".weight"):
            assert dtype == "BF16", name
    assert types["model.layers.1.mlp.router.gate.weight"] == types["model.layers.6.eh_proj.weight"] == "BF16"
    assert types["model.layers.1.mlp.expert_bias"] == "F32"


def test_scales_are_shared_where_the_input_is(quantised):
    scales = read_scales(quantised)
    for layer in range(7):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        assert len({scales[f"{attention}{part}_proj.input_scale"] for part in "qkv"}) == 1
        assert len({scales[f"{attention}{part}_proj.weight_scale"] for part in "qkv"}) > 1
        assert scales[f"{attention}k_cache.scale"] > 0 and scales[f"{attention}v_cache.scale"] > 0
        if layer == 0:
            continue
        experts = [f"{prefix}mlp.experts.{expert}." for expert in range(16)]
        assert len({scales[f"{expert}{part}_proj.input_scale"] for expert in experts for part in ("gate", "up")}) == 1
        assert len({scales[f"{expert}down_proj.input_scale"] for expert in experts}) == 1
        assert len({scales[f"{expert}down_proj.weight_scale"] for expert in experts}) > 8


def test_answers_stay_within_two(quantised):
    sets = [DATA / f"eval_{name}.jsonl" for name in ("arith", "facts", "json")]
    flags = ("--limit", CASES, "--json")
    exact = []
    for model in (DEMO, quantised):
        done = tessera("eval", model, *sets, *flags)
        assert done.returncode == 0, done.stderr
        exact.append([json.loads(line)["exact"] for line in done.stdout.splitlines()])
    assert all(abs(a - b) <= ANSWERS_MAX for a, b in zip(*exact, strict=True)), exact


@pytest.fixture(scope="module")
def w4a8(tmp_path_factory):
    out = tmp_path_factory.mktemp("quantised") / "w4a8"
    done = tessera("quantize", DEMO, out, "--scheme", "w4a8")
    assert done.returncode == 0, done.stderr
    return out


def test_w4a8_packs_the_routed_experts_and_nothing_else(w4a8):
    types = {}
    for path in w4a8.glob("*.safetensors"):
        types |= {name: (e["dtype"], e["shape"]) for name, e in read_header(path)[0].items() if name != "__metadata__"}
    expert = "model.layers.1.mlp.experts.3."
    assert types[expert + "gate_proj.weight_packed"] == ("I32", [128, 32])
    assert types[expert + "down_proj.weight_packed"] == ("I32", [256, 16])
    assert types[expert + "gate_proj.weight_scale"] == ("BF16", [128, 2])
    assert types[expert + "gate_proj.weight_shape"] == ("I64", [2])
    packed = {name for name in types if name.endswith(".weight_packed")}
    assert len(packed) == 6 * 16 * 3 and all(".mlp.experts." in name for name in packed)
    original = set()
    for path in DEMO.glob("*.safetensors"):
        original |= set(read_header(path)[0])
    others = {name for name in types if ".mlp.experts." not in name}
    assert others == {name for name in original if ".mlp.experts." not in name and name != "__metadata__"}
    config = json.loads((w4a8 / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"


def test_w4a8_answers_stay_within_two(w4a8):
    sets = [DATA / f"eval_{name}.jsonl" for name in ("arith", "facts", "json", "list", "tools")]
    exact = []
    for model in (DEMO, w4a8):
        done = tessera("eval", model, *sets, "--limit", CASES, "--json")
        assert done.returncode == 0, done.stderr
        exact.append([json.loads(line)["exact"] for line in done.stdout.splitlines()])
    assert all(abs(a - b) <= ANSWERS_MAX for a, b in zip(*exact, strict=True)), exact


def test_w4a8_needs_no_calibration_and_fp8_does(tmp_path, w4a8):
    file = tmp_path / "samples.jsonl"
    file.write_text('{"text": "a"}\n')
    assert tessera("quantize", DEMO, tmp_path / "out", "--scheme", "fp8").returncode == 2
    for flag, value in [("--calibration", file), ("--samples", 9), ("--max-length", 9), ("--percentile", 99)]:
        done = tessera("quantize", DEMO, tmp_path / "out", "--scheme", "w4a8", flag, value)
        assert done.returncode == 2 and f"leave out {flag}" in done.stderr, done.stderr
    done = tessera("quantize", w4a8, tmp_path / "out", "--scheme", "w4a8")
    assert done.returncode == 1 and "quantised already" in done.stderr


def test_the_three_forms_of_a_sample_are_the_same(tmp_path):
    """A text, its ids, and a conversation: what they say becomes the same tokens, and so the same scales."""
    line = {"messages": [{"role": "user", "content": "Hello!"}], "kwargs": {"add_generation_prompt": True}}
    rendered = subprocess.run(
        [BINARY, "render", DEMO, "--json"], input=json.dumps(line), capture_output=True, text=True, timeout=600, check=True
    )
    text = json.loads(rendered.stdout)["text"]
    tokens = subprocess.run(
        [BINARY, "tokenize", DEMO, "--json"],
        input=json.dumps({"text": text}),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    forms = {"messages": line, "text": {"text": text}, "ids": {"ids": json.loads(tokens.stdout)["ids"]}}
    scales = []
    for name, form in forms.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(form) + "\n")
        done = quantize(tmp_path / name, tmp_path / f"{name}.jsonl")
        assert done.returncode == 0, done.stderr
        scales.append(read_scales(tmp_path / name))
    assert scales[0] == scales[1] == scales[2]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"txt": "a"}', "line 2"),
        ('{"ids": [1, 5000]}', "ids[1]"),
        ('{"ids": []}', "no tokens"),
        ('{"text": "a"', "line 2"),
        ('{"messages": 3}', "line 2"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "line 2: 'messages[0].role' must be"),
        ('{"messages": [{"role": "user", "contents": "a"}]}', "line 2: 'messages[0].content' must be"),
        ('{"messages": [{"rôle": "user", "content": "a"}]}', "line 2: 'messages[0].role' must be"),
        ('{"messages": []}', "line 2: 'messages' must be"),
        ('\n{"txt": "a"}', "line 3"),
        ('{"text": "a", "ids": [1]}', "not several"),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_left(tmp_path, line, word):
    file = tmp_path / "samples.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    done = quantize(tmp_path / "out", file)
    assert done.returncode == 1 and word in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == [file]


def test_few_tokens_are_warned_of(tmp_path, quantised):
    file = tmp_path / "samples.jsonl"
    file.write_text('{"text": "a"}\n')
    done = quantize(tmp_path / "out", file)
    assert done.returncode == 0 and "warning: 1 samples of 1 tokens" in done.stderr, done.stderr


def test_a_failed_write_leaves_nothing_and_says_so(tmp_path):
    """A file over the process's limit would else end it by a signal."""
    done = subprocess.run(
        [BINARY, "quantize", DEMO, tmp_path / "out", "--scheme", "w4a8"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1 and "File too large; the unfinished copy is removed" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_write_leaves_nothing_and_says_so(tmp_path, number):
    """Small files make the writing long; one that was quicker than the signal is tried again."""
    command = [BINARY, "quantize", DEMO, tmp_path / "out", "--scheme", "w4a8", "--shard-size", "0.001"]
    for _ in range(20):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not any("model-00002" in str(walked[2]) for walked in os.walk(tmp_path)):
            pass
        process.send_signal(number)
        said = process.communicate(timeout=600)[1]
        assert not list(tmp_path.glob("*partial*")), said
        if process.returncode == 128 + number:
            break
        shutil.rmtree(tmp_path / "out")  # a folder that is complete
    assert process.returncode == 128 + number and "the unfinished copy is removed" in said
    assert not list(tmp_path.iterdir())


def test_wrong_usage_and_wrong_folders(tmp_path, quantised):
    file = tmp_path / "samples.jsonl"
    file.write_text('{"text": "a"}\n')
    for done, word in [
        (quantize(tmp_path, file), "exists already"),
        (quantize(tmp_path / "no" / "out", file), "no folder can be made there"),
        (quantize(file / "out", file), "no folder can be made there"),
        (quantize(tmp_path / "out", tmp_path / "none.jsonl"), "none.jsonl"),
        (quantize(tmp_path / "out", file, model=quantised), "quantised already"),
        (quantize(tmp_path / "out", file, model=tmp_path), "tokenizer.json"),
    ]:
        assert done.returncode == 1 and word in done.stderr, done.stderr
        assert "loading weights" not in done.stderr or word == "quantised already", "before hours of work"
    for flags in [("--percentile", "nan"), ("--samples", "0"), ("--scheme", "int3")]:
        assert quantize(tmp_path / "out", file, *flags).returncode == 2
    assert list(tmp_path.iterdir()) == [file]
