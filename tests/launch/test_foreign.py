"""Scripts that the project did not write run unchanged under `lockstep launch`, and their own
checks pass.
"""

from pathlib import Path

import pytest

from tests.launch.shared import lockstep

accelerate = pytest.importorskip("accelerate.test_utils", reason="NOT TESTED: needs accelerate")
SCRIPTS = Path(accelerate.__file__).parent / "scripts"


@pytest.mark.parametrize(
    "name", [pytest.param("test_sync.py", marks=pytest.mark.full), "test_script.py"]
)
def test_scripts_of_accelerate(tmp_path: Path, name: str) -> None:
    ended = lockstep(
        tmp_path,
        "launch",
        "--nproc-per-node",
        "2",
        "--output-dir",
        "run",
        str(SCRIPTS / name),
        ACCELERATE_USE_CPU="true",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert ended.code == 0, ended.err + log[-2000:]
    assert "**" in log, "it says what it checks"
