"""What a run writes: no secret of the environment, and files that only their owner may change."""

import os
import stat
from pathlib import Path

from tests.faults.tiny import YAML
from tests.launch.shared import finish, start

SECRET = "hunter2-and-more-of-it"


def test_no_secret_lands_in_what_a_run_writes(tmp_path: Path) -> None:
    """Not in logs, the config copy, events, checkpoints or the report, also where the run fails with a traceback."""
    (tmp_path / "tiny.yaml").write_text(YAML)
    (tmp_path / "hurry").touch()
    secret = {"OMP_NUM_THREADS": "1", "WANDB_API_KEY": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "DB_URL": f"x:{SECRET}"}
    run = tmp_path / "run"
    good = finish(start(tmp_path, "train", "tiny.yaml", "--output-dir", str(run), "--max-steps=6", **secret), tmp_path)
    assert good.code == 0, good.err
    bad = ("train", "tiny.yaml", "--output-dir", str(run), "--max-steps=9", "data.args.nan=[0,1,2,3,4,5,6,7,8,9]")
    failed = finish(start(tmp_path, *bad, "training.bad_numbers.patience=1", **secret), tmp_path)
    report = finish(start(tmp_path, "report", str(run), **secret), tmp_path)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
        assert not stat.S_IMODE(os.stat(path).st_mode) & 0o022, f"{path} may be changed by others"
    for ended in (good, failed, report):
        assert SECRET not in ended.out + ended.err
