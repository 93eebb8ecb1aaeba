"""A file of records that is taken for text is refused in every way in which data are named, with
what to write instead, and before ranks start.
"""

import gzip
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from lockstep.cli import main
from lockstep.config import Config, DataConfig
from lockstep.data import build_data, check_data
from lockstep.data.document_files import Field, records_of
from lockstep.data.prepare import prepare
from lockstep.errors import UsageError
from lockstep.evaluate.subject import _on
from lockstep.files.data_files import (
    ROWS,
    Kind,
    check_named_files,
    conversation_keys,
    kind_of,
    require_read,
    require_text,
    source_like,
    source_of,
)

ROW = {"title": "a", "body": "some words of a text", "n": 1}
CHAT = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


FILES: dict[str, tuple[bytes, Kind]] = {
    "a.jsonl": (lines(ROW, ROW), Kind.LINES),
    "a.JSONL": (lines(ROW, ROW), Kind.LINES),
    "a.ndjson": (lines(ROW, ROW), Kind.LINES),
    "a.jsonl.gz": (gzip.compress(lines(ROW, ROW), mtime=0), Kind.LINES),
    "lines.json": (b"\n" + lines(ROW, ROW), Kind.LINES),
    "no_ending": (lines(ROW, ROW), Kind.LINES),
    "array.json": (json.dumps([ROW, ROW], indent=2).encode(), Kind.JSON_ARRAY),
    "lines.json.gz": (gzip.compress(lines(ROW, ROW), mtime=0), Kind.LINES),
    "array.json.gz": (gzip.compress(json.dumps([ROW]).encode(), mtime=0), Kind.JSON_ARRAY),
    "settings.json.gz": (gzip.compress(json.dumps(ROW).encode(), mtime=0), Kind.COMPRESSED),
    "a.csv": (b"a,b\n1,2\n", Kind.COLUMNS),
    "a.csv.gz": (gzip.compress(b"a,b\n1,2\n", mtime=0), Kind.COLUMNS),
    "a.tsv.zst": (b"\x28\xb5\x2f\xfd", Kind.COLUMNS),
    "a.parquet": (b"PAR1", Kind.PARQUET),
    "a.arrow": (b"ARROW1", Kind.ARROW),
    "a.npy": (b"\x93NUMPY", Kind.TOKENS),
    "a.md.gz": (gzip.compress(b"text", mtime=0), Kind.COMPRESSED),
    "train.bin": (np.arange(50, dtype=np.uint16).tobytes(), Kind.BINARY),
    "renamed.txt": (b"PAR1\x15\x04", Kind.BINARY),
}
TEXTS = {
    "settings.json": json.dumps(ROW, indent=2).encode(),
    "one_line.json": json.dumps(ROW).encode(),
    "named.txt": lines(ROW, ROW),
    "packed.txt.gz": gzip.compress(b"words of a text", mtime=0),
    "a.md": b"# A page\n{not json}\n",
    "empty.txt": b"",
    "braces.c": b"{\n{ return; }\n}\n",
}


def write(folder: Path, name: str, content: bytes) -> Path:
    file = folder / name
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("name", FILES)
def test_the_kind_of_a_file(name: str, tmp_path: Path) -> None:
    content, kind = FILES[name]
    assert kind_of(write(tmp_path, name, content)) is kind


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_text_stays_text(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, name, TEXTS[name])
    assert kind_of(file) is Kind.TEXT
    if TEXTS[name]:
        args = {"path": str(file), "block_size": 4, "validation_fraction": 0}
        assert build_data(DataConfig(name="text", args=args)).train


def build(name: str, **args: Any) -> Callable[[], Any]:
    return lambda: build_data(DataConfig(name=name, args={"validation_fraction": 0, **args}))


@pytest.mark.parametrize("name", FILES)
def test_text_refuses_it_alone_and_in_a_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("words of a text\n" * 9)
    file = write(folder, name, FILES[name][0])
    for path in (file, folder):
        for documents in (False, True):
            with pytest.raises(UsageError, match=re.escape(f"{file} holds")) as caught:
                build("text", path=str(path), documents=documents)()
            assert caught.value.fix
        with pytest.raises(UsageError, match=re.escape(f"{file} holds")):
            check_data(DataConfig(name="text", args={"path": str(path)}))


@pytest.mark.parametrize("name", FILES)
def test_documents_and_prepare_read_it_or_refuse_it(name: str, tmp_path: Path) -> None:
    content, kind = FILES[name]
    file = write(tmp_path, name, content)
    if kind is Kind.LINES:
        read, again = [record for record in records_of(file, Field("body")) if record]
        assert read.content == again.content == ROW["body"]
        return
    if kind in (*ROWS, Kind.TOKENS):
        return  # tests/data/test_document_files.py
    for attempt in (
        build("documents", sources=[str(file)]),
        lambda: check_data(DataConfig(name="documents", args={"sources": str(file)})),
        lambda: prepare(file, tmp_path / "out"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"{file} holds")) as caught:
            attempt()
        assert caught.value.fix


