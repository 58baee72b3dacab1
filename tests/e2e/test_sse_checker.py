"""The checker itself: a stream that keeps the contract, and one for each way of breaking it."""

import json

import pytest
from sse_checker import SseChecker, check_stream

HEAD = {"id": "chatcmpl-1", "model": "m", "created": 1, "object": "chat.completion.chunk", "usage": None}
DONE = b"data: [DONE]\n\n"


def event(chunk):
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def choice(delta, finish_reason=None, **head):
    return event(HEAD | head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


ROLE = choice({"role": "assistant", "content": ""})
TEXT = choice({"content": "x"})
FINISH = choice({}, "stop")
USAGE = event(HEAD | {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}})
CALL = choice({"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]})


def arguments(text):
    return choice({"tool_calls": [{"index": 0, "function": {"arguments": text}}]})


@pytest.mark.parametrize(
    "body",
    [
        ROLE + b": ping\n\n" + TEXT + TEXT + FINISH + USAGE + DONE,
        ROLE + CALL + arguments('{"a":') + arguments("1}") + choice({}, "tool_calls") + USAGE + DONE,
        ROLE + event({"error": {"message": "m", "type": "t", "code": 500}}) + DONE,
    ],
)
def test_streams_that_keep_the_contract(body):
    assert check_stream(body, chat=True, include_usage=True) == []
    checker = SseChecker(chat=True, include_usage=True)
    for byte in body:
        checker.feed(bytes([byte]))
    assert checker.finish_stream() == []


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (ROLE + TEXT + FINISH + USAGE, "no [DONE]"),
        (ROLE + TEXT + FINISH + DONE, "no usage chunk"),
        (ROLE + TEXT + USAGE + DONE, "no finish_reason"),
        (TEXT + FINISH + USAGE + DONE, "no role"),
        (ROLE + choice({"content": "x"}, "stop") + USAGE + DONE, "with content"),
        (ROLE + choice({}, "") + USAGE + DONE, "finish_reason ''"),
        (ROLE + FINISH + TEXT + USAGE + DONE, "goes on"),
        (ROLE + FINISH + USAGE + USAGE + DONE, "second usage"),
        (ROLE + FINISH + USAGE + DONE + TEXT, "after [DONE]"),
        (ROLE + choice({"content": "x"}, id="other") + FINISH + USAGE + DONE, "changes"),
        (ROLE + CALL + arguments("{") + choice({}, "tool_calls") + USAGE + DONE, "no JSON"),
        (ROLE + b"data: {\n\n" + FINISH + USAGE + DONE, "no JSON"),
        (ROLE + b"event: x\n\n" + FINISH + USAGE + DONE, "neither data nor a comment"),
        (ROLE + event({"error": "lost"}) + DONE, "error without"),
        (ROLE + b"data: {", "inside an event"),
    ],
)
def test_streams_that_break_it(body, word):
    assert any(word in problem for problem in check_stream(body, chat=True, include_usage=True))
