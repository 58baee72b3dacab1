"""`tessera serve`: its flags, and how it starts and ends."""

import json
import os
import signal
import subprocess

from conftest import BINARY, MODEL, WAIT_S, ServerProcess


def serve(*arguments, **environment):
    """The ended process of `tessera serve` with these flags."""
    return subprocess.run(
        [BINARY, "serve", str(MODEL), *arguments], capture_output=True, text=True, timeout=WAIT_S, env={**os.environ, **environment}
    )


def config(*arguments, **environment):
    return json.loads(serve("--print-config", *arguments, **environment).stdout)


def test_an_unknown_flag_names_the_nearest():
    result = serve("--max-modle-len", "100")
    assert result.returncode == 2
    assert "'--max-modle-len'" in result.stderr and "'--max-model-len'" in result.stderr


def test_what_is_not_built_is_said():
    for flags, word in [
        (("--kv-cache-dtype", "fp8"), "fp8"),
        (("--block-size", "16"), "64"),
        (("--tensor-parallel-size", "8"), "only 1"),
        (("--speculative-config", "{}"), "speculative"),
        (("--max-model-len", "many"), "many"),
        (("--ssl-keyfile", "key.pem"), "--ssl-certfile"),
        (("--api-key-file", "/nowhere"), "/nowhere"),
        (("--default-chat-template-kwargs", "[]"), "JSON object"),
    ]:
        result = serve(*flags)
        assert result.returncode == 2, flags
        assert word in result.stderr, flags


def test_values_that_would_fail_or_miss_every_request_are_refused():
    for flags, word in [
        (("--default-chat-template-kwargs", '{"reasoning_effort": "extreme"}'), "extreme"),
        (("--default-chat-template-kwargs", '{"reasoning_effort": null}'), "reasoning_effort"),
        (("--default-chat-template-kwargs", '{"tools": []}'), "tools"),
        (("--max-request-body-bytes", "0"), "--max-request-body-bytes"),
        (("--served-model-name", "demo", ""), "--served-model-name"),
        (("--allowed-origins", "app.example"), "app.example"),
        (("--allowed-origins", "https://app.example/"), "without a path"),
    ]:
        result = serve("--print-config", *flags)
        assert result.returncode == 2, flags
        assert word in result.stderr, flags
    shown = config("--default-chat-template-kwargs", '{"reasoning_effort": "medium"}', "--allowed-origins", "*")
    assert shown["default_chat_template_kwargs"] == {"reasoning_effort": "medium"}
    assert config("--allowed-origins", "https://app.example:8443", "null")["allowed_origins"][1] == "null"


def test_print_config_resolves_and_hides_keys(tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("# ours\nsecret-1\n\nsecret-2\n")
    result = serve("--print-config", "--api-key-file", str(keys), "--api-key", "secret-3", VLLM_API_KEY="secret-4")
    assert result.returncode == 0
    assert "secret" not in result.stdout + result.stderr
    shown = json.loads(result.stdout)
    assert shown["api_keys"] == 4
    assert shown["max_model_len"] == 32768
    assert shown["served_model_name"][0] == "demo"
    assert config("--max-model-len", "4K")["max_model_len"] == 4096
    assert config("--context-length", "4k")["max_model_len"] == 4000
    assert config("--kv-cache-memory-bytes", "1.5GiB")["kv_cache_memory_bytes"] == 3 << 29
    assert config("--no-enable-prefix-caching")["enable_prefix_caching"] is False
    assert config("--allowed-origins", '["https://a.example", "https://b.example"]')["allowed_origins"] == [
        "https://a.example",
        "https://b.example",
    ]


def test_the_model_is_given_once():
    assert config("--model", str(MODEL))["model"] == str(MODEL)  # twice the same is no contradiction
    result = serve("--model", "/elsewhere")
    assert result.returncode == 2
    assert "twice" in result.stderr and "/elsewhere" in result.stderr
    result = subprocess.run([BINARY, "serve"], capture_output=True, text=True, timeout=WAIT_S)
    assert result.returncode == 2 and "MODEL" in result.stderr


def test_what_depends_on_the_device():
    assert config()["deterministic"] is True  # the CPU always is
    assert config()["max_num_batched_tokens"] == 512
    cuda = config("--device", "cuda")
    assert cuda["deterministic"] is False and cuda["max_num_batched_tokens"] == 4096
    assert config("--device", "cuda", "--deterministic")["deterministic"] is True
    assert config("--max-num-seqs", "600")["max_num_batched_tokens"] == 600


def test_the_last_of_a_repeated_flag_counts():
    assert config("--port", "8000", "--port", "9000")["port"] == 9000
    assert config("--api-key", "a", "--api-key", "b", "--served-model-name", "x", "y")["api_keys"] == 2
    assert config("--served-model-name", "x", "--served-model-name", "y", "z")["served_model_name"] == ["x", "y", "z"]


def test_a_taken_port_is_said(api_server):
    result = serve("--port", str(api_server.port))
    assert result.returncode == 1
    assert f"127.0.0.1:{api_server.port}" in result.stderr


def test_a_public_address_without_a_key_is_warned_about(tmp_path):
    server = ServerProcess(tmp_path / "log.txt", "--host", "0.0.0.0")
    server.wait_ready()
    assert server.stop() == 0
    assert "0.0.0.0" in (tmp_path / "log.txt").read_text()


def start_stream(server):
    """A long streamed answer of which the first bytes have come."""
    command = ["curl", "-sN", "-H", "Content-Type: application/json", f"http://127.0.0.1:{server.port}/v1/completions", "-d"]
    body = {"model": "demo", "prompt": "Once", "max_tokens": 30000, "ignore_eos": True, "stream": True}
    stream = subprocess.Popen([*command, json.dumps(body)], stdout=subprocess.PIPE)
    assert stream.stdout.readline()
    return stream


def test_sigterm_ends_streams_by_the_contract(tmp_path):
    server = ServerProcess(tmp_path / "log.txt", "--shutdown-timeout", "0.5")
    server.wait_ready()
    stream = start_stream(server)
    assert server.stop() == 0
    tail = stream.communicate(timeout=WAIT_S)[0].decode()
    assert '{"error":' in tail
    assert tail.endswith("data: [DONE]\n\n")


def test_a_second_signal_exits_at_once(tmp_path):
    server = ServerProcess(tmp_path / "log.txt", "--shutdown-timeout", "3600")
    server.wait_ready()
    stream = start_stream(server)
    server.process.send_signal(signal.SIGTERM)
    while server.request("GET", "/ready")[0] == 200:
        pass
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(WAIT_S) == 128 + signal.SIGINT
    stream.communicate(timeout=WAIT_S)
