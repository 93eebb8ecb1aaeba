"""A rank answers the launcher in one folder at a time."""

import threading
from pathlib import Path

import pytest

from lockstep.torch_compat import flight_recorder
from lockstep.trainer.flight_dump import dump_collectives_on_request
from tests.launch.shared import wait_for


def _answering() -> int:
    return sum(thread.name == "flight" for thread in threading.enumerate())


@pytest.mark.skipif(flight_recorder.read is None, reason="this torch has no flight recorder")
def test_a_rank_that_goes_on_answers_in_its_newest_folder_alone(tmp_path: Path) -> None:
    before = _answering()
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        dump_collectives_on_request(folder, rank=0)
    for folder in folders:
        (folder / "dump").touch()
    wait_for((folders[1] / "flight-0.json").exists)
    wait_for(lambda: _answering() <= before + 1)
    assert not (folders[0] / "flight-0.json").exists()
    dump_collectives_on_request(tmp_path / "gone", rank=0)
    wait_for(lambda: _answering() <= before)
