"""What does not fit in memory: a message with the bytes and the flag at the start, no crash."""

import os
import pathlib
import resource
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("TESSERA_BINARY", str(ROOT / "build" / "release" / "tessera"))
MODEL = str(ROOT / "models" / "demo")


def run(*arguments, bytes_max=None):
    def limit():
        if bytes_max is not None:
            resource.setrlimit(resource.RLIMIT_AS, (bytes_max, bytes_max))

    command = [BINARY, *arguments]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["serve", MODEL, "--port", "0"], "lower --kv-cache-memory-bytes"),
        (["generate", MODEL, "--prompt", "hi", "--max-tokens", "2"], "lower --kv-cache-memory-bytes"),
        (["bench", "engine", MODEL, "--batch", "64", "--context", "4000"], "lower --batch"),
    ],
)
def test_a_pool_that_cannot_be_mapped_names_its_bytes_and_its_flag(arguments, flag):
    done = run(*arguments, "--threads", "1", bytes_max=1 << 30)
    assert done.returncode == 1, done.stderr
    assert "GiB were asked for" in done.stderr or "MiB were asked for" in done.stderr
    assert flag in done.stderr


def test_generate_runs_where_its_flags_make_the_pool_small():
    flags = ["--prompt", "hi", "--max-tokens", "2", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1K"]
    assert run("generate", MODEL, *flags, "--threads", "1", bytes_max=1 << 30).returncode == 0


def test_threads_that_cannot_be_started_are_a_message():
    done = run("generate", MODEL, "--prompt", "hi", "--threads", "64", bytes_max=400 << 20)
    assert done.returncode == 1 and "lower --threads" in done.stderr, done.stderr


def test_bench_engine_refuses_what_is_larger_than_the_machine():
    flags = ["--prompt-tokens", "16", "--batch", "1024", "--context", "32000", "--rounds", "1", "--steps", "1"]
    done = run("bench", "engine", MODEL, *flags)
    assert done.returncode == 1 and "larger than this machine's memory" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("flags", "said", "unsaid"),
    [
        (["--num-gpu-blocks-override", "1"], "raise --num-gpu-blocks-override or lower", "--kv-cache-memory-bytes"),
        (["--max-total-tokens", "64"], "raise --max-total-tokens or lower", "--kv-cache-memory-bytes"),
        (["--kv-cache-memory-bytes", "1"], "raise --kv-cache-memory-bytes", "at most 0"),
    ],
)
def test_a_small_pool_names_the_flag_that_made_it_small(flags, said, unsaid):
    done = run("serve", MODEL, "--port", "0", *flags)
    assert done.returncode == 1 and said in done.stderr and unsaid not in done.stderr, done.stderr


def test_a_size_below_one_is_none():
    done = run("serve", MODEL, "--port", "0", "--max-model-len", "0K")
    assert done.returncode == 2 and "'0K' is not a size" in done.stderr
