"""Refuses sizes in a config which no memory of this machine can hold, before ranks start.

Without this a sequence of 10**9 tokens takes all memory, and the system ends processes, this one or
others, without a word. What is refused is only what is sure: each size is taken alone, with the
least that it needs. Whether a model trains here at all is `lockstep plan`'s question.

Does not import torch.

Tests: tests/launch/test_sizes.py
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.config import Config

# Each is less than was ever seen of it.
_TOKEN = 16  # bytes of a token in a sample: its number and its target, of 8 bytes each
_STREAMED = 1  # of a token that waits in a window
_PROCESS = 4 << 20  # pages of its own that a process of Python has which imported torch
_TASK = 256  # a micro-batch that a worker is asked for
_LAYER = 4 << 10  # the modules of a layer, without their weights
_WEIGHT = 2  # the smallest type of parameters

_LAYERS = ("n_layer", "num_hidden_layers", "num_layers", "n_layers")
_WIDTHS = ("n_embd", "hidden_size", "d_model", "dim")
_TIMES_WIDTH = ("vocab_size", "n_expert", "intermediate_size", "mlp_hidden", "expert_hidden")

_UNITS = {"GB": 10**9, "TB": 10**12, "PB": 10**15, "EB": 10**18}  # bytes


@dataclass(frozen=True)
class _Need:
    """Holds a size of the config, and the least memory that it needs."""

    key: str
    value: int
    amount: int  # bytes
    what: str  # what takes that memory, as "8 processes"


def require_sizes(config: "Config", ranks: int, machines: int = 1, *, on_cpu: bool = True) -> None:
    """Refuse sizes of a config, and a number of ranks, that this machine's memory can't hold.

    Args:
        ranks: on this machine.
        machines: the most that may take part, and share the weights.
        on_cpu: whether weights are in the memory of the machine.

    Raises:
        UsageError: with the key of the first that is too large.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for need in _needs(config, ranks, machines, on_cpu=on_cpu):
        if need.amount > memory:
            raise UsageError(
                f"{need.key.rpartition('.')[2]} is {need.value:,}, which no memory here can hold",
                where=need.key,
                why=f"{need.what} take {_in_words(need.amount)} at least, and this machine has"
                f" {_in_words(memory)}",
                fix="write a smaller number; `lockstep plan CONFIG` says what a run needs",
            )


def _needs(config: "Config", ranks: int, machines: int, *, on_cpu: bool) -> Iterator[_Need]:
    """Yield what the sizes of a config need on this machine at least."""
    processes = f"{ranks:,} processes" if ranks > 1 else "one process"
    yield _Need("--nproc-per-node", ranks, ranks * _PROCESS, f"{ranks:,} processes")
    yield from _of_data(config, ranks, processes)
    args = config.model.args
    name = config.model.name or ""
    if ":" in name and not name.startswith("hf:"):
        return  # a class of the user's, whose arguments may mean anything
    for key, layers in _numbers(args, _LAYERS):
        yield _Need(f"model.args.{key}", layers, layers * _LAYER, "the modules of the layers")
    if not on_cpu:
        return
    for width, columns in _numbers(args, _WIDTHS):
        of_layer = columns * columns * _WEIGHT // machines
        yield _Need(f"model.args.{width}", columns, of_layer, f"{columns:,} × {columns:,} weights")
        for key, rows in _numbers(args, _TIMES_WIDTH):
            amount = rows * columns * _WEIGHT // machines
            yield _Need(f"model.args.{key}", rows, amount, f"{rows:,} × {columns:,} weights")


def _of_data(config: "Config", ranks: int, some: str) -> Iterator[_Need]:
    """Yield what samples, and those who read them, need at least."""
    data = config.data
    args = data.args
    whole = data.name in ("documents", "stream") or args.get("documents") is True
    key = "sequence_length" if data.name in ("documents", "stream") else "block_size"
    length = next((value for _, value in _numbers(args, [key])), 0)
    if whole:
        amount = length * _TOKEN * ranks
        yield _Need(f"data.args.{key}", length, amount, f"samples of so many tokens, in {some},")
    for window, sequences in _numbers(args, ["window"]):
        # files end; streams of the hub may not
        if "hf:" in str(args.get("sources")):
            amount = sequences * (length or 512) * _STREAMED * ranks
            yield _Need(f"data.args.{window}", sequences, amount, f"a window in {some} would")
    workers = data.num_workers
    yield _Need(
        "data.num_workers", workers, workers * ranks * _PROCESS, f"so many workers of {some}"
    )
    ahead = data.prefetch_factor or 0
    amount = ahead * workers * ranks * _TASK
    yield _Need("data.prefetch_factor", ahead, amount, "the micro-batches that are asked for")


def _numbers(args: Mapping[str, Any], keys: "tuple[str, ...] | list[str]") -> Iterator[Any]:
    """Yield those of the keys that are whole numbers, and their values."""
    for key in keys:
        value = args.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield key, value


def _in_words(amount: int) -> str:
    unit = next((unit for unit in ("GB", "TB", "PB") if amount < 1000 * _UNITS[unit]), "EB")
    return f"{amount // _UNITS[unit]:,} {unit}"
