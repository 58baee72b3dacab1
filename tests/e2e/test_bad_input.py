"""Bad input gets a 4xx in OpenAI's form that names the field, never a 500; and the server goes on."""

import json

import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TOOL = {"type": "function", "function": {"name": "f"}}

# field, value, what the error names when it is not the field
COMMON = [
    ("model", 5, None),
    ("model", "nobody", None),
    ("temperature", "hot", None),
    ("temperature", -1, None),
    ("temperature", 1e300, None),
    ("top_p", 0, None),
    ("top_k", -2, None),
    ("min_p", 1.5, None),
    ("repetition_penalty", 0, None),
    ("presence_penalty", 2.5, None),
    ("frequency_penalty", "x", None),
    ("logit_bias", {"9999999": 1}, None),
    ("logit_bias", {str(i): 1 for i in range(1025)}, None),
    ("seed", 2**63, None),
    ("stop", [""], None),
    ("stop", ["x"] * 17, None),
    ("stop", "x" * 5000, None),
    ("stop_token_ids", [10**9], "stop_token_ids[0]"),
    ("ignore_eos", "yes", None),
    ("min_tokens", -1, None),
    ("max_tokens", 0, None),
    ("max_tokens", 10**12, None),
    ("n", 0, None),
    ("n", 10**6, None),
    ("stream", "yes", None),
    ("stream_options", {}, None),
    ("response_format", {"type": "json_object"}, None),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, None),
    ("best_of", 5, None),
    ("echo", True, None),
    ("cache_salt", "", None),
    ("request_id", "a b", None),
]
CHAT_ONLY = [
    ("messages", [], None),
    ("messages", "hi", None),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}], "messages[0].content[1]"),
    ("top_logprobs", 3, None),
    ("reasoning_effort", "extreme", None),
    ("chat_template_kwargs", {"reasoning_effort": "max"}, "chat_template_kwargs.reasoning_effort"),
    ("tools", [{"type": "function", "function": {"name": "no spaces"}}], "tools[0].function.name"),
    ("tool_choice", "required", None),
    ("continue_final_message", True, None),
    ("functions", [TOOL["function"]], None),
    ("audio", {"voice": "x"}, None),
]
TEXT_ONLY = [
    ("prompt", [], None),
    ("prompt", "", None),
    ("prompt", [10**9], "prompt[0]"),
    ("prompt", [[1], [-1]], "prompt[1][0]"),
    ("prompt", ["a"] * 1000, None),
    ("suffix", "x", None),
    ("logprobs", 21, None),
]
CASES = [
    *[("/v1/chat/completions", CHAT, *case) for case in COMMON + CHAT_ONLY],
    *[("/v1/completions", TEXT, *case) for case in COMMON + TEXT_ONLY],
]


def expect_error(status, body, param):
    assert status in (400, 404), body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert len(error["message"]) > 15


@pytest.mark.parametrize("path,base,field,value,param", CASES)
def test_bad_field(api_server, path, base, field, value, param):
    status, body = api_server.post(path, {**base, field: value})
    expect_error(status, body, param or field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{} {}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff\xfe"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"prompt": [' + b"0," * 3_000_000 + b"0]}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_bad_body(api_server, path, body):
    status, _, answer = api_server.request("POST", path, body)
    expect_error(status, json.loads(answer), None)


def test_prompt_longer_than_the_model(api_server):
    for path, body, param in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "goat " * 200_000}]}, "messages"),
        ("/v1/completions", {"prompt": "goat " * 200_000}, "prompt"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 2**30}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2**30}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 2**30}, "max_completion_tokens"),
    ):
        status, answer = api_server.post(path, body)
        expect_error(status, answer, param)
        assert answer["error"]["code"] == "context_length_exceeded"


def test_unknown_model_is_404(api_server):
    status, answer = api_server.post("/v1/chat/completions", {**CHAT, "model": "nobody"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_a_body_over_the_limit_is_413(api_server):
    status, _, answer = api_server.request("POST", "/v1/completions", b" " * (9 << 20))
    assert status == 413 and json.loads(answer)["error"]["message"]


def test_a_form_is_no_json(api_server):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    status, _, answer = api_server.request("POST", "/v1/completions", b"prompt=x", headers)
    assert status == 415 and json.loads(answer)["error"]["message"]


def test_the_server_still_answers(api_server):
    status, answer = api_server.post("/v1/chat/completions", CHAT)
    assert status == 200 and answer["usage"]["completion_tokens"] == 2
    api_server.wait_idle()
