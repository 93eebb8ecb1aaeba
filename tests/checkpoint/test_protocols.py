"""Checkpoints in buckets of other protocols than S3's, and of a second server of S3's.

A part of the promises, against Google's, in the quick suite; all of them, against Google's and
Azure's, in the full one. Servers of npm (azurite, s3rver) are looked for on the PATH.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import Location, ObjectStorage, object_store
from lockstep.errors import UsageError
from tests import bucket
from tests.bucket import Proxy
from tests.checkpoint.shared import CONFIG, assert_same, blank, snapshot
from tests.google_server import google_server, require_google

bucket.require_servers()
require_google()

REPOSITORY = Path(__file__).parents[2]
PART = 2048  # bytes
URL = "gs://team/run"
# what each of the tests of buckets is run over
SUITES = (
    "tests/checkpoint/test_object_store.py",
    "tests/checkpoint/test_local_cache.py",
    "tests/run_directory/test_run_mirror.py",
)


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before a server of Google's protocol."""
    monkeypatch.setattr(object_store, "PART_BYTES", PART)  # files of several parts
    with google_server() as port:
        proxy = Proxy(port)
        for name, value in bucket.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy
        proxy.close()


@pytest.mark.fault(
    "storage: in a bucket of Google: a second writer of the same step, and faults of the link",
    "answers are lost, requests come twice, and two runs commit to one prefix",
    "what is committed loads to the same bits; one of the two wins, the other is told; a service"
    " that ignores the condition is refused at start",
)
def test_google_keeps_what_a_bucket_promises(google: Proxy) -> None:
    storage = ObjectStorage(URL)
    storage.check()
    late = ObjectStorage(URL).begin("step-00000001")
    google.reset()
    faults = ("lose", "duplicate", "503")
    google.plan = lambda request: (
        None if request.number % 9 else faults[request.number // 9 % len(faults)]
    )
    path = checkpoint.save(storage, 1, snapshot(), config_yaml=CONFIG)
    puts = [request for request in google.requests if request.method == "PUT"]
    assert all(request.is_conditional for request in puts)
    assert any(request.target.endswith(".part-00001") for request in puts)
    assert puts[-1].target.endswith("/commits/step-00000001")
    google.reset()
    after = blank(snapshot())
    again = Location(ObjectStorage(URL), path.name)
    checkpoint.load(again, after)
    assert_same(snapshot(), after)
    with pytest.raises(FileExistsError):
        ObjectStorage(URL).commit(late, "step-00000001", b"another")
    assert checkpoint.verify(again) == []
    storage.delete("step-00000001")
    assert storage.names() == []
    google.plan = lambda request: "unconditional"
    with pytest.raises(UsageError, match="overwrites an object that it was asked to create"):
        storage.check()


REFUSALS = [
    (401, "AuthenticationRequired", "the credentials are not accepted"),
    (403, "InvalidSecurity", "the credentials are not accepted"),
    (403, "AccessDenied", "lack a right"),
    (404, "NoSuchBucket", "there is no such bucket"),
    (403, "RequestTimeTooSkewed", "the clock of this machine is off"),
    # Azure has one code for signatures and for their time, which is in a detail
    (403, "AuthenticationFailed", "the clock of this machine is off"),
]


def test_what_other_services_refuse_is_told_at_start(google: Proxy) -> None:
    """Buckets of Google and of Azure are reached from any region by one address."""
    for status, code, said in REFUSALS:
        late = "Request date header too old: 'Fri, 27 Nov 2026 08:00:00 GMT'"
        detail = f"<AuthenticationErrorDetail>{late}</AuthenticationErrorDetail>"
        azure = code == "AuthenticationFailed"
        message = "Server failed to authenticate the request." if azure else "As documented."
        text = f"<Error><Code>{code}</Code><Message>{message}</Message>"
        text += f"{detail if azure else ''}</Error>"
        google.plan = lambda request, answer=(status, text): (
            answer if request.method == "PUT" else None
        )
        with pytest.raises(UsageError, match=said) as caught:
            ObjectStorage(URL, retry_seconds=2).check()
        assert bucket.SECRET not in str(caught.value)
    google.reset()
    with pytest.raises(UsageError, match="there is no such bucket"):
        ObjectStorage("gs://no-such-bucket/run").check()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_all_promises_hold_on_a_server_of_another_protocol(scheme: str) -> None:
    if scheme == "az":
        _program("azurite-blob", "azurite")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "full or not full",
    ]
    ended = subprocess.run(
        [*command, "-k", "not hundred_times", *SUITES],
        cwd=REPOSITORY,
        env={**os.environ, "LOCKSTEP_TEST_BUCKET": scheme, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(ended.stdout[-200:])
    assert ended.returncode == 0, ended.stdout[-5000:]


def _program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the PATH (npm install -g {package})")
    return found


@pytest.mark.full
def test_a_server_that_overwrites_is_refused_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3rver speaks S3's protocol, and takes no notice of `If-None-Match`."""
    program = _program("s3rver", "s3rver")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = ["-d", str(tmp_path), "-a", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen([program, *place, "--configure-bucket", "team", "--silent"])
    try:
        while True:
            assert server.poll() is None
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.2)
        for name, value in bucket.environment(f"http://127.0.0.1:{port}").items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "S3RVER")
        with pytest.raises(UsageError, match="overwrites an object that it was asked to create"):
            ObjectStorage("s3://team/run").check()
    finally:
        server.kill()
        server.wait()
