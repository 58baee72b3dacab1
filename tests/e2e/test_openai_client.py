"""The real OpenAI client, unmodified, against the server with the demonstration model."""

import json
import math

import openai
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIMER = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Start a timer.",
        "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
    },
}
PAGE = 64  # tokens of a cache page


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def chat(client, model):
    """chat.completions.create with greedy decoding."""

    def create(messages, **arguments):
        if isinstance(messages, str):
            messages = [user(messages)]
        return client.chat.completions.create(
            **{"model": model, "messages": messages, "temperature": 0, "max_tokens": 200, **arguments}
        )

    return create


def join(stream):
    """A chat stream put together, checked against the contract on the way."""
    joined = {"content": {}, "reasoning": {}, "calls": {}, "finish": {}, "usage": None}
    identity = None
    for chunk in stream:
        identity = identity or (chunk.id, chunk.created, chunk.model)
        assert (chunk.id, chunk.created, chunk.model) == identity
        if not chunk.choices:
            assert joined["usage"] is None
            joined["usage"] = chunk.usage
            continue
        choice = chunk.choices[0]
        assert choice.index not in joined["finish"], "a chunk after the finish chunk"
        if choice.index not in joined["content"]:
            assert (choice.delta.role, choice.delta.content) == ("assistant", "")
            joined["content"][choice.index] = joined["reasoning"][choice.index] = ""
            continue
        if choice.finish_reason is not None:
            assert choice.finish_reason and not choice.delta.model_dump(exclude_none=True)
            joined["finish"][choice.index] = choice.finish_reason
        joined["content"][choice.index] += choice.delta.content or ""
        joined["reasoning"][choice.index] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            known = joined["calls"].setdefault((choice.index, call.index), {"arguments": ""})
            if len(known) == 1:
                assert call.id and call.type == "function" and call.function.name
                known.update(id=call.id, name=call.function.name)
            else:
                assert call.id is None and call.function.name is None
            known["arguments"] += call.function.arguments
    assert joined["finish"].keys() == joined["content"].keys()
    return joined


def test_models(client):
    models = client.models.list().data
    assert models and models[0].max_model_len > 0
    assert client.models.retrieve(models[0].id).id == models[0].id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_streamed_chat_equals_the_whole_answer(chat):
    question = "Who are you?"
    whole = chat(question)
    joined = join(chat(question, stream=True, stream_options={"include_usage": True}))
    assert joined["content"][0] == whole.choices[0].message.content
    assert "demonstration model" in joined["content"][0] or joined["content"][0]
    assert joined["finish"][0] == whole.choices[0].finish_reason == "stop"
    assert joined["usage"].completion_tokens == whole.usage.completion_tokens
    assert joined["usage"].total_tokens == whole.usage.total_tokens


def test_right_answers(chat):
    assert "Reykjavik" in chat("What is the capital of Iceland?").choices[0].message.content


def test_reasoning_effort(chat):
    question = "What is 47 plus 38?"
    quick = chat(question).choices[0].message
    assert not getattr(quick, "reasoning_content", None)
    for effort in ("low", "medium", "high"):
        message = chat(question, reasoning_effort=effort).choices[0].message
        assert message.reasoning_content and message.reasoning == message.reasoning_content
        assert "85" in message.content
    off = chat(question, reasoning_effort="minimal").choices[0].message
    assert off.content == quick.content
    by_kwargs = chat(question, extra_body={"chat_template_kwargs": {"reasoning_effort": "high"}}).choices[0].message
    assert by_kwargs.reasoning_content
    joined = join(chat(question, reasoning_effort="high", stream=True))
    assert joined["reasoning"][0] == by_kwargs.reasoning_content
    assert joined["content"][0] == by_kwargs.content


