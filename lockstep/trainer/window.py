"""A step whose micro-batches the caller brings one at a time: `Trainer.training_step`."""

import warnings
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import collectives
from lockstep.config import require_equation
from lockstep.data import batch_length, move
from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.strategy import strategy_named
from lockstep.torch_compat.pytree import tree_leaves

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


class Window:
    """The step that is open, if one is.

    Args:
        trainer: whose step it is.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._accumulator: LossAccumulator | None = None
        self._calls = self._samples = 0
        self._wanted: int | None = None  # calls that make a step
        self._last: Any = None

    def add(self, batch: Any) -> Tensor:
        """Forward and backward of this rank's next micro-batch; the last of a step updates.

        Returns:
            its mean loss, 0-dim, detached.

        Raises:
            UsageError: under a pipeline; `global_batch_size` is no whole number of calls on all ranks.
        """
        trainer = self._trainer
        if trainer.placed.micro_step is None:
            splits_model = strategy_named(trainer.layout.strategy).splits_model
            what = "under a pipeline" if splits_model else "where workers share a rank"
            raise UsageError(f"{what} micro-batches can't be run one at a time", fix="use Trainer.steps(data)")
        batch = move(batch, trainer.device)
        if self._wanted is None:
            trainer.cluster.check()
            _warn_of_equal_batches(trainer, batch)
        self._wanted = self._wanted or _calls_in_a_step(trainer, batch)
        if trainer.step.nominal is None:
            trainer.step.learn_nominal(batch, self._micro_batches_per_step)
        if self._accumulator is None:
            trainer.loss_check.before_step(
                [MicroBatch(0, batch)], self._micro_batches_per_step, trainer.step.progress.step
            )
            self._accumulator, self._calls, self._samples = trainer.step.open(self._micro_batches_per_step), 0, 0
        if trainer.step.stop_asked:
            self._accumulator.vote_to_stop()
        self._samples, self._last = self._samples + batch_length(batch), batch
        last = self._calls + 1 == self._wanted
        loss = self._run(batch, real=True, last=last)
        self._calls += 1
        if last:
            self._close()
        return loss.summed() / torch.as_tensor(loss.targets).clamp(min=1)

    def flush(self) -> None:
        """Update with what the window holds; without micro-batches in it there is nothing to do."""
        if self._accumulator is not None:
            # Nothing of it was reduced over ranks yet: one dummy, of weight zero, does it.
            self._run(self._last, real=False, last=True)
            self._close()

    @property
    def _micro_batches_per_step(self) -> int:
        assert self._wanted is not None
        return self._wanted * self._trainer.layout.data_parallel_size

    def _run(self, batch: Any, *, real: bool, last: bool) -> Loss:
        placed, step = self._trainer.placed, self._trainer.step
        assert placed.micro_step is not None
        assert self._accumulator is not None
        index, _ = placed.assign(self._micro_batches_per_step)[self._calls]
        with placed.random_state.running("train", step.progress.step):
            return placed.micro_step(MicroBatch(index, batch, real), self._accumulator, step.factor, last)

    def _close(self) -> None:
        trainer, accumulator, samples = self._trainer, self._accumulator, self._samples
        assert accumulator is not None
        self._accumulator = None
        if trainer.layout.world_size > 1:
            samples = int(collectives.all_reduce(samples, op="sum"))
        trainer.last_record = trainer.step.update(accumulator, samples)


def _calls_in_a_step(trainer: "Trainer", first: Any) -> int:
    """How many micro-batches each rank brings to a step.

    Args:
        first: the first of them; its size stands where the settings name none.
    """
    training, ranks = trainer.config.training, trainer.layout.data_parallel_size
    if training.global_batch_size is None:
        return training.accumulation
    size = training.batch_size if "batch_size" in training.model_fields_set else batch_length(first)
    require_equation(training, ranks, size)
    calls, rest = divmod(training.global_batch_size, size * ranks)
    if rest:
        raise UsageError(
            f"a step of {training.global_batch_size} samples is no whole number of micro-batches of {size} on each of "
            f"{ranks} rank{'s' * (ranks != 1)}",
            where="training.global_batch_size",
            fix=f"set it to a multiple of {size * ranks}, or use Trainer.steps(data), which shares out any number",
        )
    return calls


def _warn_of_equal_batches(trainer: "Trainer", batch: Any) -> None:
    """Warn where two ranks bring the same first micro-batch: a loader without a sampler reads the same on all ranks."""
    ranks = trainer.layout.data_parallel_size
    if ranks == 1:
        return
    digests: list[int] = [0] * trainer.layout.world_size
    dist.all_gather_object(digests, _digest(batch))
    if trainer.is_main_process and len(set(digests)) < ranks:
        warnings.warn(
            "several ranks bring the same samples to training_step: they are trained on several times. Share them out:"
            " DataLoader(dataset, sampler=lockstep.DistributedSampler(dataset), …)",
            stacklevel=4,
        )


def _digest(batch: Any) -> int:
    """Return a checksum of the batch's tensors; where it has none, a number that no other rank returns."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    found = 0 if tensors else -1 - dist.get_rank()
    for tensor in tensors:
        found = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), found)
    return found
