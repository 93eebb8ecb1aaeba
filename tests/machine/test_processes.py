"""What the system says of processes."""

import subprocess

from lockstep.machine.processes import wait_for_an_end


def test_a_wait_ends_with_the_first_process_that_ends() -> None:
    """It would take 30 s; one of the others sleeps for 15, and one has ended before."""
    over = subprocess.Popen(["true"])
    over.wait()
    lasting = subprocess.Popen(["sleep", "15"])
    short = subprocess.Popen(["sleep", "0.2"])
    try:
        wait_for_an_end([over.pid, lasting.pid, short.pid], 30.0)
        assert (short.poll(), lasting.poll()) == (0, None)
    finally:
        lasting.kill()
        lasting.wait()
