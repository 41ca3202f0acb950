"""A real HTTP server that hears the JSON that is posted to it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Server(ThreadingHTTPServer):
    """Answers with `codes` one after another, and with 200 then. `heard`: (path, JSON) of each."""

    def __init__(self, *codes):
        self.codes, self.heard = list(codes), []
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}/hooks/a-secret"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append((self.path, json.loads(body)))
        self.send_response(self.server.codes.pop(0) if self.server.codes else 200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    found = []

    def start(*codes):
        found.append(Server(*codes))
        threading.Thread(target=found[-1].serve_forever, daemon=True).start()
        return found[-1]

    yield start
    for server in found:
        server.shutdown()
        server.server_close()
