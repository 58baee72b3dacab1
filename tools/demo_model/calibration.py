#!/usr/bin/env python3
"""Writes the calibration file of the demonstration model: conversations of the corpus as JSON lines for `tessera
quantize`, without books and by a seed of its own, apart from training and from the task sets."""

import argparse
import json
import random

import corpus
from data import pick_effort


def wire_form(message):
    """OpenAI's form: the arguments of a call are a JSON string; absent members are left out."""
    out = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in out:
        out["tool_calls"] = [
            {"type": "function", "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
            for c in out["tool_calls"]
        ]
        out.setdefault("content", None)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=20260)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--words", type=int, default=500, help="of the longest text to recall from")
    arguments = parser.parse_args()
    r = random.Random(arguments.seed)
    for _ in range(arguments.count):
        messages, tools = corpus.conversation(r, [], arguments.words, needle_share=0.2)
        line = {"messages": [wire_form(message) for message in messages]}
        if tools:
            line["tools"] = tools
        line["kwargs"] = {"reasoning_effort": pick_effort(r, messages), "preserved_thinking": True}
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
