"""What a run writes: no secret of the environment, and files that only their owner may change."""

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.config import load_config
from lockstep.data import text as texts
from lockstep.data.prepare import prepare
from lockstep.errors import UsageError
from lockstep.machine import scratch
from tests.faults.tiny import YAML
from tests.forked import Forked, lockstep
from tests.launch.shared import environment, finish, start

SECRET = "hunter2-and-more-of-it"


@pytest.mark.promise(
    "Lockstep writes no environment variable into a log, a config copy, an event or a report"
)
def test_no_secret_lands_in_what_a_run_writes(tmp_path: Path) -> None:
    """Not in logs, the config copy, events, checkpoints or the report, also where the run fails
    with a traceback.
    """
    (tmp_path / "tiny.yaml").write_text(YAML)
    (tmp_path / "hurry").touch()
    secret = {
        "OMP_NUM_THREADS": "1",
        "WANDB_API_KEY": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "DB_URL": f"x:{SECRET}",
    }
    run = tmp_path / "run"
    good = finish(
        start(tmp_path, "train", "tiny.yaml", "--output-dir", str(run), "--max-steps=6", **secret),
        tmp_path,
    )
    assert good.code == 0, good.err
    bad = (
        "train",
        "tiny.yaml",
        "--output-dir",
        str(run),
        "--max-steps=9",
        "data.args.nan=[0,1,2,3,4,5,6,7,8,9]",
    )
    failed = finish(start(tmp_path, *bad, "training.bad_numbers.patience=1", **secret), tmp_path)
    report = finish(start(tmp_path, "report", str(run), **secret), tmp_path)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
        assert not stat.S_IMODE(os.stat(path).st_mode) & 0o022, f"{path} may be changed by others"
    for ended in (good, failed, report):
        assert SECRET not in ended.out + ended.err


@pytest.mark.promise("Templates run in Jinja2's sandbox and `!singleton` only takes names")
@pytest.mark.parametrize(
    "value",
    [
        "a{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "a{{ cycler.__init__.__globals__.os.system('touch ran') }}",
        "a{{ self._TemplateReference__context }}",
    ],
)
def test_a_template_reaches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(f"-- set x = 1\ndata: {{name: {value!r}}}\n")
    with pytest.raises(UsageError):
        load_config(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("model: !singleton:os.system(touch) {}\n")
    with pytest.raises(UsageError):
        load_config(tmp_path / "run.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.promise("`lockstep config show` does not import what the config names.")
@pytest.mark.promise("`config check` does, without making any of it")
def test_a_config_that_is_shown_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "strange.py").write_text(
        "open('imported', 'w').close()\nclass Net:\n    def __init__(self):\n        open('made',"
        " 'w').close()\n"
    )
    (tmp_path / "run.yaml").write_text("model: {name: 'strange:Net'}\ndata: {name: digits}\n")
    for verb, there in (("show", []), ("check", ["imported"])):
        assert lockstep(["config", verb, "run.yaml"], tmp_path, environment()).returncode == 0
        assert [name for name in ("imported", "made") if (tmp_path / name).exists()] == there


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


@pytest.mark.promise(
    "Lockstep itself reads text, token files and images as data, never as pickles."
)
def test_data_are_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = pickle.dumps(_Runs(), protocol=0) * 40  # which is text
    Path("text.txt").write_bytes(hostile)
    texts.text(path="text.txt", block_size=4)
    prepare("text.txt", "tokens")
    texts.tokens(path="tokens", block_size=4)
    for file in list(Path("tokens").iterdir()):
        before = file.read_bytes()
        file.write_bytes(hostile[: len(before)] if file.name == texts.TOKENS else hostile)
        if file.name != texts.TOKENS:
            with pytest.raises(UsageError):
                texts.tokens(path="tokens", block_size=4)
        file.write_bytes(before)
    assert not Path("ran").exists()


@pytest.mark.promise(
    "Files of a run are made with mode 0644 and folders with 0755, both less your umask"
)
@pytest.mark.promise("Temporary folders of the launcher are made for you alone (0700).")
def test_modes_follow_the_umask(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(YAML)
    (tmp_path / "hurry").touch()
    (tmp_path / "open").mkdir()
    command = ("train", "tiny.yaml", "--max-steps=5", "--output-dir")
    assert finish(start(tmp_path, *command, "open", OMP_NUM_THREADS="1"), tmp_path).code == 0
    closed = Forked(
        [sys.executable, "-m", "lockstep", *command, "closed"],
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        umask=0o077,
    )
    ended = finish(closed, tmp_path)
    assert ended.code == 0, ended.err
    before = os.umask(0o077)
    try:
        assert cli.main(["report", str(tmp_path / "closed")]) == 0
    finally:
        os.umask(before)
    for name, most in (("open", 0o755), ("closed", 0o700)):
        for path in (tmp_path / name).rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode & ~(most if path.is_dir() else most & 0o644) == 0, f"{path}: {mode:o}"
    folder = scratch.scratch_folder("test")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    scratch.remove(folder)
