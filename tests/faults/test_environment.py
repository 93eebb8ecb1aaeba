"""What surrounds a run is missing: its working directory, its network."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep.heartbeat.writer import Heartbeat
from lockstep.report.page import make_server
from tests.launch.shared import environment
from tests.report.shared import write_run


@pytest.mark.fault(
    "configuration: the working directory is gone",
    "it was deleted, or made anew, while the shell was in it",
    "one message with what to do, exit code 2; a run that has begun goes on",
)
def test_a_working_directory_that_is_gone_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for command in (["train", "trainers/ddp.yaml"], ["report", str(tmp_path)], ["--help"]):
        ended = subprocess.run(
            [sys.executable, "-m", "lockstep", *command],
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert ended.returncode == 2
        assert "the working directory is gone" in ended.stderr
        assert "cd ~" in ended.stderr
        assert "Traceback" not in ended.stderr
    (tmp_path / "beats").mkdir()
    with Heartbeat(tmp_path / "beats", 0).call("save"):
        pass


@pytest.mark.fault(
    "network: no interface is up, not even the loopback",
    "a container or a sandbox without a network; the ranks of one machine meet at 127.0.0.1",
    "one message with what to do, exit code 2, at once",
)
@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="needs root and unshare"
)
def test_a_machine_without_a_network_is_one_message(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(
        'model: {name: "tests.faults.tiny:Net"}\ndata: {name: "tests.faults.tiny:Points"}\n'
    )
    command = [
        "train",
        str(config),
        "--nproc-per-node",
        "2",
        "--max-steps=1",
        "distributed.device=cpu",
    ]
    began = time.monotonic()
    ended = subprocess.run(
        [
            "unshare",
            "-n",
            sys.executable,
            "-m",
            "lockstep",
            *command,
            "--output-dir",
            str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
        timeout=300,
    )
    if "unshare" in ended.stderr:
        pytest.skip("this container makes no network namespaces")
    assert ended.returncode == 2, ended.stderr
    assert "ip link set lo up" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert time.monotonic() - began < 200  # seconds, on a busy machine


@pytest.mark.promise("answers on 127.0.0.1, and only who asks for this machine by that name.")
def test_the_live_page_is_for_this_machine(tmp_path: Path) -> None:
    """Another site whose name resolves to 127.0.0.1 must not read the run: the name that was asked
    for is compared.
    """
    server = make_server([write_run(tmp_path / "run", steps=20).path])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]

    def answer(host: str | None) -> str:
        line = "" if host is None else f"Host: {host}\r\n"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"GET /data.json HTTP/1.1\r\n{line}\r\n".encode())
            with connection.makefile() as lines:
                return lines.readline().split()[1]

    try:
        for host in ("127.0.0.1", f"127.0.0.1:{port}", "localhost", f"LOCALHOST:{port}"):
            assert answer(host) == "200", host
        for other in (
            None,
            "",
            ":",
            f":{port}",
            "evil.com",
            f"evil.com:{port}",
            "127.0.0.1:evil.com",
            "127.0.0.1.com",
            "evil.com:127.0.0.1",
            "x@127.0.0.1",
            "0.0.0.0",
        ):
            assert answer(other) == "403", other
    finally:
        server.shutdown()
        server.server_close()
