"""The launcher prints the cause and the mend of the first rank that failed, whether it raised or
was killed.
"""

from pathlib import Path

import pytest

from lockstep.failures.failure import from_exit_code
from tests.launch.conftest import launch  # noqa: F401  (a fixture)
from tests.launch.shared import Ended, script

_GO = """
import ctypes
if RANK == 1:
    {fault}
time.sleep(60)
"""


def one_fault(folder: Path, launch: object, fault: str) -> Ended:  # noqa: F811
    script(folder, _GO.format(fault=fault))
    ended: Ended = launch("--nproc-per-node", "2", "script.py")  # type: ignore[operator]
    assert ended.code == 1
    assert ended.err.count("lockstep:") == 1, ended.err
    return ended


@pytest.mark.parametrize(
    ("fault", "what", "why", "do"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL",
            "mostly the kernel or the container",
            "dmesg",
        ),
        (
            "ctypes.string_at(0)",
            "killed by SIGSEGV",
            "a compiled library crashed",
            "lockstep doctor",
        ),
        (
            "open('/dev/full', 'w', buffering=1).write('x\\n')",
            "No space left",
            "the disk or the quota is full",
            "free",
        ),
        (
            "os.write(2, b'terminate called: op.preamble.length <= op.nbytes'); os.abort()",
            "killed by SIGABRT",
            "tensors of different sizes",
            "distributed.debug: detail",
        ),
    ],
)
def test_cause_and_mend_are_printed(
    tmp_path: Path,
    launch: object,  # noqa: F811
    fault: str,
    what: str,
    why: str,
    do: str,
) -> None:
    ended = one_fault(tmp_path, launch, fault)
    lines = ended.err.splitlines()
    assert lines[0].startswith("lockstep: rank 1 of 2 failed: ")
    assert what in lines[0]
    (said_why,) = [line for line in lines if line.startswith("  why: ")]
    (said_do,) = [line for line in lines if line.startswith("  do: ")]
    assert why in said_why
    assert do in said_do
    assert "runs/script/logs/rank-1.log" in said_do


def test_a_timeout_is_not_told_before_its_cause(tmp_path: Path, launch: object) -> None:  # noqa: F811
    """Rank 0 waited in vain, and says so first; rank 1 is why."""
    script(
        tmp_path,
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if RANK == 1:
    open("ready", "w").close()
    while not os.path.exists("gone"):
        time.sleep(0.001)
    raise IndexError("Target 7 is out of bounds.")
while not os.path.exists("ready"):
    time.sleep(0.001)
open("gone", "w").close()
raise RuntimeError("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete")
""",
    )
    ended: Ended = launch("--nproc-per-node", "2", "script.py")  # type: ignore[operator]
    assert ended.err.startswith(
        "lockstep: rank 1 of 2 failed: IndexError: Target 7 is out of bounds."
    ), ended.err
    assert "classes above the largest label" in ended.err


def test_what_nobody_knows_is_told_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("step 1\n")
    failure = from_exit_code(0, 2, -6, 0.0, log)
    assert (failure.what, failure.why, failure.fix) == ("killed by SIGABRT", None, None)
