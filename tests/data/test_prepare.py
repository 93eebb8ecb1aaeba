"""Preparing: documents and their ends in a folder, killed and continued, and what was left out."""

import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data import prepare as prepare_module
from lockstep.data.filters import Filters
from lockstep.data.prepare import PROGRESS, prepare, prepare_command
from lockstep.data.token_folder import TokenFile, ends_of, read_header
from lockstep.errors import UsageError
from tests.forked import Forked

# Few are left out: the file of tokens is cut there, which would hide that it has too many.
DOCUMENTS = [f"document {n} {'x' * (n % 17 * 20)}" * (n % 80 and n % 5 + 1) for n in range(400)]


def is_even(row: dict[str, Any]) -> bool:
    return row["n"] % 2 == 0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    rows = [json.dumps({"text": text, "n": n}) for n, text in enumerate(DOCUMENTS)]
    (folder / "a.jsonl").write_text("\n".join(rows[:150]))
    (folder / "b.jsonl").write_text("\n".join(rows[150:]))
    (folder / "c.txt").write_text("a text\n" * 300)
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def texts(folder: Path) -> list[str]:
    header = read_header(folder)
    ends = ends_of(folder, header)[0 : header["documents"]]
    tokens = TokenFile(folder / "tokens.bin", header["dtype"], 0, header["num_tokens"])
    begins = [0, *ends[:-1]]
    return [
        bytes(tokens[begin:end].astype(np.uint8)).decode()
        for begin, end in zip(begins, ends, strict=True)
    ]


def test_documents_are_kept_apart_and_empty_ones_left_out(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "out")
    kept = [text for text in DOCUMENTS if text]
    assert texts(tmp_path / "out") == [*kept, "a text\n" * 300]
    header = read_header(tmp_path / "out")
    assert header["documents"] == len(kept) + 1
    assert header["left_out"] == {"empty": len(DOCUMENTS) - len(kept)}


def test_the_command_says_what_it_left_out_and_why(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "c.txt").unlink()
    out = str(tmp_path / "out")
    options = ["--min-tokens", "20", "--max-tokens", "90", "--keep", f"{__name__}:is_even"]
    assert prepare_command(["prepare", str(source), "--out", out, *options]) == 0
    kept = [t for n, t in enumerate(DOCUMENTS) if n % 2 == 0 and 20 <= len(t) <= 90]
    assert texts(tmp_path / "out") == kept
    said = capsys.readouterr().out
    assert f"{len(kept)} documents" in said
    assert "200 refused by tests.data.test_prepare:is_even" in said
    assert "shorter than 20 tokens" in said
    assert "longer than 90 tokens" in said
    assert f"sources: [{out}]" in said


def killed_at(amount: int, source: Path, out: Path) -> None:
    """Prepare in another process, which kills itself once it has read so many bytes."""
    command = [
        sys.executable,
        "-m",
        "tests.data.killed_prepare",
        str(amount),
        str(source),
        str(out),
    ]
    process = Forked(command, env=dict(os.environ))
    assert process.wait(300) == -signal.SIGKILL


def test_killed_anywhere_it_goes_on_and_writes_the_same(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "expected")
    size = sum(file.stat().st_size for file in source.iterdir())
    out = tmp_path / "out"
    said: list[str] = []
    told: list[int] = []
    for share in (0.3, 0.2):
        killed_at(int(size * share), source, out)
        assert not out.exists()
        assert (tmp_path / ".out.preparing" / PROGRESS).exists()
    prepare(source, out, say=said.append, advance=told.append)
    assert files_in(out) == files_in(tmp_path / "expected")
    assert len(said) == 1
    assert "goes on after" in said[0]
    assert sum(told) < 0.65 * size
    assert not (tmp_path / ".out.preparing").exists()


def test_other_arguments_begin_anew(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_at(90_000, source, out)
    said: list[str] = []
    prepare(source, out, filters=Filters(min_tokens=30), say=said.append)
    assert said == []
    prepare(source, tmp_path / "expected", filters=Filters(min_tokens=30))
    assert files_in(out) == files_in(tmp_path / "expected")


def test_a_long_text_is_left_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.data.text.CHUNK", 10)
    monkeypatch.setattr(prepare_module, "SAVED_EVERY", 10)
    folder = tmp_path / "source"
    folder.mkdir()
    for name, count in (("a", 3), ("b", 30), ("c", 4)):
        (folder / f"{name}.txt").write_text(f"line {name}\n" * count)
    prepare(folder, tmp_path / "out", filters=Filters(max_tokens=100))
    assert texts(tmp_path / "out") == ["line a\n" * 3, "line c\n" * 4]


def test_two_processes_do_not_write_one_folder(source: Path, tmp_path: Path) -> None:
    work = tmp_path / ".out.preparing"
    work.mkdir()
    held = os.open(work, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="another process prepares"):
        prepare(source, tmp_path / "out")
    assert work.exists()
    os.close(held)
    prepare(source, tmp_path / "out")


def test_nothing_that_is_kept_is_an_error_with_the_reasons(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no document is kept") as caught:
        prepare(source, tmp_path / "out", filters=Filters(min_tokens=10_000))
    assert "shorter than 10000 tokens" in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_tokens_that_the_tokenizer_lacks_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 50_256, 7]))
    with pytest.raises(UsageError, match=r"there is a token 50256 in .*a\.npy, row 0") as caught:
        prepare(tmp_path / "a.npy", tmp_path / "out")
    assert "the tokenizer bytes has the tokens 0 to 255" in str(caught.value)


def test_a_folder_without_ends_is_one_document(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, out)
    header = json.loads((out / "tokens.json").read_text())
    for key in ("documents", "left_out"):
        del header[key]
    (out / "tokens.json").write_text(json.dumps(header))
    (out / "documents.bin").unlink()
    assert ends_of(out, read_header(out)).tolist() == [header["num_tokens"]]
