"""Shows what a config trains: samples as text, with the tokens that are targets marked.

On a terminal these are green; elsewhere they stand between « and ».

Tests: tests/data/test_show.py
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from lockstep.config import load_config
from lockstep.data.batches import Data
from lockstep.data.datasets import build_data
from lockstep.data.language import IGNORED
from lockstep.errors import UsageError
from lockstep.machine.output import is_terminal

COLOURS = ("\x1b[32m", "\x1b[0m")
SIGNS = ("«", "»")


def show(path: Path, overrides: Sequence[str], samples: int) -> str:
    """Return the first samples of a config's training data; a UsageError if they are not text."""
    config = load_config(path, overrides)
    if samples < 1:
        raise UsageError(f"--samples {samples} is not a number from 1 on", fix="leave it out: 2")
    data = build_data(config.data, seed=config.training.seed)
    coloured = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
    marks = COLOURS if coloured else SIGNS
    return "\n\n".join([*data.notices, *shown(data, samples, marks, str(path))])


def shown(data: Data, samples: int, marks: tuple[str, str], where: str) -> list[str]:
    """Return a paragraph for each of the first samples, and one that says what is marked."""
    decode = data.decode_special or data.decode
    shown_samples = [data.train[index] for index in range(min(samples, len(data.train)))]
    if decode is None or not all(
        {"input_ids", "targets"} <= sample.keys() for sample in shown_samples
    ):
        what = "the samples of this data set are not text"
        fix = "show data whose samples are tokens: documents, tokens, text"
        raise UsageError(what, where=where, fix=fix)
    parts = [f"Trained is what stands between {marks[0]} and {marks[1]}."]
    if marks == COLOURS:
        parts = [f"Trained is what is {marks[0]}green{marks[1]}."]
    for index, sample in enumerate(shown_samples):
        documents = _documents(sample)
        trained = int((sample["targets"] != IGNORED).sum())
        several = f"{len(documents)} document{'s' * (len(documents) != 1)}"
        title = f"sample {index}: {several}, {trained} of {len(sample['targets'])} targets count"
        texts = [_text(ids, targets, decode, marks) for ids, targets in documents]
        parts.append("\n---\n".join([title, *texts]))
    return parts


def _documents(sample: dict[str, Tensor]) -> list[tuple[list[int], list[int]]]:
    """Return the inputs and targets of each document of a sample, without padding."""
    ids = sample["input_ids"]
    targets = sample["targets"]
    numbers = sample.get("document_ids")
    if numbers is None:
        return [(ids.tolist(), targets.tolist())]
    documents = []
    for number in range(int(numbers.max()) + 1):
        in_document = numbers == number
        if ids[in_document].any() or (targets[in_document] != IGNORED).any():
            documents.append((ids[in_document].tolist(), targets[in_document].tolist()))
    return documents


def _text(
    ids: list[int],
    targets: list[int],
    decode: Callable[[Sequence[int]], str],
    marks: tuple[str, str],
) -> str:
    """Return the text of a document, with what is trained between the marks."""
    tokens = list(ids)
    trained = [False, *(target != IGNORED for target in targets)]
    if trained[-1]:
        tokens.append(targets[-1])
    text = ""
    begin = 0
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and trained[end] == trained[begin]:
            continue
        run = decode(tokens[begin:end])
        text += f"{marks[0]}{run}{marks[1]}" if trained[begin] else run
        begin = end
    return text
