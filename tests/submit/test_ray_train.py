"""The TorchTrainer of the page, in a Ray that is started for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.run_directory.records import RunDirectory
from tests import ray_cluster
from tests.docs.blocks import blocks_in
from tests.ranks import REPOSITORY

ray_cluster.require_ray()
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
_BEGIN = """
import os
os.environ |= {{"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}}
import ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, _temp_dir={ray!r})


def dies_once(updates):
    if updates == 12 and os.environ["RANK"] == "1" and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        os._exit(9)


"""
_END = """
assert result.error is None, result.error
print("trained")
"""


def trained(folder: Path, ray: Path, *, dies: bool) -> str:
    """Run the page's program; return the digest of the run."""
    folder.mkdir()
    (program,) = (
        block.body
        for block in blocks_in(REPOSITORY / "docs/how_to/ray.md")
        if block.text == "tests/submit/test_ray_train.py"
    )
    program = program.replace("/shared/", f"{folder}/")
    if dies:
        changed = program.replace("**settings)", "after_update=dies_once, **settings)")
        assert changed != program
        program = changed
    begin = _BEGIN.format(ray=str(ray), mark=str(folder / "died"))
    (folder / "program.py").write_text(begin + program + _END)
    ended = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_TRAIN_V2_ENABLED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "trained" in ended.stdout.splitlines(), ended.stdout + ended.stderr
    assert (folder / "died").exists() == dies
    return checkpoint.digest(folder / "runs/first/checkpoints/step-00000020")


def test_a_torch_trainer_calls_trainer_and_starts_again(tmp_path: Path) -> None:
    with ray_cluster.short_folder() as ray:
        undisturbed = trained(tmp_path / "one", ray, dies=False)
        assert trained(tmp_path / "two", ray, dies=True) == undisturbed
    run = RunDirectory(tmp_path / "two/runs/first")
    steps = [row["step"] for row in run.read_metrics()]
    # every tenth is recorded, and the first of each start: the second one went on after step 10
    assert steps == [1, 10, 11, 20]
    resumed = [event["step"] for event in run.read_events() if event["kind"] == "resume"]
    assert resumed == [10]
