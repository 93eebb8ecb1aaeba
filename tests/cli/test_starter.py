"""What `lockstep init` and `lockstep new-model` write trains as it stands, and nothing is
overwritten.
"""

import ast
import gzip
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.config import load_config
from tests.data.chats import BOTH, write_rows, write_tokenizer
from tests.forked import Forked
from tests.launch.shared import environment


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "started_in",
    [["table"], pytest.param(["text", "table", "."], marks=pytest.mark.full)],
    ids=["one", "all"],
)
def test_what_is_written_trains_and_is_proved(here: Path, started_in: list[str]) -> None:
    for argv in (["init", "text"], ["init", "table", "--script"], ["new-model", "my-model"]):
        assert cli.main(argv) == 0
    commands = {
        "text": ["lockstep", "train", "train.yaml", "--max-steps", "2"],
        "table": ["train"],
        ".": ["pytest", "-q", "test_my_model.py"],
    }
    started = {
        folder: Forked(
            [sys.executable, "-m", *command],
            cwd=here / folder,
            env=environment(),
            stdout=-1,
            stderr=-2,
            text=True,
        )
        for folder, command in commands.items()
        if folder in started_in
    }
    said = {folder: process.communicate(timeout=500)[0] for folder, process in started.items()}
    for folder, process in started.items():
        assert process.returncode == 0, said[folder]
    assert "step 2/2" in said.get("text", "step 2/2")
    accuracy = said["table"].rpartition("eval_accuracy ")[2].split()[0]
    assert float(accuracy) > 0.7, said["table"]


@pytest.mark.promise("Nothing that exists is written over, except what Lockstep itself wrote")
def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / ".git").touch()
    assert cli.main(["init", "mine"]) == 0, "hidden files are not a hindrance"
    assert capsys.readouterr().out.splitlines()[1] == "  cd mine"
    message = refused(capsys, "init", "mine")
    assert "mine has files already: text, train.yaml" in message
    assert "lockstep init DIR" in message
    assert cli.main(["new-model", "bird"]) == 0
    assert "bird.py, bird.yaml, test_bird.py is here already" in refused(
        capsys, "new-model", "bird"
    )


@pytest.mark.parametrize("name", ["3d", "class", "a b", "_"])
def test_a_model_has_a_name_that_python_can_import(
    here: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "not a name for a Python module" in refused(capsys, "new-model", name)
    assert list(here.iterdir()) == []


def test_a_project_reads_data_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "book.txt").write_text("words " * 400)
    (here / "rows'.csv").write_text("a,b\n1,x\n")
    assert cli.main(["init", "text", "--data", "book.txt"]) == 0
    assert load_config(here / "text" / "train.yaml").data.args["path"] == "../book.txt"
    assert cli.main(["init", "table", "--script", "--data", "rows'.csv"]) == 0
    text = (here / "table" / "train.py").read_text()
    ast.parse(text)
    assert """Table("../rows'.csv")""" in text
    assert "there is no file nowhere.txt" in refused(
        capsys, "init", "other", "--data", "nowhere.txt"
    )
    assert not (here / "other").exists()


TINY = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 96,
}


def write_chat_model(folder: Path) -> Path:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def test_a_chat_model_and_conversations_make_a_config(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    write_chat_model(here / "model")
    write_rows(here / "chat.jsonl", BOTH)
    asked = ["init", "tuned", "--finetune", "model", "--data", "chat.jsonl"]
    assert cli.main(asked) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "  cd tuned",
        "  lockstep data show train.yaml",
        "  lockstep train train.yaml",
    ]
    config = load_config(here / "tuned" / "train.yaml")
    assert config.model.name == "hf:../model"
    assert (config.model.lora is None) == (find_spec("peft") is None)
    assert config.data.args["sources"] == [{"path": "../chat.jsonl", "messages_field": "messages"}]
    assert config.data.args["sequence_length"] == 96
    assert "has files already" in refused(capsys, *asked)


