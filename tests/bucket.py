"""A real S3 server in a process of its own (moto's), and a proxy before it that does what links do.

The proxy asks a function what to do with each request: nothing, or one of FAULTS, or an answer.
"""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

SECRET = "the-secret-of-the-tests-7c1d"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "the-key-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
}
# before the server sees it; after it did; half of the answer; the request twice; late; 500; 503; a
# service that ignores the condition of a put
FAULTS = ("drop", "lose", "truncate", "duplicate", "delay", "500", "503", "unconditional")
_DELAY = 0.2  # seconds
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def require_servers() -> None:
    """Skip a module where what it needs is not installed, and say so among the skips."""
    missing = [n for n in ("obstore", "moto", "flask") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(
            f"NO TEST OF BUCKETS RUNS: {', '.join(missing)} not installed"
            " (pip install -c constraints.txt -e '.[test]')",
            allow_module_level=True,
        )


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server with an empty bucket, `team`."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        make = urllib.request.Request(f"http://127.0.0.1:{port}/team", method="PUT")
        urllib.request.urlopen(make).read()
        yield port
    finally:
        server.kill()
        server.wait()
        for stream in (server.stdin, server.stdout):
            assert stream is not None
            stream.close()


@dataclass(frozen=True)
class Request:
    """One request, as the proxy sees it."""

    number: int
    method: str
    target: str
    headers: str

    @property
    def is_conditional(self) -> bool:
        return "if-none-match: *" in self.headers.lower()


Plan = Callable[[Request], str | tuple[int, str] | None]


class Proxy:
    """Stands between a client and a server; `plan` may be replaced at any time."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.plan: Plan = lambda request: None
        self.requests: list[Request] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(200)

    def reset(self) -> None:
        self.plan = lambda request: None
        self.requests = []

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._one_connection, "127.0.0.1", 0)
        )
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        self._loop.run_forever()
        server.close()

    async def _one_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            with suppress(OSError, EOFError):
                await self._one_request(reader, writer)
        finally:
            writer.close()

    async def _one_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, _, headers = head.partition("\r\n")
        lines = [line for line in headers.split("\r\n") if line]
        body = await reader.readexactly(_length_of(head))
        method, target, _ = first.split(" ")
        request = Request(len(self.requests), method, target, "\n".join(lines))
        self.requests.append(request)
        fault = self.plan(request)
        if fault == "drop":
            return
        if isinstance(fault, str) and fault.isdecimal():
            fault = (int(fault), "<Error><Code>InternalError</Code></Error>")
        if isinstance(fault, tuple):
            status, text = fault
            answer = f"HTTP/1.1 {status} Told\r\nContent-Length: {len(text)}\r\n"
            told = "" if method == "HEAD" else text
            writer.write(f"{answer}Connection: close\r\n\r\n{told}".encode())
            await writer.drain()
            return
        kept = [line for line in lines if not line.lower().startswith("connection:")]
        if fault == "unconditional":
            kept = [line for line in kept if not line.lower().startswith("if-none-match:")]
        sent = "\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin-1") + body
        for _ in range(2 if fault == "duplicate" else 1):
            answered = await self._ask_server(sent)
        if fault == "lose":
            return
        if fault == "delay":
            await asyncio.sleep(_DELAY)
        if fault == "truncate":
            end = answered.index(b"\r\n\r\n") + 4
            answered = answered[: end + (len(answered) - end) // 2]
        writer.write(answered)
        await writer.drain()

    async def _ask_server(self, sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        length = 0 if sent.startswith(b"HEAD ") else _length_of(head.decode("latin-1"))
        body = await reader.readexactly(length)
        writer.close()
        return head + body


def _length_of(head: str) -> int:
    """Return the bytes that follow a head; a server that closes late would keep its reader."""
    found = re.search(r"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else 0