def test_what_to_write_instead_trains(tmp_path: Path) -> None:
    """The line of the advice is a config that builds the data."""
    file = write(tmp_path, "a.jsonl", lines(ROW, ROW, ROW))
    with pytest.raises(UsageError) as caught:
        build("text", path=str(file))()
    assert caught.value.fix is not None
    line = re.search(r"write data: (\{.*\}\})", caught.value.fix)
    assert line is not None
    made = yaml.safe_load(line[1])
    data = build_data(DataConfig(name=made["name"], args={**made["args"], "sequence_length": 8}))
    ids = data.train[0]["input_ids"].tolist()
    assert bytes(ids).decode() in ROW["body"]


def test_the_field_to_name_is_found(tmp_path: Path) -> None:
    chat = write(tmp_path, "chat.jsonl", lines(CHAT))
    assert source_of(chat) == {"path": str(chat), "messages_field": "messages"}
    rows = write(tmp_path, "rows.jsonl.gz", gzip.compress(lines(ROW)))
    assert source_of(rows) == {"path": str(rows), "text_field": "body"}
    texts = write(tmp_path, "texts.jsonl", lines({"text": "a"}))
    assert source_of(texts) == str(texts)
    numbers = source_of(write(tmp_path, "numbers.jsonl", lines({"n": 1})))
    assert isinstance(numbers, dict)
    assert numbers["text_field"] == "NAME"


SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "a", "messages": CHAT["messages"]}, {"messages_field": "messages"}),
        ({"id": 1, "conversations": SHAREGPT}, {"messages_field": "conversations"}),
        (
            {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][:1]},
            {"prompt_field": "prompt", "answer_field": "completion"},
        ),
        (
            {"instruction": "a", "input": "", "output": "b"},
            {"prompt_field": ["instruction", "input"], "answer_field": "output"},
        ),
        ({"question": "a", "answer": "b"}, {"prompt_field": "question", "answer_field": "answer"}),
        ({"question": "a", "answer": {"text": ["b"]}}, {}),
        ({"text": "a", "parts": [{"from": "b"}]}, {}),
    ],
)
def test_the_fields_of_conversations_are_found(row: dict[str, Any], keys: dict[str, Any]) -> None:
    assert conversation_keys(row) == keys


def test_other_files_are_read_as_those_that_were_trained_on(tmp_path: Path) -> None:
    chats = {"path": "x", "messages_field": "messages", "weight": 3}
    bodies = {"path": "y", "text_field": "body", "special_tokens": True}
    chat = write(tmp_path, "chat.jsonl", lines(CHAT))
    rows = write(tmp_path, "rows.jsonl", lines({"text": "other", **ROW}))
    texts = write(tmp_path, "texts.jsonl", lines({"text": "a", "output": "b", "instruction": "c"}))
    trained_on = ["plain", chats, bodies]
    assert source_like(chat, trained_on) == {"path": str(chat), "messages_field": "messages"}
    assert source_like(chat, []) == {"path": str(chat), "messages_field": "messages"}
    of_rows = {"path": str(rows), "text_field": "body", "special_tokens": True}
    assert source_like(rows, [chats, bodies]) == of_rows
    assert source_like(rows, trained_on) == source_like(rows, []) == str(rows)
    assert source_like(texts, [chats]) == str(texts)
    assert source_like(write(tmp_path, "a.txt", b"words"), trained_on) == str(tmp_path / "a.txt")
    (tmp_path / "made").mkdir()
    write(tmp_path / "made", "tokens.json", b"{}")
    assert source_like(tmp_path / "made", [chats]) == str(tmp_path / "made")


def test_the_field_of_a_table_is_found(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "a.parquet"
    datasets.Dataset.from_list([ROW]).to_parquet(file)
    assert source_of(file) == {"path": str(file), "text_field": "body"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps([ROW]).encode()),
        ("a.csv", b"\xef\xbb\xbftitle,body,n\na,words,1\n"),
        ("a.tsv", b"title\tbody\tn\na\twords\t1\n"),
    ],
)
def test_the_field_of_other_rows_is_found(name: str, content: bytes, tmp_path: Path) -> None:
    file = write(tmp_path, name, content)
    assert source_of(file) == {"path": str(file), "text_field": "body"}
    with pytest.raises(UsageError, match="not text"):
        require_text(file)


