"""A real S3 server in a process of its own (moto's), and a proxy before it that does what links do.

LOCKSTEP_TEST_BUCKET=az takes one of Azure's protocol in its place (`azurite-blob` of npm, on the
PATH), and LOCKSTEP_TEST_BUCKET=gs one of Google's (fake-gcs-server, of the extra `test`, behind
tests/google_server.py): the same tests, the same promises.

The proxy asks a function what to do with each request: nothing, or one of FAULTS, or an answer.
"""

import asyncio
import base64
import hashlib
import hmac
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import unquote

import pytest

from tests.forked import Forked
from tests.hosts import REPOSITORY

SCHEME = os.environ.get("LOCKSTEP_TEST_BUCKET", "s3")
_ACCOUNT = "devstoreaccount1"
# azurite's, of its documentation
_AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
SECRET = _AZURE_KEY if SCHEME == "az" else "the-secret-of-the-tests-7c1d"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "the-key-of-the-tests",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
    "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY,
    "GOOGLE_BEARER_TOKEN": SECRET,
}
# by which each service is asked to put an object only where there is none; on Azure and S3 one name
_CONDITIONS = ("if-none-match: *", "x-goog-if-generation-match: 0")
# before the server sees it; after it did; half of the answer; the request twice; late; 500; 503; a
# service that ignores the condition of a put
FAULTS = ("drop", "lose", "truncate", "duplicate", "delay", "500", "503", "unconditional")
_DELAY = 0.2  # seconds


def require_servers() -> None:
    """Skip a module where what it needs is not installed, and say so among the skips."""
    missing = [n for n in ("obstore", "moto", "flask") if importlib.util.find_spec(n) is None]
    if missing:
        pytest.skip(
            f"NO TEST OF BUCKETS RUNS: {', '.join(missing)} not installed"
            " (pip install -c constraints.txt -e '.[test]')",
            allow_module_level=True,
        )


def environment(server: str) -> dict[str, str]:
    """The variables with which a client reaches a server, or the proxy before it, by its URL."""
    return {
        **ENVIRONMENT,
        "AWS_ENDPOINT_URL": server,
        "AZURE_STORAGE_ENDPOINT": f"{server}/{_ACCOUNT}",
        "GOOGLE_BASE_URL": server,
    }


def bucket_server() -> AbstractContextManager[int]:
    """The port of a server with an empty bucket, `team`."""
    if SCHEME == "gs":
        # it is built on the proxy below
        return importlib.import_module("tests.google_server").google_server()
    return _azure_server() if SCHEME == "az" else _s3_server()


@contextmanager
def _azure_server() -> Iterator[int]:
    program = shutil.which("azurite-blob")
    assert program is not None, "LOCKSTEP_TEST_BUCKET=az needs azurite-blob on the PATH"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    server = subprocess.Popen([program, *options, "--blobPort", str(port)])
    try:
        while not _makes_container(port):
            assert server.poll() is None
            time.sleep(0.2)
        yield port
    finally:
        server.kill()
        server.wait()


def _makes_container(port: int) -> bool:
    """Make the container `team`; obstore makes none. Return False while nobody listens."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT{chr(10) * 12}{signed}/{_ACCOUNT}/{_ACCOUNT}/team\nrestype:container"
    digest = hmac.new(base64.b64decode(_AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    address = f"http://127.0.0.1:{port}/{_ACCOUNT}/team?restype=container"
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers))
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False
    return True


@contextmanager
def _s3_server() -> Iterator[int]:
    server = Forked(
        [sys.executable, "-m", "tests.s3_server"],
        cwd=REPOSITORY,
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
        return any(condition in self.headers.lower() for condition in _CONDITIONS)


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
        request = Request(len(self.requests), method, unquote(target), "\n".join(lines))
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
            kept = [line for line in kept if line.lower() not in _CONDITIONS]
        sent = "\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin-1") + body
        for _ in range(2 if fault == "duplicate" else 1):
            answered = await self.ask_server(sent)
        if fault == "lose":
            return
        if fault == "delay":
            await asyncio.sleep(_DELAY)
        if fault == "truncate":
            end = answered.index(b"\r\n\r\n") + 4
            answered = answered[: end + (len(answered) - end) // 2]
        writer.write(answered)
        await writer.drain()

    async def ask_server(self, sent: bytes) -> bytes:
        """Send a request to the server, and return its answer."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._server_port, limit=1 << 24
        )
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        body = b""
        if b"\r\ntransfer-encoding: chunked" in head.lower():
            while not (b"\r\n" + body).endswith(b"\r\n0\r\n\r\n"):
                body += await reader.readuntil(b"\r\n")
        elif not sent.startswith(b"HEAD "):
            body = await reader.readexactly(_length_of(head.decode("latin-1")))
        writer.close()
        return head + body


def _length_of(head: str) -> int:
    """Return the bytes that follow a head; a server that closes late would keep its reader."""
    found = re.search(r"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    return int(found[1]) if found else 0
