"""Documents of each kind of file, and what is said of files that are bad."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data import document_files
from lockstep.data.document_files import Field, records_of
from lockstep.errors import UsageError
from lockstep.files.data_files import first_row

ROWS = [{"text": f"document {n}", "n": n} for n in range(7)]


def read(file: Path, first: int = 0, field: str = "text") -> list[Any]:
    found = list(records_of(file, Field(field), first))
    faults = [r.fault for r in found if r is not None and r.fault is not None]
    if faults:
        raise faults[0]
    return [r and (r.content, r.row, r.ends) for r in found]


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


DAMAGED = gzip.compress(lines(*ROWS), mtime=0)[:12] + b"\xff" * 40  # zlib says so, and not gzip


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "json.gz", "parquet", "arrow"])
def test_rows_are_documents_and_reading_goes_on_after_any(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_files, "ROWS", 3)
    file = tmp_path / f"set.{kind}"
    if kind == "jsonl":
        file.write_bytes(lines(*ROWS))
    elif kind.endswith(".gz"):
        file.write_bytes(gzip.compress(lines(*ROWS)))
    elif kind == "jsonl.zst":
        pack = pytest.importorskip("zstandard").ZstdCompressor().compress
        file.write_bytes(pack(lines(*ROWS[:4])) + pack(b"") + pack(lines(*ROWS[4:])))
    else:
        datasets = pytest.importorskip("datasets")
        made = datasets.Dataset.from_list(ROWS)
        if kind == "parquet":
            made.to_parquet(file)
        else:
            made.save_to_disk(tmp_path / "saved")
            (written,) = (tmp_path / "saved").glob("*.arrow")
            written.rename(file)
    expected = [(row["text"], row, True) for row in ROWS]
    for first in (0, 2, 3, 7):
        assert read(file, first) == expected[first:]
    with pytest.raises(UsageError, match=r"no 'body' in .*set"):
        read(file, field="body")
    with pytest.raises(UsageError, match="'n' is int, not text, in"):
        read(file, field="n")


def test_tokens_and_texts_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_files, "CHUNK", 4)
    np.save(tmp_path / "one.npy", np.arange(10, dtype=np.uint16))
    found = list(records_of(tmp_path / "one.npy"))
    assert [(r.content.tolist(), r.ends) for r in found] == [
        ([0, 1, 2, 3], False),
        ([4, 5, 6, 7], False),
        ([8, 9], True),
    ]
    np.save(tmp_path / "rows.npy", np.arange(6).reshape(3, 2))
    assert [r.content.tolist() for r in records_of(tmp_path / "rows.npy", first=1)] == [
        [2, 3],
        [4, 5],
    ]
    monkeypatch.setattr("lockstep.data.text.CHUNK", 4)
    (tmp_path / "a.txt").write_text("abc\nde\nfghi\n")
    assert read(tmp_path / "a.txt") == [("abc\nde\n", None, False), ("fghi\n", None, True)]
    assert read(tmp_path / "a.txt", 1) == [("fghi\n", None, True)]
    (tmp_path / "b.txt").write_text("")
    assert read(tmp_path / "b.txt") == [("", None, True)]


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n" + lines(ROWS[0]) + b"  \n" + lines(ROWS[1]))
    assert [found and found[0] for found in read(file)] == [None, "document 0", None, "document 1"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines({"text": "x"}) + b'{"text": "y"', r"line 2 of a\.jsonl is not JSON"),
        ("a.jsonl", lines({"text": "x"}) + b"\xff\n", r"line 2 of a\.jsonl is not UTF-8"),
        ("a.jsonl", lines({"text": "x"}, ["y"]), r"line 2 of a\.jsonl is a list, not an object"),
        ("a.jsonl", lines({"text": "x"}, {"txt": "y"}), r"no 'text' in .*a\.jsonl:2"),
        ("a.jsonl", lines({"text": None}), r"'text' is NoneType, not text, in .*a\.jsonl:1"),
        (
            "a.jsonl.gz",
            gzip.compress(lines(*ROWS * 900), mtime=0)[:-40],
            r"a\.jsonl\.gz can't be read after line \d+",
        ),
        ("a.jsonl.gz", DAMAGED, r"a\.jsonl\.gz can't be read after line \d+"),
        ("a.parquet", b"PAR1 not", r"a\.parquet is not a parquet file that can be read"),
        ("a.arrow", b"not", r"a\.arrow is not an Arrow file that can be read"),
        ("a.npy", b"not", r"a\.npy is not an array that can be read"),
        ("a.md.gz", b"x", r"a\.md\.gz holds compressed bytes"),
        ("a.txt.gz", b"x", r"a\.txt\.gz can't be read"),
        ("a.txt.gz", gzip.compress(b"words " * 900, mtime=0)[:-8], r"a\.txt\.gz can't be read"),
        ("a.tar.zst", b"x", r"a\.tar\.zst holds compressed bytes"),
    ],
)
def test_bad_files_are_one_clear_message(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    if name.endswith((".parquet", ".arrow")):
        pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read(tmp_path / name)


def test_packed_lines_that_are_cut_off_or_damaged_are_refused(tmp_path: Path) -> None:
    """Also where the library that unpacks them would pass over it."""
    pack = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True).compress
    whole = pack(lines(*ROWS * 900)) + pack(lines(*ROWS * 900))
    file = tmp_path / "a.jsonl.zst"
    for content in (whole[:-40], whole[: len(whole) // 2 - 40], whole[:60] + b"xyz" + whole[63:]):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"a\.jsonl\.zst can't be read after line \d+"):
            read(file)


def test_an_array_that_holds_no_tokens_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(UsageError, match="holds float64 of 1 dimensions, which are not tokens"):
        read(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("name", "package"),
    [("a.parquet", "pyarrow"), ("a.arrow", "datasets"), ("a.jsonl.zst", "zstandard")],
)
def test_a_package_that_is_missing_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match=rf"reading .*{name} needs the package {package}"):
        read(tmp_path / name)


def test_a_line_that_is_not_utf8_or_nested_too_deep_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    good = b'{"text": "good"}\n'
    for line, word in (
        (b'{"text": "caf\xe9"}', "line 2 of bad.jsonl is not UTF-8"),
        (
            b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "line 2 of bad.jsonl is nested too deep",
        ),
    ):
        file.write_bytes(good + line)
        with pytest.raises(UsageError, match=word):
            list(records_of(file))


COLUMNS = 'text,n,note\n12,1,\n"two\nlines, one row",2,x\n,3,"a ""quote"""\n'


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "a.tsv.zst"])
def test_columns_of_text_are_rows(name: str, tmp_path: Path) -> None:
    """A text of digits is a text, other columns may be numbers, and rows have several lines."""
    pytest.importorskip("pyarrow")
    file = tmp_path / name
    comma = "," if ".csv" in name else "\t"
    file.write_text(COLUMNS.replace(",", comma), encoding="utf-8-sig")
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(file.read_bytes()))
    elif name.endswith(".zst"):
        pack = pytest.importorskip("zstandard").ZstdCompressor().compress
        file.write_bytes(pack(file.read_bytes()))
    assert first_row(file)["n"] == "1"
    read = list(records_of(file))
    assert [record.content for record in read if record] == [
        "12",
        f"two\nlines{comma} one row",
        "",
    ]
    assert [record.row["n"] for record in read if record and record.row] == [1, 2, 3]
    rest = list(records_of(file, first=2))
    assert rest == read[2:]


def test_an_array_of_json_has_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"text": "a"}, {"body": "b"}, {"text": "c"}]))
    read = list(records_of(file))
    assert [record.content for record in read if record] == ["a", "", "c"]
    assert read[1] is not None
    assert read[1].fault is not None
    assert list(records_of(file, first=2)) == read[2:]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'[{"text": "a"}, 3]', "row 1 of .* is a int, not an object"),
        ("a.json", b'[{"text": "a"},', "a.json is not JSON"),
        ("a.json", b'[{"text": "\xff"}]', "a.json is not JSON"),
        ("a.csv", b"text,label\na,b,c\n", "a.csv holds no columns that can be read"),
        ("a.csv", b"text,label\n\xff,b\n", "a.csv holds no columns that can be read"),
        ("a.csv", b"", "a.csv holds no columns that can be read"),
        ("a.csv.gz", DAMAGED, "a.csv.gz holds no columns that can be read"),
        ("a.json.gz", DAMAGED, "a.json.gz can't be read after line 0"),
    ],
)
def test_rows_that_can_not_be_read(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=said):
        list(records_of(tmp_path / name))
