"""A strict checker of streamed completions: what clients depend on, one rule a line of `check_stream`.

    checker = SseChecker(chat=True, include_usage=True)
    checker.feed(bytes)         # in any pieces
    problems = checker.finish_stream()  # [] when the stream kept its contract

The rules: data events of one JSON line each, comments between them; one id, model and created time; the first chunk of
a choice of a chat has the role; content chunks have a null finish_reason; the finish reason comes alone, once for each
choice, and is never ""; with include_usage exactly one more chunk with no choices and the usage, the others with a null
usage; errors as {"error": {message, type, code}}; [DONE] last, always.
"""

import json

FINISH_REASONS = {"stop", "length", "tool_calls", "abort", "error", "content_filter"}


class SseChecker:
    def __init__(self, chat, include_usage=False, choices=1):
        self.chat, self.include_usage, self.choices = chat, include_usage, choices
        self.problems = []
        self.text = {}  # choice index -> content
        self.reasoning = {}
        self.finish = {}  # choice index -> finish_reason
        self.calls = {}  # (choice index, call index) -> {"id", "name", "arguments"}
        self.usage = None
        self.error = None
        self.pings = 0
        self.done = False
        self._pending = b""
        self._event = []
        self._head = None
        self._role_seen = set()

    def feed(self, data):
        self._pending += data
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            self._line(line)

    def finish_stream(self):
        """The problems found, after the body's last byte."""
        if self._pending or self._event:
            self._problem("the stream ends inside an event")
        if not self.done:
            self._problem("no [DONE]")
        if self.error is None:
            for index in range(self.choices):
                if index not in self.finish:
                    self._problem(f"choice {index} has no finish_reason")
            if self.include_usage and self.usage is None:
                self._problem("no usage chunk")
            for key, call in self.calls.items():
                self._check_call(key, call)
        return self.problems

    def _problem(self, what):
        self.problems.append(what)

    def _line(self, line):
        if line.endswith(b"\r"):
            self._problem("a line ends in CR LF")
        elif line.startswith(b":"):
            self.pings += 1
        elif line.startswith(b"data: "):
            self._event.append(line[6:])
        elif line:
            self._problem(f"a line that is neither data nor a comment: {line[:80]!r}")
        elif self._event:
            if len(self._event) > 1:
                self._problem("an event of more than one data line")
            self._data(self._event[0])
            self._event = []

    def _data(self, data):
        if self.done:
            self._problem("an event after [DONE]")
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(data, parse_constant=lambda name: self._problem(f"{name} in JSON"))
        except ValueError:
            self._problem(f"an event is no JSON: {data[:80]!r}")
            return
        if not isinstance(chunk, dict):
            self._problem("an event is no JSON object")
        elif self.error is not None:
            self._problem("an event other than [DONE] after an error")
        elif "error" in chunk:
            self._error(chunk["error"])
        else:
            self._chunk(chunk)

    def _error(self, error):
        self.error = error
        if not isinstance(error, dict) or not {"message", "type", "code"} <= error.keys():
            self._problem(f"an error without message, type and code: {error!r}")

    def _chunk(self, chunk):
        head = tuple(chunk.get(key) for key in ("id", "model", "created", "object"))
        if self._head is None:
            self._head = head
            if None in head:
                self._problem(f"id, model, created or object is missing: {head}")
            if head[3] != ("chat.completion.chunk" if self.chat else "text_completion"):
                self._problem(f"object is {head[3]!r}")
        elif head != self._head:
            self._problem(f"id, model, created or object changes: {self._head} to {head}")
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            self._problem("choices is no list")
        elif choices:
            self._content_chunk(chunk, choices)
        else:
            self._usage_chunk(chunk)

    def _content_chunk(self, chunk, choices):
        if self.usage is not None:
            self._problem("a choice after the usage chunk")
        if chunk.get("usage") is not None:
            self._problem("usage in a chunk that has choices")
        if self.include_usage and "usage" not in chunk:
            self._problem("with include_usage every chunk has a usage member")
        for choice in choices:
            self._choice(choice)

    def _usage_chunk(self, chunk):
        if not self.include_usage:
            self._problem("a usage chunk that was not asked for")
        if self.usage is not None:
            self._problem("a second usage chunk")
        self.usage = chunk.get("usage")
        usage = self.usage if isinstance(self.usage, dict) else {}
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens", "total_tokens")]
        if not all(isinstance(count, int) and count >= 0 for count in counts) or counts[0] + counts[1] != counts[2]:
            self._problem(f"usage does not add up: {self.usage!r}")

    def _choice(self, choice):
        index, reason = choice.get("index"), choice.get("finish_reason")
        if not isinstance(index, int) or not 0 <= index < self.choices:
            self._problem(f"choice index {index!r}")
            return
        if index in self.finish:
            self._problem(f"choice {index} goes on after its finish_reason")
        if "finish_reason" not in choice:
            self._problem("a choice without a finish_reason member")
        carries = self._delta(index, choice.get("delta")) if self.chat else self._text(index, choice)
        if reason is not None:
            if reason not in FINISH_REASONS:
                self._problem(f"finish_reason {reason!r}")
            if carries:
                self._problem("a finish_reason on a chunk with content")
            self.finish[index] = reason

    def _text(self, index, choice):
        text = choice.get("text")
        if not isinstance(text, str):
            self._problem(f"text is {text!r}")
            return False
        self.text[index] = self.text.get(index, "") + text
        return bool(text)

    def _delta(self, index, delta):
        """True when the delta carries anything but the role."""
        if not isinstance(delta, dict):
            self._problem(f"delta is {delta!r}")
            return False
        if index not in self._role_seen:
            self._role_seen.add(index)
            if delta.get("role") != "assistant":
                self._problem(f"the first delta of choice {index} has no role")
        elif "role" in delta:
            self._problem("a second role")
        content, reasoning = delta.get("content"), delta.get("reasoning_content")
        if reasoning != delta.get("reasoning"):
            self._problem("reasoning and reasoning_content differ")
        self.text[index] = self.text.get(index, "") + (content or "")
        self.reasoning[index] = self.reasoning.get(index, "") + (reasoning or "")
        for call in delta.get("tool_calls") or []:
            self._call(index, call)
        return bool(content or reasoning or delta.get("tool_calls"))

    def _call(self, index, call):
        key, function = (index, call.get("index")), call.get("function") or {}
        if key not in self.calls:
            if not call.get("id") or call.get("type") != "function" or not function.get("name"):
                self._problem(f"the first delta of a tool call needs id, type and name: {call!r}")
            self.calls[key] = {"id": call.get("id"), "name": function.get("name"), "arguments": ""}
        elif "id" in call or "name" in function:
            self._problem("a later delta of a tool call repeats id or name")
        self.calls[key]["arguments"] += function.get("arguments") or ""

    def _check_call(self, key, call):
        if self.finish.get(key[0]) not in ("tool_calls", "stop"):
            return  # cut by a limit: its arguments may be cut too
        try:
            if not isinstance(json.loads(call["arguments"]), dict):
                self._problem(f"tool call arguments are no object: {call['arguments'][:80]!r}")
        except ValueError:
            self._problem(f"tool call arguments are no JSON: {call['arguments'][:80]!r}")


def check_stream(body, **expected):
    """The problems of a whole body."""
    checker = SseChecker(**expected)
    checker.feed(body)
    return checker.finish_stream()
