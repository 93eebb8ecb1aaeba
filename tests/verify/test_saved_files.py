"""What a script saves in a run of a proof is put back, so that no run finds what another saved."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.verify.command import verify_script
from lockstep.verify.script.observed.saved_files import put_back

SCRIPT = Path(__file__).parents[2] / "benchmarks/silent_bugs/scripts/snapshots.py"

# Another process, since an audit hook stays until its process ends.
SAVES = """
import os, shutil, sys
from pathlib import Path
from lockstep.verify.script.observed.saved_files import SavedFiles

begun = []
files = SavedFiles(Path("run/saved"), lambda: bool(begun))
files.watch()

def save(path, text):
    files.save(path)
    Path(path).write_text(text)

save("run/record.pt", "own")
save("prepared.pt", "stays")
save("kept.pt", "changed before training")
begun.append(True)
os.makedirs("made/inner")
save("made/inner/1.pt", "new")
save("new.pt", "new")
save("part.pt", "new")
os.replace("part.pt", "last.pt")
shutil.copyfile("new.pt", "best.pt")
Path("log.txt").write_text("not saved by torch")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_as_they_were_before_a_run(folder: Path) -> None:
    for name in ("kept.pt", "last.pt"):
        Path(name).write_text("of the user")
    Path("run").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[3])}
    subprocess.run([sys.executable, "-c", SAVES], check=True, env=environment)
    assert Path("last.pt").read_text() == Path("best.pt").read_text() == "new"
    assert put_back(folder / "run/saved")
    assert not put_back(folder / "run/nothing")
    left = {str(path) for path in Path().rglob("*") if path.is_file() and "saved" not in path.parts}
    assert left == {"run/record.pt", "prepared.pt", "kept.pt", "last.pt", "log.txt"}
    assert not Path("made").exists()
    assert Path("kept.pt").read_text() == Path("last.pt").read_text() == "of the user"


def test_a_script_that_begins_from_its_snapshot_is_judged_without_it(folder: Path) -> None:
    (outcome,) = verify_script(str(SCRIPT), [], [2], steps=3)
    assert outcome.passed, (outcome.failed, outcome.causes)
    assert not list(folder.iterdir())