@pytest.mark.parametrize("folder", ["plain", 'it\'s, a {folder}: of "mine"'])
@pytest.mark.parametrize("name", ["train.bin"])
def test_the_code_of_an_advice_makes_what_it_says(name: str, folder: str, tmp_path: Path) -> None:
    """A shell gives Python the code as it is written, whatever the path has in it."""
    (tmp_path / folder).mkdir()
    file = write(tmp_path / folder, name, FILES[name][0])
    with pytest.raises(UsageError) as caught:
        require_read(file, "here")
    fix = caught.value.fix or ""
    command = re.search(r"python -c .*?(?=$|, and write data|; to train)", fix)
    assert command is not None
    code = shlex.split(command[0])[2]
    exec(code, {})
    assert np.load(file.with_suffix(".npy")).tolist() == list(range(50))
    written = yaml.safe_load(fix[fix.index("data: ") :])
    assert written["data"]["args"]["sources"] == [str(file.with_suffix(".npy"))]


def test_the_line_of_an_advice_is_read_as_it_is_meant(tmp_path: Path) -> None:
    folder = tmp_path / "it's, a {folder}: #1"
    folder.mkdir()
    file = write(folder, "a.jsonl", lines(ROW))
    with pytest.raises(UsageError) as caught:
        require_text(file)
    line = re.search(r"data: .*(?=; to train)", caught.value.fix or "")
    assert line is not None
    source = {"path": str(file), "text_field": "body"}
    assert yaml.safe_load(line[0])["data"] == {"name": "documents", "args": {"sources": [source]}}


def test_json_that_is_named_text_is_trained_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "named.txt", lines(ROW, ROW) * 20)
    line = "JSON is trained as it stands"
    assert line in build("text", path=str(file), block_size=8)().notices[0]
    assert line in build("documents", sources=str(file), sequence_length=8)().notices[0]
    assert main(["data", "prepare", str(file), "--out", str(tmp_path / "out")]) == 0
    assert line in capsys.readouterr().out


def test_files_where_a_folder_of_tokens_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, "a.jsonl", lines(ROW))
    for path in (file, tmp_path):
        with pytest.raises(UsageError, match="not a folder that") as caught:
            build("tokens", path=str(path))()
        assert f"lockstep data prepare {path} --out" in str(caught.value)


def test_a_file_behind_hf(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    file = write(tmp_path, "a.jsonl", lines(ROW))
    with pytest.raises(UsageError, match="is a file") as caught:
        build_data(DataConfig(name=f"hf:{file}"))
    assert f"sources: [{{path: {file}, text_field: body}}]" in str(caught.value)


def test_a_run_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.jsonl", lines(ROW))
    config = {
        "model": {"name": "transformer"},
        "data": {"name": "text", "args": {"path": "a.jsonl"}},
        "training": {"max_steps": 1},
    }
    Path("c.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "c.yaml", "--nproc-per-node", "2"]) == 2
    assert "a.jsonl holds an object of JSON on each line" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert main(["config", "check", "c.yaml"]) == 2
    assert "a.jsonl holds an object of JSON on each line" in capsys.readouterr().err


def test_init_refuses_it(tmp_path: Path) -> None:
    file = write(tmp_path, "a.jsonl", lines(ROW))
    new = str(tmp_path / "new")
    assert main(["init", new, "--data", str(file)]) == 2
    assert not Path(new).exists()


@pytest.mark.parametrize("name", ["a.txt", "a.npy"])
def test_init_for_finetuning_refuses_what_holds_no_rows(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, name, FILES.get(name, (b"a text\n", None))[0])
    model = tmp_path / "model"
    model.mkdir()
    for part in ("config.json", "tokenizer.json"):
        (model / part).write_text("{}")
    (model / "chat_template.jinja").write_text("")
    arguments = ["init", str(tmp_path / "new"), "--finetune", str(model), "--data", str(file)]
    assert main(arguments) == 2
    assert f"{file} holds" in capsys.readouterr().err


def test_evaluate_refuses_it(tmp_path: Path) -> None:
    file = write(tmp_path, "a.jsonl", lines(ROW))
    config = Config.model_validate({"data": {"name": "text", "args": {"path": "b.txt"}}})
    with pytest.raises(UsageError, match="holds an object of JSON") as caught:
        _on(config, file)
    assert caught.value.where == f"--data {file}"


def test_what_is_not_written_as_it_should_be_is_left_to_the_data_set() -> None:
    for args in ({}, {"sources": 3}, {"sources": [{"weight": 1}, 4]}, {"path": 3}):
        for name in ("text", "documents", "tokens", None):
            check_named_files(name, args)
