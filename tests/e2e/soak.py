#!/usr/bin/env python3
"""Soak test of a running server: many streams at once, with cancellations, malformed requests and slow readers among
them. Needs the standard library alone.

Every stream must keep the contract that sse_checker.py states, malformed requests must get a 4xx in OpenAI's error form,
nothing may hang or answer 5xx, /health must answer in time throughout (asked by a process of its own), and afterwards no
request may be left in the engine and cache usage must be what it was. Prints one JSON summary; status 1 on a violation.

example:
    build/release/tessera serve models/demo --port 8000 &
    python3 tests/e2e/soak.py --port 8000 --streams 64 --seconds 300
"""

import argparse
import asyncio
import collections
import http.client
import json
import multiprocessing
import random
import socket
import sys
import time

from sse_checker import SseChecker

REQUEST_S_MAX = 180.0  # a request that takes longer hangs
SLOW_READER_S_MAX = 20.0
IDLE_WAIT_S = 60.0
HEALTH_PERIOD_S = 0.1
REFUSED = {429, 503}  # a full server may say so

PROMPTS = [
    "Hello!",
    "What is 17 + 25?",
    "What is the capital of Portugal?",
    "Sort these words: pear, apple, fig.",
    "Write a Python function that adds two numbers.",
    "Tell me a short story about a lighthouse. " * 8,
    "\u4f60\u597d, caf\u00e9, \U0001f600!",
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
BAD_FIELDS = [
    {"temperature": "hot"},
    {"temperature": -1},
    {"top_p": 0},
    {"max_tokens": 0},
    {"max_tokens": 10**12},
    {"n": 0},
    {"n": 10**6},
    {"stop": 5},
    {"logit_bias": {"99999999": 1}},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user", "content": "word " * 60000}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"tools": 1},
    {"tool_choice": "sometimes"},
    {"stream": "yes"},
    {"top_logprobs": 99, "logprobs": True},
    {"model": "no-such-model"},
]
BAD_BODIES = [b"", b"{", b"[]", b"null", b'{"model": NaN}', b"\xff\xfe", b"[" * 500, b'{"a":1}{"b":2}']


class Answer:
    """One HTTP exchange; `body()` gives the pieces of the body as they come."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.status, self.headers = 0, {}

    async def read_head(self):
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(head[0].split(" ")[1])
        for line in head[1:]:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()

    async def body(self):
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            return
        left = int(self.headers.get("content-length", 1 << 62))
        while left > 0 and (piece := await self.reader.read(min(left, 65536))):
            left -= len(piece)
            yield piece

    def close(self):
        self.writer.close()


class Soak:
    def __init__(self, args):
        self.args = args
        self.random = random.Random(args.seed)
        self.counts = collections.Counter()
        self.violations = []
        self.model = ""

    def violation(self, what):
        self.counts["violations"] += 1
        if len(self.violations) < 20:
            self.violations.append(what)

    async def open(self, method, path, body, receive_bytes=0):
        """Sends a request and reads the answer's head; body = an object, or raw bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        raw.setblocking(False)
        if receive_bytes:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(raw, (self.args.host, self.args.port))
        except BaseException:
            raw.close()
            raise
        reader, writer = await asyncio.open_connection(sock=raw, limit=receive_bytes or 1 << 16)
        key = f"Authorization: Bearer {self.args.api_key}\r\n" if self.args.api_key else ""
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: {self.args.host}:{self.args.port}\r\n{key}Connection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        answer = Answer(reader, writer)
        try:
            await writer.drain()
            await answer.read_head()
        except BaseException:
            answer.close()
            raise
        return answer

    def chat_request(self, **changes):
        pick = self.random
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": pick.choice(PROMPTS)}],
            "max_tokens": pick.choice([1, 2, 16, 32, 64, 128]),
            "temperature": pick.choice([0, 0.7, 1.0]),
            "seed": pick.randrange(1 << 31),
            "stream": True,
        }
        if pick.random() < 0.5:
            request["stream_options"] = {"include_usage": True}
        if pick.random() < 0.1:
            request["n"] = 2
        if pick.random() < 0.2:
            request["tools"] = [WEATHER]
            request["messages"][0]["content"] = "What is the weather in Lisbon?"
        if pick.random() < 0.2:
            request["reasoning_effort"] = pick.choice(["no_think", "low", "high"])
        if pick.random() < 0.2:
            request["stop"] = ["e", "the"]
        if pick.random() < 0.1:
            request["logprobs"] = True
        return request | changes

    def completion_request(self):
        request = self.chat_request()
        for key in ("messages", "tools", "reasoning_effort", "logprobs"):
            request.pop(key, None)
        prompt = self.random.choice(PROMPTS)
        if self.random.random() < 0.5:
            prompt = [self.random.randrange(256, 1000) for _ in range(self.random.choice([1, 64, 65, 300]))]
        return request | {"prompt": prompt}

    def stream_request(self):
        if self.random.random() < 0.7:
            return "/v1/chat/completions", self.chat_request()
        return "/v1/completions", self.completion_request()

    async def whole_stream(self):
        await self.read_stream("streamed", *self.stream_request())

    async def cancelled_stream(self):
        path, request = self.stream_request()
        request["max_tokens"] = 512
        await self.read_stream("cancelled", path, request, cancel_after_s=self.random.choice([0, 0.01, 0.1, 0.5, 2.0]))

    async def slow_reader(self):
        """Reads a few bytes at a time; the server may cut it at its bounded write queue."""
        path, request = self.stream_request()
        request["max_tokens"] = 256
        answer = await self.open("POST", path, request, receive_bytes=2048)
        deadline = time.monotonic() + SLOW_READER_S_MAX
        try:
            while time.monotonic() < deadline and await answer.reader.read(64):
                await asyncio.sleep(self.random.random() * 0.4)
        except ConnectionError:
            self.counts["slow_cut"] += 1
        finally:
            answer.close()
        self.counts["slow"] += 1

    async def read_stream(self, kind, path, request, cancel_after_s=None):
        """Reads a stream through the checker, or leaves it after a while."""
        deadline = None if cancel_after_s is None else time.monotonic() + cancel_after_s
        answer = await self.open("POST", path, request)
        try:
            if answer.status != 200:
                await self.check_refusal(kind, answer)
                return
            checker = SseChecker(
                chat="messages" in request, include_usage="stream_options" in request, choices=request.get("n", 1)
            )
            async for piece in answer.body():
                checker.feed(piece)
                if deadline is not None and time.monotonic() >= deadline:
                    self.counts["cancelled"] += 1
                    return
            for problem in checker.finish_stream():
                self.violation(f"{path} {json.dumps(request)[:200]}: {problem}")
            self.counts["streamed"] += 1
            self.counts["output_tokens"] += (checker.usage or {}).get("completion_tokens", 0)
            if checker.error is not None:
                self.violation(f"{path}: error in the stream: {checker.error}")
        finally:
            answer.close()

    async def check_refusal(self, kind, answer):
        body = b"".join([piece async for piece in answer.body()])
        if answer.status not in REFUSED:
            self.violation(f"{kind}: HTTP {answer.status}: {body[:200]!r}")
            return
        self.counts[f"refused_{answer.status}"] += 1
        if answer.status == 429 and "retry-after" not in answer.headers:
            self.violation("429 without Retry-After")
        await asyncio.sleep(0.2)

    async def plain_request(self):
        answer = await self.open("POST", "/v1/chat/completions", self.chat_request(stream=False, stream_options=None))
        try:
            if answer.status != 200:
                await self.check_refusal("plain", answer)
                return
            body = json.loads(b"".join([piece async for piece in answer.body()]))
            if not all(choice["finish_reason"] for choice in body["choices"]) or "usage" not in body:
                self.violation(f"a plain answer without finish_reason or usage: {json.dumps(body)[:200]}")
            self.counts["plain"] += 1
        finally:
            answer.close()

    async def malformed_request(self):
        path = self.random.choice(["/v1/chat/completions", "/v1/completions"])
        if self.random.random() < 0.4:
            body = self.random.choice(BAD_BODIES)
        else:
            path = "/v1/chat/completions"
            body = self.chat_request(**self.random.choice(BAD_FIELDS))
        answer = await self.open("POST", path, body)
        try:
            data = b"".join([piece async for piece in answer.body()])
            if not 400 <= answer.status < 500:
                self.violation(f"malformed {str(body)[:200]}: HTTP {answer.status}")
            elif not isinstance(json.loads(data).get("error", {}).get("message"), str):
                self.violation(f"malformed {str(body)[:200]}: no error message: {data[:200]!r}")
            self.counts["malformed"] += 1
        finally:
            answer.close()

    async def broken_connection(self):
        """A request that stops in the middle."""
        _, writer = await asyncio.open_connection(self.args.host, self.args.port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
        writer.write(head[: self.random.randrange(1, len(head))])
        await writer.drain()
        await asyncio.sleep(self.random.random() * 0.2)
        writer.close()
        self.counts["broken"] += 1

    async def worker(self, until):
        kinds = [self.whole_stream, self.cancelled_stream, self.plain_request, self.malformed_request]
        kinds += [self.slow_reader, self.broken_connection]
        while time.monotonic() < until:
            (kind,) = self.random.choices(kinds, weights=[50, 20, 8, 14, 4, 4])
            self.counts["requests"] += 1
            try:
                await asyncio.wait_for(kind(), REQUEST_S_MAX)
            except asyncio.TimeoutError:
                self.violation(f"{kind.__name__}: not over after {REQUEST_S_MAX:.0f} s")
            except (OSError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
                self.violation(f"{kind.__name__}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def run(self):
        until = time.monotonic() + self.args.seconds
        await asyncio.gather(*(self.worker(until) for _ in range(self.args.streams)))


def get(args, path, timeout_s=30.0):
    connection = http.client.HTTPConnection(args.host, args.port, timeout=timeout_s)
    try:
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def metric(args, name):
    lines = [line for line in get(args, "/metrics")[1].splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines) if lines else None


def state(args):
    names = {"running": "num_requests_running", "waiting": "num_requests_waiting", "cache_usage": "kv_cache_usage_perc"}
    return {key: metric(args, "vllm:" + name) for key, name in names.items()}


def probe_health(args, stop, results):
    """A process of its own, so that the soak's own work does not delay it."""
    times_ms, failures = [], []
    while not stop.is_set():
        started = time.perf_counter()
        try:
            status, _ = get(args, "/health", timeout_s=10.0)
            if status != 200:
                failures.append(f"HTTP {status}")
        except OSError as error:
            failures.append(repr(error))
        times_ms.append((time.perf_counter() - started) * 1e3)
        time.sleep(HEALTH_PERIOD_S)
    results.put((times_ms, failures))


def health_summary(times_ms, failures, limit_ms):
    ordered = sorted(times_ms) or [0.0]
    return {
        "count": len(times_ms),
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 2),
        "max": round(ordered[-1], 2),
        "over_limit": sum(time_ms > limit_ms for time_ms in times_ms),
        "failures": len(failures),
    }


def check_afterwards(soak, args, before):
    """Waits until the engine is empty; its state then."""
    deadline = time.monotonic() + IDLE_WAIT_S
    after = state(args)
    while time.monotonic() < deadline and (after["running"] or after["waiting"]):
        time.sleep(0.1)
        after = state(args)
    if None in after.values():
        soak.violation(f"/metrics lacks a gauge: {after}")
    elif after["running"] or after["waiting"]:
        soak.violation(f"requests left in the engine: {after}")
    elif after["cache_usage"] > before["cache_usage"] + 1e-9:
        soak.violation(f"cache usage was {before['cache_usage']}, is {after['cache_usage']}: pages leak")
    return after


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--streams", type=int, default=64, help="requests at once (64)")
    parser.add_argument("--seconds", type=float, default=300, help="how long new requests are made (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--health-limit-ms", type=float, default=50, help="slowest answer of /health allowed (50)")
    return parser.parse_args()


def main():
    args = parse_arguments()
    soak = Soak(args)
    try:
        soak.model = json.loads(get(args, "/v1/models")[1])["data"][0]["id"]
    except OSError as error:
        sys.exit(f"no server answers at {args.host}:{args.port} ({error}): start `tessera serve` first, or give --port")
    before = state(args)
    if None in before.values():
        sys.exit(f"/metrics lacks a gauge: {before}")
    context = multiprocessing.get_context("fork")
    stop, results = context.Event(), context.Queue()
    probe = context.Process(target=probe_health, args=(args, stop, results))
    probe.start()
    try:
        asyncio.run(soak.run())
    finally:
        stop.set()
        times_ms, failures = results.get()
        probe.join()
    health = health_summary(times_ms, failures, args.health_limit_ms)
    if health["over_limit"] or failures:
        soak.violation(f"/health: {health['over_limit']} answers over {args.health_limit_ms} ms; failures {failures[:3]}")
    after = check_afterwards(soak, args, before)
    summary = {"seconds": args.seconds, "streams": args.streams, "seed": args.seed, **soak.counts}
    summary |= {"health_ms": health, "before": before, "after": after}
    summary |= {"violation_count": soak.counts["violations"], "violations": soak.violations}
    print(json.dumps(summary))
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
