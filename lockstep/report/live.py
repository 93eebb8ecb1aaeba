"""Serves the report of a running run on loopback; the page fetches its data every two seconds."""

import json
import os
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.report.page import page_data, render
from lockstep.report.read import read_run


class Live:
    """Reads the run directories again when their files have changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._seen: list[tuple[int, int]] = []
        self._data: dict[str, Any] = {}

    def data(self) -> dict[str, Any]:
        """Return the page's current data."""
        seen = [_state(path / name) for path in self._paths for name in ("metrics.jsonl", "events.jsonl")]
        if seen != self._seen or not self._data or any(run["status"] == "running" for run in self._data["runs"]):
            self._data = page_data([read_run(path) for path in self._paths])
            self._seen = seen
        return self._data


def serve(paths: Sequence[Path], port: int = 0, started: Callable[[str], object] = print) -> None:
    """Serve until interrupted.

    Args:
        paths: run directories.
        port: 0: any free port.
        started: called with a line that has the address.

    Raises:
        UsageError: the port is taken, or a path is not a run directory.
    """
    server = make_server(paths, port)
    started(f"lockstep: http://127.0.0.1:{server.server_address[1]}/ (Ctrl+C stops it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def make_server(paths: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Make a server on loopback that does not serve yet."""
    live = Live(paths)
    live.data()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site whose name resolves to this address must not read the run.
            if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                self._answer(403, "text/plain", b"this page is for this machine")
            elif self.path == "/":
                self._answer(200, "text/html; charset=utf-8", render(live.data(), live=True).encode())
            elif self.path == "/data.json":
                self._answer(200, "application/json", json.dumps(live.data(), allow_nan=False).encode())
            else:
                self._answer(404, "text/plain", b"there is no such page")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log no requests."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:  # taken, or not a port
        raise UsageError(f"port {port} can't be used on this machine: {error}", fix="--port 0: any") from None


def _state(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
