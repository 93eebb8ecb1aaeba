"""Windows of texts in which tokens are hidden."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import DataConfig
from lockstep.data import Data, build_data
from lockstep.data.language import Tokenizer
from lockstep.data.prepare import prepare
from lockstep.errors import UsageError
from tests.data.chats import write_rows, write_tokenizer

pytest.importorskip("transformers")

TEXT = "words of a text, and more of them\n" * 200
MASK = "<|system|>"  # a token that no text has


def made(folder: Path, path: Path | None = None, **args: Any) -> Data:
    write_tokenizer(folder)
    if path is None:
        path = folder / "text.txt"
        path.write_text(TEXT)
    arguments = {"path": str(path), "tokenizer": str(folder), "block_size": 64, "mask_token": MASK}
    return build_data(DataConfig(name="masked", args=arguments | args))


def test_what_is_hidden_is_what_counts(tmp_path: Path) -> None:
    """The labels are the tokens that were there; of four in five the mask stands in their place."""
    data = made(tmp_path, mask_fraction=0.3, validation_fraction=0.0)
    tokenizer = Tokenizer(str(tmp_path))
    mask = tokenizer.number_of(MASK)
    torch.manual_seed(0)
    samples = [data.train[index] for index in range(len(data.train))]
    ids, labels = (torch.stack([each[key] for each in samples]) for key in ("input_ids", "labels"))
    whole = torch.where(labels == -100, ids, labels)
    text = tokenizer.decode(whole.flatten().tolist())
    assert TEXT.startswith(text)
    assert len(text) > len(TEXT) - 65
    chosen = labels != -100
    shares = [
        chosen.float().mean(),
        (ids == mask)[chosen].float().mean(),
        (ids == labels)[chosen].float().mean(),
    ]
    torch.testing.assert_close(
        torch.stack(shares), torch.tensor([0.3, 0.8, 0.1]), rtol=0, atol=0.04
    )
    assert not (ids == mask)[~chosen].any()


def test_a_window_is_hidden_anew_and_follows_from_the_seed(tmp_path: Path) -> None:
    data = made(tmp_path)
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found.append(data.train[3])
    assert torch.equal(found[0]["input_ids"], found[2]["input_ids"])
    assert not torch.equal(found[0]["input_ids"], found[1]["input_ids"])
    assert not getattr(data.train, "deterministic", False), "torch is seeded before each sample"


def test_at_least_one_token_of_a_window_counts(tmp_path: Path) -> None:
    data = made(tmp_path, mask_fraction=1e-9)
    assert all((data.train[n]["labels"] != -100).sum() == 1 for n in range(len(data.train)))


def test_rows_and_prepared_folders_are_read_too(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"body": TEXT}) + "\n")
    of_text = made(tmp_path)
    of_rows = made(tmp_path, rows, text_field="body")
    prepare(tmp_path / "text.txt", tmp_path / "made", str(tmp_path))
    of_folder = made(tmp_path, tmp_path / "made")
    for other in (of_rows, of_folder):
        for part, its in ((of_text.train, other.train), (of_text.validation, other.validation)):
            torch.manual_seed(5)
            expected = part[len(part) - 1]
            torch.manual_seed(5)
            assert torch.equal(its[len(its) - 1]["labels"], expected["labels"])
            assert len(its) == len(part)


def test_what_can_not_be_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mask_fraction should be above 0 and below 1, but is 15"):
        made(tmp_path, mask_fraction=15)
    with pytest.raises(UsageError, match=r"has no token '\[MSK\]'"):
        made(tmp_path, mask_token="[MSK]")
    with pytest.raises(UsageError, match="names no mask_token"):
        made(tmp_path, mask_token=None)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = write_rows(tmp_path / "chat.jsonl", talk)
    from lockstep.data.document_files import Field

    prepare(chat, tmp_path / "chats", str(tmp_path), field=Field("messages", True))
    with pytest.raises(UsageError, match="holds conversations, and the data set masked hides"):
        made(tmp_path, tmp_path / "chats")
