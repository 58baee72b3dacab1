"""A running server for the tests that talk to one: `build/release/tessera serve models/demo` on a free port.

TESSERA_BINARY names another build, TESSERA_DEVICE a device: `TESSERA_BINARY=build/cuda/tessera TESSERA_DEVICE=cuda` runs
the tests against a GPU.
"""

import http.client
import json
import os
import pathlib
import socket
import subprocess
import time

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("TESSERA_BINARY", str(ROOT / "build" / "release" / "tessera"))
DEVICE = os.environ.get("TESSERA_DEVICE", "cpu")
MODEL = ROOT / "models" / "demo"
WAIT_S = 120  # generous: the machine may be slow and busy


class ServerProcess:
    """One server; `arguments` are further flags of `tessera serve`."""

    def __init__(self, log, *arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [BINARY, "serve", str(MODEL), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--device", DEVICE, *arguments]
        self.log = log
        with open(log, "wb") as stream:
            self.process = subprocess.Popen(command, stderr=stream, stdout=stream)

    def wait_ready(self):
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if self.request("GET", "/ready")[0] == 200:
                    return
            except OSError:
                pass
            assert self.process.poll() is None, "the server ended before it was ready:\n" + self.log.read_text()
            assert time.monotonic() < deadline, "the server did not become ready:\n" + self.log.read_text()
            time.sleep(0.02)

    def request(self, method, path, body=None, headers=None):
        """(status, headers, bytes) of one plain HTTP request; a body that is not bytes is sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def post(self, path, body):
        """(status, JSON) of a POST."""
        status, _, data = self.request("POST", path, body)
        return status, json.loads(data)

    def metric(self, name):
        """The sum of a metric's series, without labels."""
        text = self.request("GET", "/metrics")[2].decode()
        lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        assert lines, f"/metrics has no {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_idle(self):
        deadline = time.monotonic() + WAIT_S
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") > 0:
            assert time.monotonic() < deadline, "requests are still in the engine"
            time.sleep(0.05)

    def stop(self):
        self.process.terminate()
        return self.process.wait(WAIT_S)


@pytest.fixture(scope="session")
def api_server(tmp_path_factory):
    server = ServerProcess(tmp_path_factory.mktemp("serve") / "log.txt")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def client(api_server):
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{api_server.port}/v1", api_key="unused", max_retries=0, timeout=WAIT_S
    )


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id
