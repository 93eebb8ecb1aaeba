"""What a checkpoint holds, before it is on disk: the caller's `Snapshot`, and its `Staged` form of pieces and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.checkpoint.names import MODEL, extra_part, optimizer_part
from lockstep.checkpoint.pieces import Part, part_of, pieces_of
from lockstep.errors import UsageError

GROUPS_KEY = "optimizer_groups"


@dataclass
class Snapshot:
    """The whole state of a training run on this rank, or the tensors that a checkpoint is to be loaded into.

    Tensors are DTensors (this rank's block counts) or plain (the same on every rank that holds the name). Ranks may
    hold different names. A tensor of the model under two names is stored once.

    Args:
        model: canonical name → parameter or buffer.
        optimizers: name of an optimizer → flat state, `"<canonical parameter name>//<state key>"` → tensor.
        state: everything that is no tensor; JSON; rank 0's is written.
        extra: name → flat dictionary of tensors: EMA, compression state, the user's own.
        groups: name of an optimizer → its parameter groups, from `optimizer_state`; the ranks' are merged.
        aliases: canonical name → further names of the same parameter, where those live on different ranks.
    """

    model: dict[str, Tensor]
    optimizers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def parts(self) -> dict[str, Part]:
        """Its tensors by folder: `model`, `optimizer/NAME`, `extra/NAME`."""
        parts = {MODEL: part_of(self.model, self.aliases)}
        parts |= {optimizer_part(name): Part(pieces_of(tensors)) for name, tensors in self.optimizers.items()}
        parts |= {extra_part(name): Part(pieces_of(tensors)) for name, tensors in self.extra.items()}
        return parts


@dataclass(frozen=True)
class Staged:
    """A snapshot ready to be written: it depends on nothing that training changes, if its pieces were copied."""

    parts: dict[str, Part]
    state: dict[str, Any]
    groups: dict[str, dict[str, Any]]


def stage(snapshot: Snapshot) -> Staged:
    """Pieces that share memory with the snapshot's tensors, and a copy of its JSON.

    Raises:
        UsageError: something is not a tensor where tensors are needed, or is not JSON in `state` or `groups`.
    """
    if GROUPS_KEY in snapshot.state:
        raise UsageError(f"state[{GROUPS_KEY!r}] is where the optimizers' groups are kept", fix="choose another key")
    return Staged(snapshot.parts(), as_json(snapshot.state, "state"), as_json(snapshot.groups, "groups"))


def as_json(value: Any, place: str) -> Any:
    """A copy made of what JSON can hold; tuples become lists.

    Raises:
        UsageError: something can't be held, or would come back as something else (a key that is no string).
    """
    if isinstance(value, Mapping):
        if stray := [key for key in value if type(key) is not str]:
            raise UsageError(
                f"{place} has the key {stray[0]!r}; JSON knows only strings as keys", fix="write the key as text"
            )
        return {key: as_json(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if value is None or type(value) in (str, int, float, bool):
        return value
    fix = "put tensors in `extra`" if isinstance(value, Tensor) else "turn it into numbers, strings, lists and dicts"
    raise UsageError(f"{place} is a {type(value).__name__}, which JSON can't hold", fix=fix)


def dump_state(state: Mapping[str, Any], groups: Mapping[str, Any]) -> bytes:
    """`state.json`. Floats come back to the bit; NaN and infinity are written as Python writes them."""
    return (json.dumps({**state, GROUPS_KEY: groups}, indent=1, sort_keys=True) + "\n").encode()
