"""What is built of the project is whole: the source distribution, the wheel, and a wheel in an
empty environment.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.launch.shared import environment
from tests.ranks import REPOSITORY

_BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
_DEMO = ["train", "demo.yaml", "--nproc-per-node", "2", "--output-dir", "run"]
_SHORT = [
    "model.args.n_layer=2",
    "model.args.n_embd=32",
    "data.args.block_size=32",
    "training.max_steps=4",
]
_SHORT += [
    "training.warmup_steps=1",
    "training.eval_steps=null",
    "checkpoint.save_steps=4",
    "monitor.log_steps=1",
]
_SHORT += ["data.args.validation_fraction=0.001"]


def tracked(folder: str = "") -> list[str]:
    """Files of the project, as far as they are there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder or "."],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()]


def build(what: str, source: Path, into: Path) -> Path:
    """`sdist` or `wheel` of a source tree, by the backend that pyproject.toml names, with what is
    installed here.
    """
    command = [sys.executable, "-c", _BUILD, f"build_{what}", str(into)]
    done = subprocess.run(
        command, cwd=source, env=environment(PYTHONPATH=""), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return into / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built of nothing else."""
    folder = tmp_path_factory.mktemp("built")
    for name in tracked():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / "tree" / name)
    sdist = build("sdist", folder / "tree", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", source, folder)


def version() -> str:
    found: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    return found


def test_the_wheel_holds_each_file_of_the_package_and_nothing_else(
    built: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(f"lockstep_train-{version()}.dist-info/METADATA").decode()
        assert f"lockstep_train-{version()}.dist-info/licenses/LICENSE" in wheel.namelist()
    assert packaged == set(tracked("lockstep"))
    assert {
        "lockstep/py.typed",
        "lockstep/report/page.html",
        "lockstep/submit/slurm.sh.j2",
    } < packaged
    assert "Requires-Dist: torch>=2.11" in metadata


@pytest.mark.full  # in the quick run its files are those of the package
def test_an_unpacked_wheel_starts(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Without the source tree: its own templates are found."""
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    command = [sys.executable, "-m", "lockstep", "config", "check", "ready/bdh_fsdp.yaml"]
    surroundings = environment(PYTHONPATH=str(tmp_path / "site"))
    done = subprocess.run(command, cwd=tmp_path, env=surroundings, capture_output=True, text=True)
    assert done.stdout.startswith("ok: bdh on python-docs"), done.stderr


def test_an_editable_install_is_a_path_entry(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Editors and type checkers read paths; a hook in Python's import they can't follow."""
    source = built[0].parent / "tree"
    with zipfile.ZipFile(build("editable", source, tmp_path)) as wheel:
        entries = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert len(entries) == 1
        assert entries[0].endswith(".pth")
        assert Path(wheel.read(entries[0]).decode().strip()) == source


@pytest.mark.parametrize(
    ("asked", "environment", "made"),
    [
        ((), ".venv", []),
        (("TORCH=2.14.1",), ".venv-torch-2.14.1", ["s/^torch==.*/torch==2.14.1/"]),
        (("LOWEST=1",), ".venv-lowest", ["--resolution lowest-direct", ".[test]"]),
        (("PYTHON=/usr/bin/python3.13",), ".venv-python3.13", ["/usr/bin/python3.13 -m venv"]),
    ],
)
def test_make_test_on_other_versions_has_an_environment_of_its_own(
    asked: tuple[str, ...], environment: str, made: list[str]
) -> None:
    command = ["make", "--dry-run", "--always-make", "test", *asked]
    said = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    assert f"touch {environment}/.ready" in said
    for part in made:
        assert part in said
    assert ("mypy" in said) == (not asked), "the checks judge the code, not the versions"


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_wheel_in_an_empty_environment_trains_reports_and_submits(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """Installs torch and what else the wheel asks for: a minute, and a gigabyte while it lasts."""
    subprocess.run([sys.executable, "-m", "venv", "empty"], cwd=tmp_path, check=True)
    python = str(tmp_path / "empty/bin/python")
    quiet = ["-m", "pip", "install", "--quiet", "-c", str(REPOSITORY / "constraints.txt")]
    subprocess.run([python, *quiet, f"{built[1]}[tensorboard]"], check=True)
    shutil.copy(REPOSITORY / "examples/demo.yaml", tmp_path)

    def lockstep(*command: str) -> str:
        done = subprocess.run(
            [str(tmp_path / "empty/bin/lockstep"), *command],
            cwd=tmp_path,
            env=environment(PYTHONPATH="", OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    assert lockstep("--version") == f"lockstep {version()}\n"
    lockstep(*_DEMO, *_SHORT)
    assert re.fullmatch(r"[0-9a-f]{64}\n", lockstep("checkpoint", "digest", "run"))
    assert "The " in lockstep("sample", "run", "--tokens", "8")
    lockstep("report", "run")
    assert '"id": "loss"' in (tmp_path / "run/report.html").read_text()
    assert "#SBATCH" in lockstep(
        "submit", "slurm", "demo.yaml", "--nproc-per-node", "2", "--dry-run"
    )
    assert "trainers/fsdp.yaml" in lockstep("config", "list")
