"""A stand-in for the server: the page's files under the same Content-Security-Policy, and answers that a test scripts."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WEB = Path(__file__).resolve().parents[2] / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# test_page.py checks that the real server sends the same.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
STATS = {
    "running": 1,
    "waiting": 0,
    "tokens_per_s": 42.5,
    "ttft_s": 0.031,
    "tpot_s": 0.0042,
    "cache_usage": 0.25,
    "cache_hit_rate": 0.5,
}


class FakeServer:
    """`deltas` are sent one by one, `pause_s` apart; then `finish`. With finish None the stream is cut.
    `requests` and `keys` keep the bodies and the Authorization headers that came in."""

    def __init__(self, deltas=(), finish="stop", pause_s=0.0, stats=STATS):
        self.deltas, self.finish, self.pause_s, self.stats = list(deltas), finish, pause_s, stats
        self.requests, self.keys, self.disconnects = [], [], 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                fake.get(self)

            def do_POST(self):
                fake.post(self)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def get(self, handler):
        name = handler.path.split("?")[0].lstrip("/") or "index.html"
        if name == "v1/models":
            return self.answer(
                handler, 200, "application/json", json.dumps({"data": [{"id": "fake"}]}).encode()
            )
        if name == "stats":
            return self.answer(handler, 200, "application/json", json.dumps(self.stats).encode())
        file = WEB / name
        if file.parent != WEB or not file.is_file():
            return self.answer(handler, 404, "text/plain", b"not found")
        return self.answer(handler, 200, TYPES[file.suffix], file.read_bytes())

    @staticmethod
    def answer(handler, status, content_type, body):
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Content-Security-Policy", POLICY)
        handler.end_headers()
        handler.wfile.write(body)

    def post(self, handler):
        self.keys.append(handler.headers["Authorization"])
        self.requests.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        try:
            for delta in [{"role": "assistant"}, *self.deltas]:
                self.send(handler, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                time.sleep(self.pause_s)
            if self.finish is None:
                return
            self.send(handler, {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]})
            self.send(
                handler, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(self.deltas)}}
            )
            handler.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            self.disconnects += 1

    @staticmethod
    def send(handler, chunk):
        handler.wfile.write(b": ping\n\ndata: " + json.dumps(chunk).encode() + b"\r\n\r\n")
        handler.wfile.flush()
