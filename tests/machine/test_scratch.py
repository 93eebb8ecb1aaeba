"""Temporary folders are gone however their process ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The signals' thread ends the process while the main thread is inside of the function that is
# slowed down.
_PROGRAM = """
import {module}, threading, time
from lockstep.machine import scratch, signals

slow, inside = {module}.{function}, threading.Event()

def slowed(*args, **kwargs):
    result = slow(*args, **kwargs)
    inside.set()
    time.sleep(0.3)
    return result

{module}.{function} = slowed
threading.Thread(target=lambda: (inside.wait(), signals.end_now(75, "")), daemon=True).start()
with scratch.temporary("test"):
    pass
time.sleep(10)
"""


@pytest.mark.parametrize(
    ("module", "function"), [("tempfile", "mkdtemp"), ("fcntl", "flock"), ("shutil", "rmtree")]
)
def test_a_signal_while_one_is_created_or_removed_leaves_nothing(
    tmp_path: Path, module: str, function: str
) -> None:
    program = _PROGRAM.format(module=module, function=function)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=False, timeout=60
    )
    assert ended.returncode == 75
    assert not list(tmp_path.iterdir())
