"""Several hosts, as network namespaces with names of their own: how they meet, and how it ends when
they do not.
"""

import time
from pathlib import Path

import pytest

from tests.hosts import INTERFACE, Host, _run, hosts, require_root
from tests.launch.on_hosts import PORT, launch_on, start_on
from tests.launch.shared import finish, script

pytestmark = pytest.mark.root


@pytest.mark.parametrize(
    "numbered",
    [pytest.param(True, marks=pytest.mark.full), False],
    ids=["numbered", "c10d"],
)
def test_hosts_start_in_any_order(four: list[Host], tmp_path: Path, numbered: bool) -> None:
    """The one where they meet comes last; those before it wait, and say so."""
    script(
        tmp_path, "import socket\nsay(host=socket.gethostname(), world=os.environ['WORLD_SIZE'])\n"
    )
    meeting = f"{four[0].address}:{PORT}"
    order = [2, 1, 0]
    starts = [(four[i], i if numbered else None, meeting) for i in order]
    ended = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=90", nodes=3, pause=0.7)
    assert [e.code for e in ended] == [0, 0, 0], [e.err for e in ended]
    said = [ended[0].said(rank) for rank in range(3)]
    assert {one["world"] for one in said} == {"3"}
    names = [str(one["host"]) for one in said]
    assert sorted(names) == ["host0", "host1", "host2"]
    assert not numbered or names == ["host0", "host1", "host2"]
    assert all(f"waiting for 3 machines at {meeting}" in e.err for e in ended)


@pytest.mark.fault(
    "network: one of several machines does not come",
    "two of three are started",
    "those that are there name the one that is missing, and end with exit code 1 when the time"
    " is up",
)
@pytest.mark.fault(
    "network: one of several machines does not come, `--rdzv-endpoint`",
    "two of three are started; they have no numbers by which the third could be named",
    "both say how many came, and which, and end with exit code 1 when the time is up",
)
def test_whom_one_waits_for_is_named(four: list[Host], tmp_path: Path) -> None:
    """Two jobs, each of three machines of which two come: with numbers, the missing one; without,
    those that came.
    """
    script(tmp_path, "")
    first, other = (f"{four[i].address}:{PORT}" for i in (0, 1))
    starts = [
        (four[0], 0, first),
        (four[2], 2, first),
        (four[1], None, other),
        (four[3], None, other),
    ]
    ended = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=20", nodes=3)
    assert [one.code for one in ended] == [1, 1, 1, 1], [one.err for one in ended]
    assert not any("Traceback" in one.err for one in ended)
    for one in ended[:2]:
        assert f"lockstep: machine 1 of 3 did not come to {first} within 20 s" in one.err, one.err
    for one in ended[2:]:
        assert f"lockstep: 2 of 3 machines came to {other} within 20 s" in one.err, one.err
        assert all(f"host{i} ({four[i].address})" in one.err for i in (1, 3)), one.err
        assert f"traffic between machines: {INTERFACE};" in one.err


@pytest.mark.full
def test_the_one_whose_time_is_up_first_does_not_hide_who_came(
    four: list[Host], tmp_path: Path
) -> None:
    """It closes the meeting behind it: torch tells the others no more than that."""
    script(tmp_path, "")
    meeting = f"{four[0].address}:{PORT}"
    started = []
    for host, seconds in ((four[0], 40), (four[1], 8)):
        options = ("--nnodes", "3", "--nproc-per-node", "1", "--rdzv-endpoint", meeting)
        started.append(
            start_on(
                host, tmp_path, "launch", *options, "--rdzv-conf", f"timeout={seconds}", "script.py"
            )
        )
    waited, left = (finish(process, tmp_path, timeout=100) for process in started)
    assert [waited.code, left.code] == [1, 1]
    assert f"lockstep: 2 of 3 machines came to {meeting} within 8 s" in left.err, left.err
    assert f"lockstep: 2 of 3 machines came to {meeting} within 40 s" in waited.err, waited.err
    assert "Traceback" not in waited.err + left.err


@pytest.mark.fault(
    "network: a machine looks at the wrong port",
    "--master-port differs on one machine",
    "it says what did not answer; the first machine says which did not come; both exit with 1",
)
def test_a_wrong_port_is_told_on_both_sides(four: list[Host], tmp_path: Path) -> None:
    script(tmp_path, "")
    address = four[0].address
    starts = [(four[0], 0, f"{address}:{PORT}"), (four[1], 1, f"{address}:29501")]
    first, second = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=15", nodes=2)
    assert (first.code, second.code) == (1, 1)
    assert f"lockstep: machine 1 of 2 did not come to {address}:{PORT} within 15 s" in first.err, (
        first.err
    )
    assert f"lockstep: the machines did not meet at {address}:29501" in second.err, second.err


@pytest.mark.fault(
    "configuration: two machines claim one number",
    "--node-rank 1 on two machines",
    "all launchers end at once with exit code 2, naming both machines",
)
def test_two_hosts_with_one_number(four: list[Host], tmp_path: Path) -> None:
    script(tmp_path, "")
    meeting = f"{four[0].address}:{PORT}"
    starts = [(four[0], 0, meeting), (four[1], 1, meeting), (four[2], 1, meeting)]
    began = time.monotonic()
    for one in launch_on(tmp_path, starts, nodes=3):
        assert one.code == 2, one.err
        assert "two machines claim --node-rank 1: host" in one.err
        assert "host1" in one.err
        assert "host2" in one.err
    assert time.monotonic() - began < 120, "not after the rendezvous's 15 minutes"


@pytest.mark.fault(
    "network: the name of the first machine does not resolve",
    "--rdzv-endpoint no-such-host:29500",
    "it is asked for again for 30 s, as names may come late; then exit code 2, naming it and the"
    " machine",
)
def test_a_name_that_does_not_resolve(four: list[Host], tmp_path: Path) -> None:
    script(tmp_path, "")
    starts = [(four[1], None, "no-such-host.invalid:29500")]
    (ended,) = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=1", nodes=2)
    assert ended.code == 2
    assert "lockstep: no-such-host.invalid does not resolve on this machine (host1)" in ended.err, (
        ended.err
    )
    assert "waiting for the name no-such-host.invalid to resolve" in ended.err


@pytest.mark.parametrize(
    "numbered", [pytest.param(True, marks=pytest.mark.full), False], ids=["numbered", "c10d"]
)
def test_hosts_with_ipv6_alone(tmp_path: Path, numbered: bool) -> None:
    """No IPv4 address anywhere; ranks meet, and gloo reduces over the link."""
    require_root()
    script(
        tmp_path,
        """
import torch, lockstep
lockstep.setup()
say(sum=lockstep.all_reduce(RANK + 1, "sum"), address=os.environ["MASTER_ADDR"])
lockstep.cleanup()
""",
    )
    with hosts(2) as (a, b):
        for number, host in enumerate((a, b), start=1):
            _run("ip", "-n", host.name, "addr", "flush", "dev", INTERFACE)
            _run(
                "ip",
                "-n",
                host.name,
                "addr",
                "add",
                f"fd99::{number}/64",
                "dev",
                INTERFACE,
                "nodad",
            )
        starts = [
            (host, i if numbered else None, f"[fd99::1]:{PORT}") for i, host in enumerate((a, b))
        ]
        ended = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=60", nodes=2)
        assert [e.code for e in ended] == [0, 0], [e.err for e in ended]
        assert [ended[0].said(rank)["sum"] for rank in (0, 1)] == [3, 3]
        assert str(ended[0].said(0)["address"]).startswith("fd99::")
