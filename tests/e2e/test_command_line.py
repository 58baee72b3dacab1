"""Values that a command line can carry and the program cannot use: a message and a status, no crash."""

import gzip
import json
import os
import pathlib
import pty
import shutil
import subprocess
import zlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("TESSERA_BINARY", str(ROOT / "build" / "release" / "tessera"))
MODEL = str(ROOT / "models" / "demo")


def run(*arguments):
    command = [BINARY, arguments[0], MODEL, *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("generate", "--temperature"),
        ("generate", "--top-p"),
        ("generate", "--min-p"),
        ("chat", "--temperature"),
        ("serve", "--request-timeout"),
        ("serve", "--shutdown-timeout"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "-nan", "-1", "inf", "2x"])
def test_a_number_outside_its_range_is_a_usage_error(command, flag, value):
    done = run(command, f"{flag}={value}")
    assert done.returncode == 2
    assert flag in done.stderr


@pytest.mark.parametrize(
    ("command", "largest"), [("generate", 2**64 - 1), ("chat", 2**64 - 1), ("serve", 2**63 - 1)]
)
@pytest.mark.parametrize("value", ["-1", None, "1.5", "x"])
def test_a_seed_is_a_whole_number_of_64_bits(command, largest, value):
    done = run(command, f"--seed={value or largest + 1}")
    assert done.returncode == 2
    assert "--seed" in done.stderr and str(largest) in done.stderr


def test_deterministic_is_accepted_on_the_cpu_and_changes_nothing():
    flags = ["--prompt", "Once upon a time", "--max-tokens", "8", "--json"]
    plain, deterministic = run("generate", *flags), run("generate", *flags, "--deterministic")
    assert plain.returncode == deterministic.returncode == 0
    assert plain.stdout == deterministic.stdout


