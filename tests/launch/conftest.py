"""Launches from within the tests' own process, which has loaded torch once; the ranks are processes
all the same.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.cli import main
from tests.hosts import Host, hosts, require_root
from tests.launch.shared import CLEAN, Ended, environment

Launch = Callable[..., Ended]


@pytest.fixture
def launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Launch:
    """`lockstep launch ARGUMENTS` in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    for name in CLEAN:
        monkeypatch.delenv(name, raising=False)
    for name in ("PYTHONPATH", "PYTHONUNBUFFERED"):
        monkeypatch.setenv(name, environment()[name])

    def run(*arguments: str) -> Ended:
        capfd.readouterr()
        code = main(["launch", *arguments])
        out, err = capfd.readouterr()
        return Ended(code, out, err, tmp_path)

    return run


@pytest.fixture(scope="module")
def four() -> Iterator[list[Host]]:
    require_root()
    with hosts(4) as made:
        yield made
