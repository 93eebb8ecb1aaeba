"""What the tests of this folder share."""

import dataclasses
from typing import Any

import torch

import lockstep.data
from lockstep.config import DataConfig
from lockstep.data import Assign, BatchSizes, MicroBatch, SourceSettings, StepBatches, StepSource

OF_ANY_SOURCE = {field.name for field in dataclasses.fields(SourceSettings)}


def settings_of(start: int, stop: int | None, seed: int, options: dict[str, Any]) -> SourceSettings:
    """Settings on the CPU, with those that are among the options, which are taken out."""
    given = {name: options.pop(name) for name in OF_ANY_SOURCE & options.keys()}
    return SourceSettings(start, stop, seed, "cpu", **given)


def adopt(
    data: Any,
    config: DataConfig | None = None,
    *,
    assign: Assign,
    batch_size: int,
    global_batch_size: int,
    seed: int,
    start_step: int = 0,
    stop_step: int | None = None,
    state: dict[str, Any] | None = None,
    for_evaluation: bool = False,
    **options: Any,
) -> StepSource:
    """Adopt data with sizes and settings that are named one by one."""
    options.setdefault("device", "cpu")
    return lockstep.data.adopt(
        data,
        BatchSizes(batch_size, global_batch_size),
        assign,
        SourceSettings(start_step, stop_step, seed, **options),
        config,
        state=state,
        for_evaluation=for_evaluation,
    )


def everything(num_micro_batches: int) -> list[tuple[int, bool]]:
    """The share of a single rank."""
    return [(index, True) for index in range(num_micro_batches)]


def share(rank: int, ranks: int) -> Assign:
    """As even as possible, with a dummy where a rank is one short."""

    def assign(num_micro_batches: int) -> list[tuple[int, bool]]:
        most = -(-num_micro_batches // ranks)
        mine = list(range(num_micro_batches))[rank::ranks]
        return [(i, True) for i in mine] + [(0, False)] * (most - len(mine))

    return assign


def flat(batch: Any) -> Any:
    """Tensors as lists, in any nesting."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: flat(value) for key, value in batch.items()}
    return [flat(value) for value in batch] if isinstance(batch, list | tuple) else batch


def plain_micro(micro: MicroBatch) -> tuple[int, Any, bool]:
    return micro.index, flat(micro.batch), micro.real


def plain(steps: list[StepBatches]) -> list[Any]:
    """What can be compared: step, epoch, micro-batches, samples, last of epoch, then (index, batch,
    real) of each.
    """
    return [
        (
            s.step,
            s.epoch,
            s.num_micro_batches,
            s.samples,
            s.last_of_epoch,
            *map(plain_micro, s.mine),
        )
        for s in steps
    ]


def whole_from(parts: list[list[Any]]) -> list[Any]:
    """The steps of a single rank, put together from those of several: the real micro-batches, in
    order.
    """
    joined = []
    for rows in zip(*parts, strict=True):
        assert len({row[:5] for row in rows}) == 1
        real = sorted(
            (micro for row in rows for micro in row[5:] if micro[2]), key=lambda micro: micro[0]
        )
        joined.append((*rows[0][:5], *real))
    return joined