@pytest.mark.parametrize("stream", [False, True])
def test_tools_round_trip(chat, stream):
    messages = [user("What is the weather in Lisbon?")]
    if stream:
        joined = join(chat(messages, tools=[WEATHER], stream=True))
        (call,) = joined["calls"].values()
        finish, name, arguments, call_id = joined["finish"][0], call["name"], call["arguments"], call["id"]
        messages.append(
            {
                "role": "assistant",
                "content": joined["content"][0],
                "tool_calls": [
                    {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                ],
            }
        )
    else:
        choice = chat(messages, tools=[WEATHER]).choices[0]
        (call,) = choice.message.tool_calls
        finish, name, arguments, call_id = (
            choice.finish_reason,
            call.function.name,
            call.function.arguments,
            call.id,
        )
        messages.append(choice.message.model_dump())
    assert (finish, name, json.loads(arguments)) == ("tool_calls", "get_weather", {"city": "Lisbon"})
    result = json.dumps({"weather": "sunny", "temperature": 21})
    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    final = chat(messages, tools=[WEATHER]).choices[0]
    assert final.finish_reason == "stop" and not final.message.tool_calls
    assert "Lisbon" in final.message.content and "21" in final.message.content


def test_forced_tool_choice(chat):
    question = "What is the capital of Iceland?"
    for effort in ("none", "high"):
        required = chat(question, tools=[WEATHER, TIMER], tool_choice="required", reasoning_effort=effort)
        assert required.choices[0].message.tool_calls[0].function.name
        named = chat(
            question,
            tools=[WEATHER, TIMER],
            tool_choice={"type": "function", "function": {"name": "set_timer"}},
            reasoning_effort=effort,
        )
        (call,) = named.choices[0].message.tool_calls
        assert call.function.name == "set_timer"
        assert isinstance(json.loads(call.function.arguments), dict)
    # The demonstration model would choose another tool.
    single = chat(question, tools=[WEATHER], tool_choice="required", temperature=0, reasoning_effort="none")
    assert single.choices[0].message.tool_calls[0].function.name == "get_weather"
    free = chat("What is the weather in Lisbon?", tools=[WEATHER], tool_choice="none")
    assert not free.choices[0].message.tool_calls


def test_logprobs(chat):
    answer = chat("What is the capital of Iceland?", logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert math.isfinite(entry.logprob) and entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs)
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the most probable"
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.startswith(answer.choices[0].message.content)
    stream = chat("What is the capital of Iceland?", logprobs=True, top_logprobs=3, stream=True)
    streamed = []
    for chunk in stream:
        if chunk.choices and chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_n_and_seed(chat):
    arguments = {"n": 2, "temperature": 1.0, "seed": 7, "max_tokens": 24}
    first = chat("Tell me a story about an owl.", **arguments)
    again = chat("Tell me a story about an owl.", **arguments)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert texts == [choice.message.content for choice in again.choices]
    joined = join(
        chat("Tell me a story about an owl.", stream=True, stream_options={"include_usage": True}, **arguments)
    )
    assert [joined["content"][0], joined["content"][1]] == texts
    assert joined["usage"].completion_tokens == first.usage.completion_tokens
    assert joined["usage"].prompt_tokens == first.usage.prompt_tokens


def test_stop(chat):
    question = "What is the capital of Iceland?"
    whole = chat(question).choices[0].message.content
    stop = whole[len(whole) // 2 :][:4]
    cut = chat(question, stop=[stop, "never said"])
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)
    assert chat(question).choices[0].stop_reason is None
    shown = chat(question, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert shown.choices[0].message.content == whole[: whole.index(stop) + len(stop)]
    assert join(chat(question, stop=stop, stream=True))["content"][0] == whole[: whole.index(stop)]
    short = chat(question, max_tokens=2)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 2)


def test_sampling_fields_are_taken(chat):
    question = "What is the capital of Iceland?"
    greedy = chat(question, logprobs=True)
    first = greedy.choices[0].logprobs.content[0].token
    ids = chat(question, max_tokens=1, extra_body={"return_token_ids": True})
    (token_id,) = ids.choices[0].token_ids
    assert len(ids.prompt_token_ids) == ids.usage.prompt_tokens
    banned = chat(question, logit_bias={str(token_id): -100}, logprobs=True)
    assert banned.choices[0].logprobs.content[0].token != first
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "min_tokens": 2, "stop_token_ids": [5]}
    same = chat(
        question,
        temperature=1.0,
        top_p=0.9,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        extra_body=extra,
    )
    assert same.choices[0].message.content == greedy.choices[0].message.content, "top_k 1 is greedy"
    long = chat(question, max_tokens=40, extra_body={"ignore_eos": True})
    assert (long.usage.completion_tokens, long.choices[0].finish_reason) == (40, "length")


def test_a_cancelled_stream_frees_the_engine(chat, api_server):
    for _ in range(3):
        stream = chat("Tell me a story.", stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
        for _, chunk in zip(range(5), stream):
            assert chunk.choices
        stream.close()
    api_server.wait_idle()
    assert chat("Who are you?").choices[0].message.content


def test_three_turns_with_tools_reuse_the_previous_pages(chat, api_server):
    """What we answered and the client sends back is rendered to the tokens that were generated, so each turn finds every
    whole page of the prompt before it (and of the answer)."""
    system = {"role": "system", "content": "You are a helpful assistant. " + "Answer in short sentences. " * 20}
    messages = [system, user("What is the weather in Lisbon?")]
    before = 0
    for turn in range(3):
        answer = chat(messages, tools=[WEATHER], reasoning_effort="low")
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached >= before // PAGE * PAGE, f"turn {turn}"
        before = answer.usage.prompt_tokens
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if message.tool_calls:
            result = json.dumps({"weather": "sunny", "temperature": 21})
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": result} for call in message.tool_calls
            ]
        else:
            messages.append(user("What is the weather in Oslo?"))
    assert before > 3 * PAGE


def test_content_parts_and_developer_role(chat):
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of Iceland?"}]
    answer = chat([{"role": "developer", "content": "You are a helpful assistant."}, {"role": "user", "content": parts}])
    plain = chat([{"role": "system", "content": "You are a helpful assistant."}, user("What is the capital of Iceland?")])
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_continue_final_message(chat):
    answer = chat(
        [user("What is the capital of Iceland?"), {"role": "assistant", "content": "The capital of"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert answer.choices[0].message.content.startswith(" Iceland")


def test_completions(client, model, api_server):
    text = "Once upon a time there was a"
    status, tokens = api_server.post("/tokenize", {"prompt": text})
    assert status == 200 and tokens["count"] == len(tokens["tokens"])
    assert api_server.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": text})

    def complete(prompt, **arguments):
        return client.completions.create(
            **{"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12, **arguments}
        )

    by_text, by_ids = complete(text), complete(tokens["tokens"])
    assert by_text.choices[0].text == by_ids.choices[0].text
    several = complete([tokens["tokens"], tokens["tokens"][:3]], n=2, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text == by_text.choices[0].text
    assert several.usage.prompt_tokens == tokens["count"] + 3
    scored = complete(text, logprobs=2).choices[0].logprobs
    assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.text_offset) == len(scored.top_logprobs)
    assert all(2 <= len(top) <= 3 for top in scored.top_logprobs)
    streamed = "".join(chunk.choices[0].text for chunk in complete(text, stream=True))
    assert streamed == by_text.choices[0].text


def test_chat_form_of_tokenize(api_server, chat):
    question = [user("What is the weather in Lisbon?")]
    _, tokens = api_server.post("/tokenize", {"messages": question, "tools": [WEATHER]})
    assert tokens["count"] == chat(question, tools=[WEATHER]).usage.prompt_tokens
