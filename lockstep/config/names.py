"""Translate names of other trainers by the table `names.csv`.

Error messages and the pages "Coming from …" use it.

Nothing here imports pydantic, so that the command line can look up an option quickly.

Tests: tests/config/test_names.py, tests/config/test_mapped.py
"""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Kind = Literal["key", "flag", "value", "python", "command", "env"]

SOURCES = {
    "bdh": "BDH's training script",
    "forgather": "Forgather",
    "geometry_os": "geometry_os",
    "frameworm": "FRAMEWORM",
    "free_transformer": "the Free Transformer",
    "transformers": "Hugging Face Trainer",
    "lightning": "PyTorch Lightning",
    "fabric": "Lightning Fabric",
    "accelerate": "Hugging Face Accelerate",
    "deepspeed": "DeepSpeed",
    "torchtitan": "torchtitan",
    "megatron": "Megatron-LM",
    "nanogpt": "nanoGPT",
    "torch": "PyTorch itself",
}


@dataclass(frozen=True)
class ForeignName:
    """A name of another trainer, and what to write instead."""

    source: str
    kind: Kind
    theirs: str  # the other trainer's name; with `kind="value"`, a value of the key `ours`
    # a dotted key, an option (`--nnodes`), a Python name or a command; empty if nothing needs to be
    # written
    ours: str = ""
    value: str = ""  # the value to write, unless it is the same as theirs
    note: str = ""

    @property
    def is_key(self) -> bool:
        """Return whether `ours` is a key of the config."""
        return self.ours.split(".")[0] in SECTIONS


SECTIONS = (
    "model",
    "loss_fn",
    "data",
    "training",
    "precision",
    "distributed",
    "checkpoint",
    "monitor",
)


@cache
def table() -> tuple[ForeignName, ...]:
    """Return all rows, in the order of `SOURCES`."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return tuple(ForeignName(**row) for row in csv.DictReader(file))  # type: ignore[arg-type]  # the kind


def advice_for(dotted: str) -> str | None:
    """Return what to write instead of another trainer's key, such as `fsdp_config.min_num_params`.

    None if unknown.
    """
    return _joined(_advice(row, "{ours}: {value}") for row in _matches(dotted))


def advice_for_flag(option: str) -> str | None:
    """Return what to write instead of another trainer's option, such as `--use_fsdp`.

    None if unknown.
    """
    return _joined(
        _advice(row, "{ours}={value}") for row in _matches(option.lstrip("-").partition("=")[0])
    )


def advice_for_object(name: str) -> str | None:
    """Return what to write instead of another trainer's object.

    An example is `forgather.ml.tb_logger:TBLogger`.
    """
    rows = [row for row in table() if row.kind == "python" and row.theirs == name]
    return _joined(_advice(row, "{ours}: {value}") for row in rows)


def advice_for_keyword(name: str, written: Callable[[str, str], str]) -> str | None:
    """Return the keyword of `Trainer` that replaces another trainer's, such as `max_grad_norm`.

    `written` returns how a key and its value are written in Python.
    """
    texts = []
    for row in _matches(name):
        if row.ours.startswith(("model.", "data.name", "data.args")):
            what = "model" if row.ours.startswith("model.") else "data set"
            texts.append(f"give it to the {what}, where you make it")
            continue
        if row.is_key:
            note = f" ({row.note})" if row.note else ""
            texts.append(f"write {written(row.ours, row.value or '…')}{note}")
        elif row.ours.startswith("--"):
            texts.append(f"the launcher decides: lockstep launch {row.ours} N script.py")
        else:
            texts.append(_advice(row, "{ours}"))
    return _joined(texts)


def advice_for_method(name: str) -> str | None:
    """Return what to write instead of another trainer's method, such as `prepare`."""
    rows = [
        row
        for row in table()
        if row.kind == "python" and row.theirs.partition("(")[0].endswith(f".{name}")
    ]
    return _joined(_advice(row, "{ours}") for row in rows)


def foreign_key(name: str) -> str | None:
    """Return the key that has the same values as a foreign name.

    None unless there is exactly one.
    """
    rows = [
        row for row in table() if row.kind == "key" and _normalized(row.theirs) == _normalized(name)
    ]
    keys = {row.ours for row in rows if row.is_key and not row.value}
    return keys.pop() if len(keys) == 1 else None


def advice_to_leave_out(name: str) -> str | None:
    """Return the advice to leave `name` out, as for `rank`; None if there is none."""
    rows = [row for row in table() if row.kind == "key" and row.theirs == name and not row.ours]
    return rows[0].note if rows else None


def advice_for_value(key: str, value: object) -> str | None:
    """Return what to write as the value of `key` instead of another trainer's value.

    None if unknown.
    """
    word = _normalized(str(value))
    for row in table():
        if row.kind == "value" and row.ours == key and _normalized(row.theirs) == word:
            return f"write {row.value}" + (f" ({row.note})" if row.note else "")
    return None


def _joined(texts: Iterable[str]) -> str | None:
    return "; or ".join(dict.fromkeys(texts)) or None


def _matches(dotted: str) -> list[ForeignName]:
    """Return the rows whose name is the longest end of `dotted`."""
    parts = [_normalized(part) for part in dotted.split(".")]
    best: list[ForeignName] = []
    longest = 0
    for row in table():
        if row.kind not in ("key", "flag"):
            continue
        theirs = [_normalized(part) for part in row.theirs.split(".")]
        if parts[-len(theirs) :] != theirs or len(theirs) < longest:
            continue
        if len(theirs) > longest:
            best = []
            longest = len(theirs)
        best.append(row)
    return best


def _advice(row: ForeignName, form: str) -> str:
    if not row.ours:
        return row.note
    value = row.value or ("VALUE" if "=" in form else "")
    what = (
        form.format(ours=row.ours, value=value)
        if value and row.is_key
        else f"{row.ours} {row.value}".strip()
    )
    return f"write {what}" + (f" ({row.note})" if row.note else "")


def _normalized(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_").lower()