def test_a_folder_is_as_its_first_file_says(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    write_chat_model(here / "model")
    (here / "rows").mkdir()
    (here / "rows" / "0.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    assert cli.main(["init", "tuned", "--finetune", "model", "--data", "rows"]) == 0
    source = load_config(here / "tuned" / "train.yaml").data.args["sources"][0]
    assert source == {"path": "../rows", "prompt_field": "question", "answer_field": "answer"}
    (here / "texts").mkdir()
    (here / "texts" / "a.py").write_text("x = 1\n")
    capsys.readouterr()
    told = refused(capsys, "init", "new", "--finetune", "model", "--data", "texts")
    assert "a.py holds text, and no conversations" in told


def test_prompts_and_answers_make_a_config(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    write_chat_model(here / "model")
    row = {"instruction": "2 + 2?", "input": "", "output": "4"}
    (here / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(["init", "tuned", "--finetune", "model", "--data", "rows.jsonl"]) == 0
    config = load_config(here / "tuned" / "train.yaml")
    keys = {"prompt_field": ["instruction", "input"], "answer_field": "output"}
    assert config.data.args["sources"] == [{"path": "../rows.jsonl", **keys}]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (
            {"prompt": BOTH[:1], "chosen": BOTH[1:2], "rejected": BOTH[1:2]},
            {"prompt_field": "prompt", "chosen_field": "chosen", "rejected_field": "rejected"},
        ),
        (
            {"prompt": "a", "chosen": BOTH[:2], "rejected": BOTH[:2], "messages": BOTH[:2]},
            {"chosen_field": "chosen", "rejected_field": "rejected"},
        ),
    ],
)
def test_pairs_of_answers_make_a_config_with_a_loss_over_pairs(
    here: Path, row: dict[str, Any], keys: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    write_chat_model(here / "model")
    (here / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    assert cli.main(["init", "tuned", "--finetune", "model", "--data", "pairs.jsonl"]) == 0
    config = load_config(here / "tuned" / "train.yaml")
    assert config.data.name == "preferences"
    assert config.data.args["sources"] == [{"path": "../pairs.jsonl", **keys}]
    assert config.data.args["sequence_length"] == 2 * 96
    assert config.loss_fn is not None
    assert config.loss_fn.args == {"beta": 0.1}
    capsys.readouterr()


def test_what_can_not_be_fine_tuned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    write_chat_model(here / "model")
    write_chat_model(here / "bare")
    (here / "bare" / "chat_template.jinja").unlink()
    write_chat_model(here / "broken")
    (here / "broken" / "config.json").write_text("{")
    (here / "empty").mkdir()
    (here / "text.jsonl").write_text('{"text": "words"}\n')
    (here / "bad.jsonl").write_text("{\n")
    (here / "deep.jsonl").write_text("[" * 100_000)
    (here / "columns.csv").write_text("a,b\n1,2\n")
    (here / "list.jsonl").write_text('\n["messages"]\n')
    (here / "latin.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    (here / "damaged.jsonl.gz").write_bytes(gzip.compress(b"{}" * 99)[:12] + b"\xff" * 40)
    (here / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    for name, text in (("deep", "[" * 100_000), ("none", '{"max_position_embeddings": -1}')):
        write_chat_model(here / name)
        (here / name / "config.json").write_text(text)
    write_rows(here / "chat.jsonl", BOTH)
    for model, data, message in [
        ("empty", "chat.jsonl", "empty is not a chat model: it has no config.json and no tok"),
        ("broken", "chat.jsonl", "the config of broken can't be read"),
        ("bare", "chat.jsonl", "the tokenizer in bare has no chat template"),
        ("model", "nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("model", "text.jsonl", "the first line of text.jsonl has no conversation"),
        ("model", "columns.csv", "the first row of columns.csv has no conversation"),
        ("model", "bad.jsonl", "line 1 of bad.jsonl is not JSON"),
        ("model", "deep.jsonl", "line 1 of deep.jsonl is nested too deep"),
        ("model", "list.jsonl", "line 2 of list.jsonl is a list, not an object"),
        ("model", "latin.jsonl", "line 1 of latin.jsonl is not UTF-8"),
        ("model", "damaged.jsonl.gz", "damaged.jsonl.gz can't be read"),
        ("model", "cut.jsonl.gz", "cut.jsonl.gz can't be read"),
        ("deep", "chat.jsonl", "the config of deep can't be read"),
        ("none", "chat.jsonl", "the config of none can't be read"),
    ]:
        assert message in refused(capsys, "init", "new", "--finetune", model, "--data", data)
    assert "no conversations are given" in refused(capsys, "init", "new", "--finetune", "model")
    assert not (here / "new").exists()


@pytest.mark.full
def test_a_fine_tuning_trains_as_it_is_written(here: Path) -> None:
    pytest.importorskip("transformers")
    write_chat_model(here / "model")
    write_rows(here / "chat.jsonl", *[BOTH] * 60)
    assert cli.main(["init", "tuned", "--finetune", "model", "--data", "chat.jsonl"]) == 0
    command = [sys.executable, "-m", "lockstep", "train", "train.yaml", "--max-steps", "2"]
    done = Forked(command, cwd=here / "tuned", env=environment(), stdout=-1, stderr=-2, text=True)
    said = done.communicate(timeout=500)[0]
    assert done.returncode == 0, said
    assert "step 2/2" in said
