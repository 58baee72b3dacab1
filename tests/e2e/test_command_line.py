"""Values that a command line can carry and the program cannot use: a message and a status, no crash."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("TESSERA_BINARY", str(ROOT / "build" / "release" / "tessera"))


def run(*arguments):
    command = [BINARY, arguments[0], str(ROOT / "models" / "demo"), *arguments[1:]]
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


def test_a_context_without_room_for_an_answer():
    done = run("serve", "--port", "0", "--max-model-len", "1")
    assert done.returncode == 1
    assert "at least 2" in done.stderr