@pytest.mark.parametrize(
    ("flags", "word", "status"),
    [
        ([], "either MODEL or --model-config", 2),
        ([MODEL, "--model-config", "hy3"], "either MODEL or --model-config", 2),
        (["--model-config", "hy3"], "--random-weights", 2),
        ([MODEL, "--random-weights"], "--random-weights needs --model-config", 2),
        (["--model-config", "hy3", "--random-weights"], "--device cuda", 2),
        ([MODEL, "--layers", "2"], "--layers", 2),
        ([MODEL, "--dtype", "fp8"], "--dtype", 2),
        ([MODEL, "--kv-cache-dtype", "fp8"], "--kv-cache-dtype", 1),
        ([MODEL, "--context", "1000000"], "the model's context", 1),
    ],
)
def test_bench_engine_says_what_does_not_go_together(flags, word, status):
    done = subprocess.run([BINARY, "bench", "engine", *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == status and word in done.stderr, done.stderr


def test_bench_engine_measures_every_prompt_and_every_batch_at_every_context():
    flags = "--prompt-tokens 1,40 --context 20,30 --batch 1,2 --steps 3 --rounds 1 --json".split()
    done = subprocess.run([BINARY, "bench", "engine", MODEL, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    tasks = [(line["prompt_tokens"], line["context"], line["batch"]) for line in lines]
    assert tasks == [(1, 0, 1), (40, 0, 1), (0, 20, 1), (0, 20, 2), (0, 30, 1), (0, 30, 2)]
    for line in lines:
        assert line["step_us"] > 0 and line["floor_us"] > 0 and line["bytes"] > 0 and line["fmas"] > 0
    assert lines[0]["bytes"] < lines[1]["bytes"], "one token chooses few experts"


@pytest.mark.parametrize("flags", [("test", "--small"), ("bench", "--seed", "1")])
def test_ops_flags_of_a_device_are_refused_on_the_cpu(flags):
    done = subprocess.run([BINARY, "ops", *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--device cuda" in done.stderr


def test_ops_bench_times_the_cases_asked_for():
    command = [BINARY, "ops", "bench", "rms_norm", "--json", "--threads", "1", "--only"]
    done = subprocess.run([*command, "rows=1 "], capture_output=True, text=True, timeout=120)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and lines and all("rows=1 " in line["shape"] for line in lines)
    done = subprocess.run([*command, "no such shape"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "no case has 'no such shape'" in done.stderr


def test_a_context_without_room_for_an_answer():
    done = run("serve", "--port", "0", "--max-model-len", "1")
    assert done.returncode == 1
    assert "at least 2" in done.stderr


# At the end, the trailer alone, and between two lines: nothing of what is left is malformed.
@pytest.mark.parametrize("kept", ["whole", "no trailer", "two lines"])
def test_a_cut_gzip_file_is_no_shorter_task_set(tmp_path, kept):
    line = b'{"prompt_ids": [4000], "answer_ids": [4006]}\n'
    whole = gzip.compress(line * 3)
    file = tmp_path / "set.jsonl.gz"
    if kept == "two lines":
        stream = zlib.compressobj(wbits=31)
        file.write_bytes(stream.compress(line * 2) + stream.flush(zlib.Z_FULL_FLUSH))
    else:
        file.write_bytes(whole if kept == "whole" else whole[:-8])
    done = run("eval", str(file), "--json")
    if kept == "whole":
        assert done.returncode == 0 and json.loads(done.stdout)["n"] == 3, done.stderr
    else:
        assert done.returncode == 1 and "set.jsonl.gz: it is truncated" in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["eval", "FILE"], ""),
        (["eval", "FILE"], "\n \n"),
        (["score", "--ids", "FILE"], "[]"),
        (["generate", "--prompt-ids", "FILE"], "[]"),
    ],
)
def test_nothing_to_do_is_an_error(tmp_path, arguments, text):
    file = tmp_path / "set.json"
    file.write_text(text)
    done = run(*[str(file) if argument == "FILE" else argument for argument in arguments])
    assert done.returncode == 1 and "at least one" in done.stderr and not done.stdout


# A model's text or a file's name could else write to the reader's clipboard, or hide what is wrong.
def test_a_terminal_gets_no_control_characters_of_others():
    command = [BINARY, "tokenize", "/nowhere/\x1b]52;c;\x07", "--json"]
    assert "/\x1b]52" in subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    ours, theirs = pty.openpty()
    assert subprocess.run(command, stdin=subprocess.DEVNULL, stderr=theirs, timeout=60).returncode == 1
    shown = os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    assert b"/nowhere/<U+001B>]52;c;<U+0007>: there is no such model folder" in shown and b"\x1b" not in shown


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_tokenizer_with_ids_beyond_the_embedding_is_refused(tmp_path, command):
    for file in pathlib.Path(MODEL).iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    tokenizer = json.loads((pathlib.Path(MODEL) / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][-1], id=4096, content="<beyond>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    arguments = {"serve": ["--port", "0"], "generate": ["--prompt", "<beyond>"]}[command]
    done = subprocess.run([BINARY, command, tmp_path, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "tokenizer.json has ids up to 4096" in done.stderr and "vocab_size of 4096" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["ops", "list", "moe"], "moe"),
        (["ops", "test", "linear", "moe"], "moe"),
        (["ops", "test", "linear", "--bogus"], "--bogus"),
        (["ops", "bench", "linear", "x"], "x"),
    ],
)
def test_an_unknown_argument_of_a_subcommand_is_named(arguments, name):
    done = subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"unknown argument '{name}'" in done.stderr


def test_an_unknown_command_of_a_subcommand_is_named():
    done = subprocess.run([BINARY, "ops", "tset"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "unknown command 'tset'; there are list, test, bench" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "/nowhere", "--port", "0"],
        ["generate", "/nowhere", "--prompt", "a"],
        ["score", "/nowhere", "--ids", "-"],
        ["tokenize", "/nowhere"],
        ["render", "/nowhere"],
        ["bench", "engine", "/nowhere"],
        ["quantize", "/nowhere", "OUT", "--scheme", "w4a8"],
    ],
)
def test_a_folder_that_is_not_there_is_named_itself(tmp_path, arguments):
    arguments = [str(tmp_path / "out") if argument == "OUT" else argument for argument in arguments]
    done = subprocess.run([BINARY, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "/nowhere: there is no such model folder" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "word"),
    [
        (["bench", "engine", "--model-config", "hy4", "--random-weights"], 1, "--model-config hy4"),
        (["bench", "engine", "--model-config", "hy3", "--random-weights", "--layers", "99"], 1, "--layers 99"),
        (["bench", "engine", MODEL, "--kv-cache-dtype", "int3"], 1, "--kv-cache-dtype int3"),
        (["bench", "engine", "/nowhere"], 1, "no such model folder"),
        (["serve", MODEL, "--port", "0", "--max-model-len", "1M"], 1, "--max-model-len 1048576"),
        (["score", "/nowhere", "--ids", "-"], 1, "no such model folder"),
        (["ops", "test", "linear", "--variant", "avx2"], 2, "--variant and --threads need --device cpu"),
        (["ops", "bench", "--threads", "2"], 2, "--variant and --threads need --device cpu"),
    ],
)
def test_what_is_wrong_without_a_device_is_said_before_it(arguments, status, word):
    done = subprocess.run([BINARY, *arguments, "--device", "cuda"], capture_output=True, text=True, timeout=120)
    assert done.returncode == status and word in done.stderr, done.stderr


def test_a_build_without_cuda_says_so_in_one_sentence():
    commands = [
        ["ops", "list"],
        ["ops", "test", "linear"],
        ["ops", "bench"],
        ["generate", MODEL, "--prompt", "a"],
        ["serve", MODEL, "--port", "0"],
        ["bench", "engine", MODEL],
    ]
    for command in commands:
        done = subprocess.run([BINARY, *command, "--device", "cuda"], capture_output=True, text=True, timeout=120)
        if done.returncode == 0 or "no CUDA device" in done.stderr:
            pytest.skip("this build has CUDA")
        assert done.returncode == 1 and "--device cuda: this build of tessera has no CUDA backend" in done.stderr


def model_with_nan(folder):
    """The demonstration model with a NaN in its last norm."""
    shutil.copytree(MODEL, folder)
    for shard in folder.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
        if "model.norm.weight" in header:
            at = 8 + header_bytes + header["model.norm.weight"]["data_offsets"][0]
            data[at : at + 2] = b"\xc0\x7f"
            shard.write_bytes(data)
            return str(folder)
    raise AssertionError("no model.norm.weight")


def test_logits_that_are_not_numbers_end_score_and_eval(tmp_path):
    model = model_with_nan(tmp_path / "model")
    ids = tmp_path / "ids.json"
    ids.write_text('[{"ids": [4000, 4008, 352]}]')
    cases = tmp_path / "cases.jsonl"
    cases.write_text('{"prompt_ids": [4000, 4008], "answer_ids": [352]}\n')
    for arguments in (["score", model, "--ids", str(ids), "--json"], ["eval", model, str(cases), "--json"]):
        done = subprocess.run([BINARY, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "are not numbers (NaN)" in done.stderr and done.stdout == ""
