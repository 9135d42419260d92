"""A service of logs over the network: an HTTP server of this process on 127.0.0.1, and a logger that posts to it."""

import json
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from typing_extensions import override

from learnkit.loggers import Logger


class LogHandler(BaseHTTPRequestHandler):
    "Keep the JSON values that are posted to a path, and return them."

    runs: dict[str, list[dict[str, Any]]] = {}
    refused: set[str] = set()  # addresses of runs to which nothing can be posted

    def do_POST(self) -> None:
        "Append the posted value to the run of this path."
        text = self.rfile.read(int(self.headers['Content-Length']))
        if server_address() + self.path in self.refused:
            self.send_error(503)
            return
        self.runs.setdefault(self.path, []).append(json.loads(text))
        self._answer({})

    def do_GET(self) -> None:
        "Return all values of the run of this path."
        self._answer(self.runs.get(self.path, []))

    def _answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    @override
    def log_message(self, format: str, *args: Any) -> None:
        "Print nothing."


@cache
def server_address() -> str:
    "Start the server of this process, on a port that the system chooses, and return its address."
    server = ThreadingHTTPServer(('127.0.0.1', 0), LogHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    return f'http://127.0.0.1:{server.server_port}'


def request(address: str, value: Any = None) -> Any:
    "Post a value, or with None return the values of the run at this address."
    data = None if value is None else json.dumps(value).encode()
    try:
        with urlopen(Request(address, data), timeout=10) as answer:
            return json.load(answer)
    except HTTPError as error:
        error.close()  # it holds the connection, which a later test would report as unclosed
        raise


def run_address(path: Path) -> str:
    return f'{server_address()}/{quote(str(path), safe="")}'


class PostLogger(Logger):
    "Log to a server that keeps each value that it has received: a resumed run does not write steps again."

    @override
    def where(self) -> str:
        return run_address(self.learn.path)

    @override
    def open(self, keep: int | None) -> tuple[str, int]:
        steps = [row['step'] for row in request(self.where()) if 'step' in row]
        return self.where(), max(steps, default=-1)

    @override
    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        request(self._handle, {'step': step, 'values': values})

    @override
    def log_params(self, params: dict[str, Any]) -> None:
        request(self._handle, {'params': params})


def server_points(path: Path, name: str) -> list[tuple[int, Any]]:
    "Return the steps and numbers of a value that the server has received."
    rows = [row for row in request(run_address(path)) if 'step' in row]
    return [(row['step'], row['values'][name]) for row in rows if name in row['values']]
