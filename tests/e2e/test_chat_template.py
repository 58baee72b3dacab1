"""models/demo/chat_template.jinja, rendered as transformers does, against tests/golden/data/template.jsonl."""

import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "models" / "demo" / "chat_template.jinja").read_text(encoding="utf-8")
SUFFIX_LINE = "{%- set suffix = ':opensource' -%}"
CASES = [json.loads(line) for line in (ROOT / "tests" / "golden" / "data" / "template.jsonl").open(encoding="utf-8")]


def compile_template(suffix):
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    assert TEMPLATE.count(SUFFIX_LINE) == 1
    return environment.from_string(TEMPLATE.replace(SUFFIX_LINE, SUFFIX_LINE.replace(":opensource", suffix)))


COMPILED = {suffix: compile_template(suffix) for suffix in {case["suffix"] for case in CASES}}


def with_parsed_arguments(messages):
    """Clients send a call's arguments as a JSON string; the template takes the object."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_template(case):
    variables = {"messages": with_parsed_arguments(case["messages"]), "tools": case["tools"], **case["kwargs"]}
    template = COMPILED[case["suffix"]]
    if "error" in case:
        with pytest.raises(jinja2.exceptions.TemplateError) as raised:
            template.render(**variables)
        assert str(raised.value) == case["error"]
    else:
        assert template.render(**variables) == case["text"]


def test_cases_are_there():
    assert len(CASES) == 183 and len(COMPILED) == 3
