"""Records become tokens in several processes as in one: the same, in the same order, with the same
errors; and none of the processes outlives the one that started them.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from lockstep.data import encoding
from lockstep.data.document_files import Record
from lockstep.data.encoding import Encoder, encoded
from lockstep.data.filters import Filters
from lockstep.data.language import Tokenizer
from lockstep.data.prepare import PROGRESS, prepare
from lockstep.errors import RunError, UsageError
from tests.data.test_prepare import DOCUMENTS, files_in
from tests.forked import Forked


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_RECORDS", 7)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    rows = [json.dumps({"text": text, "n": n}) for n, text in enumerate(DOCUMENTS)]
    (folder / "a.jsonl").write_text("\n\n".join(rows[:150]))
    (folder / "b.jsonl").write_text("\n".join(rows[150:]))
    (folder / "c.txt").write_text("a text\n" * 300)
    return folder


def is_even(row: dict[str, Any]) -> bool:
    return row["n"] % 2 == 0


def fails(row: dict[str, Any]) -> bool:
    return bool(1 / (row["n"] - 40))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_write_the_same_files(workers: int, source: Path, tmp_path: Path) -> None:
    (source / "c.txt").unlink()
    for name, count in (("one", 0), ("several", workers)):
        filters = Filters(20, 90, f"{__name__}:is_even")
        prepare(source, tmp_path / name, filters=filters, workers=count)
    assert files_in(tmp_path / "several") == files_in(tmp_path / "one")


def killed_at(amount: int, source: Path, out: Path, workers: int) -> None:
    command = [sys.executable, "-m", "tests.data.killed_prepare"]
    arguments = [str(amount), str(source), str(out), str(workers)]
    process = Forked([*command, *arguments], env=dict(os.environ))
    assert process.wait(300) == -signal.SIGKILL


def test_killed_it_goes_on_with_another_number(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "expected")
    size = sum(file.stat().st_size for file in source.iterdir())
    out = tmp_path / "out"
    killed_at(int(size * 0.3), source, out, 2)
    assert (tmp_path / ".out.preparing" / PROGRESS).exists()
    killed_at(int(size * 0.2), source, out, 1)
    said: list[str] = []
    prepare(source, out, workers=3, say=said.append)
    assert "goes on after" in said[0]
    assert files_in(out) == files_in(tmp_path / "expected")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_bad_record_is_the_error(workers: int, source: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": "x", "n": n}) for n in range(60)]
    rows[50] = "{"
    (source / "a.jsonl").write_text("\n".join(rows))
    filters = Filters(keep=f"{__name__}:fails")
    with pytest.raises(UsageError, match=r"fails failed for .*a\.jsonl:41"):
        prepare(source / "a.jsonl", tmp_path / "out", filters=filters, workers=workers)
    with pytest.raises(UsageError, match="line 51 of"):
        prepare(source / "a.jsonl", tmp_path / "out", workers=workers)


def records(count: int) -> Iterator[tuple[int, Record]]:
    for number in range(count):
        yield 0, Record(f"record {number}", "here", 10)


def test_a_worker_that_is_killed_is_one_error() -> None:
    before = set(psutil.Process().children())
    found = encoded(records(10_000), Encoder(Tokenizer(), Filters()), 2)
    assert len(list(islice(found, 7))) == 7
    for child in set(psutil.Process().children()) - before:
        child.kill()
    with pytest.raises(RunError, match="a process that tokenizes has ended"):
        list(found)


def test_reading_does_not_run_far_ahead() -> None:
    read = 0

    def counted() -> Iterator[tuple[int, Record]]:
        nonlocal read
        for each in records(10_000):
            read += 1
            yield each

    found = encoded(counted(), Encoder(Tokenizer(), Filters()), 2)
    first = list(islice(found, 7))
    assert [bytes(e.pieces[0][0].astype(np.uint8)).decode() for _, _, e in first if e] == [
        f"record {number}" for number in range(7)
    ]
    assert read <= 7 * (2 * 3 + 1)
    found.close()  # type: ignore[attr-defined]


def test_workers_end_with_the_process_that_is_killed(source: Path, tmp_path: Path) -> None:
    """The lock on the folder goes with them, so that the next one can go on."""
    size = sum(file.stat().st_size for file in source.iterdir())
    killed_at(int(size * 0.5), source, tmp_path / "out", 2)
    prepare(source, tmp_path / "out")  # no worker holds the lock
    for _ in range(3000):
        if not [p for p in psutil.process_iter() if is_worker_of(p, tmp_path)]:
            return
        time.sleep(0.1)
    raise AssertionError("workers outlive the process that started them")


def is_worker_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return str(folder) in " ".join(process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.parametrize("workers", [0, 1])
def test_half_of_a_surrogate_pair_is_one_error_with_its_line(workers: int) -> None:
    record = Record("half \ud83d of a pair", "a.jsonl:2", 1)
    encoder = Encoder(Tokenizer("bytes"), Filters())
    with pytest.raises(UsageError, match=r"a\.jsonl:2 holds \\ud83d, which is not a character"):
        list(encoded([(0, record)], encoder, workers))
