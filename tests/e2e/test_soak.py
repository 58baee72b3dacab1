"""A short soak; by hand it runs for minutes (soak.py --help)."""

import json
import pathlib
import subprocess
import sys

SOAK = pathlib.Path(__file__).resolve().with_name("soak.py")


def test_short_soak(api_server):
    # The bound on /health is ten times the tool's own: the machine that runs the tests may be busy.
    command = [sys.executable, "-B", SOAK, "--port", str(api_server.port), "--streams", "16", "--seconds", "8"]
    done = subprocess.run([*command, "--health-limit-ms", "500"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)
    assert summary["violations"] == []
    assert summary["streamed"] > 0 and summary["malformed"] > 0
    assert summary["after"]["running"] == summary["after"]["waiting"] == 0
