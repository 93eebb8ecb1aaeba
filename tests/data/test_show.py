"""What `lockstep data show` prints: each document, and what of it is trained."""

import io
import json
import sys
from pathlib import Path

import pytest

from lockstep import cli
from tests.data.chats import BOTH, write_rows, write_tokenizer

CONFIG = """
model: {name: transformer}
data:
  name: documents
  args: {sources: [%s], sequence_length: 64, tokenizer: %s}
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_trained_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    write_tokenizer(Path("model"))
    write_rows(Path("chat.jsonl"), BOTH, BOTH[:2])
    Path("chat.yaml").write_text(CONFIG % ("{path: chat.jsonl, messages_field: messages}", "model"))
    assert cli.main(["data", "show", "chat.yaml"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Trained is what stands between « and ».",
        "",
        "sample 0: 2 documents, 20 of 64 targets count",
        "---",
        "<|user|>2 + 2?<|end|>",
        "<|assistant|>«it is 4<|end|>»",
        "<|user|>sure?<|end|>",
        "<|assistant|>«yes<|end|>»",
        "---",
        "<|user|>2 + 2?<|end|>",
        "<|assistant|>«it is 4<|end|>»",
    ]
    screen = Terminal()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", screen)
    assert cli.main(["data", "show", "chat.yaml", "--samples", "1"]) == 0
    assert "<|assistant|>\x1b[32mit is 4<|end|>\x1b[0m" in screen.getvalue()


def test_a_text_is_trained_but_for_its_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(json.dumps({"text": "words"}) + "\n")
    Path("a.yaml").write_text(CONFIG % ("a.jsonl", "bytes"))
    assert cli.main(["data", "show", "a.yaml"]) == 0
    assert capsys.readouterr().out.endswith("4 of 64 targets count\n---\nw«ords»\n")
    Path("b.yaml").write_text("model: {name: vae}\ndata: {name: digits}\n")
    assert cli.main(["data", "show", "b.yaml"]) == 2
    assert "are not text" in capsys.readouterr().err
    assert cli.main(["data", "show", "a.yaml", "--samples", "0"]) == 2
