"""The watcher at the end of the session sees what it is there to see."""

import gc
import os
import socket
import subprocess
import sys

import psutil
import pytest

from tests.conftest import _MARK, left_behind, listening
from tests.hosts import hosts, require_root


def test_an_orphan_is_seen() -> None:
    """Its parent has ended, and it has left its session: only the environment tells whose it is."""
    code = (
        "import subprocess as s; print(s.Popen(['sleep', '60'], start_new_session=True,"
        " stdout=s.DEVNULL).pid)"
    )
    started = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    orphan = psutil.Process(int(started.stdout))
    try:
        found = left_behind(os.environ[_MARK], listening())
        assert any(f"process {orphan.pid}: sleep 60" in one for one in found)
    finally:
        orphan.kill()


def test_a_port_is_seen() -> None:
    before = listening()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert f"port {port} listens in the tests' process, since this test" in left_behind(
            os.environ[_MARK], before
        )


def test_garbage_that_was_frozen_holds_no_port() -> None:
    """Imports are frozen so that collections pass over them: what was garbage then is, too."""
    before = listening()
    listener = socket.create_server(("127.0.0.1", 0))
    ring = [listener]
    ring.append(ring)  # type: ignore[arg-type]
    gc.freeze()
    del listener
    del ring
    assert listening() > before
    assert not [one for one in left_behind(os.environ[_MARK], before) if one.startswith("port")]


@pytest.mark.root
def test_a_namespace_is_seen() -> None:
    require_root()
    with hosts(1) as (host,):
        assert f"namespace {host.name}" in left_behind(os.environ[_MARK], listening())
    assert f"namespace {host.name}" not in left_behind(os.environ[_MARK], listening())
