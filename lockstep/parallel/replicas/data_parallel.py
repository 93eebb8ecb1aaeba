"""Runs torch.nn.DataParallel: one process copies the model to its GPUs and divides the batch.

It does so for each forward pass.

Here it divides each micro-batch. Running statistics of batch normalisation are those of the first
GPU's part. The GPUs are driven by threads, in which keyed random numbers can't be seeded one
segment after the other: a model that draws is repeatable on the same number of GPUs, but draws
other numbers than under the other strategies.

Tests: tests/parallel/replicas/test_dp.py, tests/parity/test_data_parallel.py
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lockstep.config import DistributedConfig, StepConfig
from lockstep.data.batches import assign_contiguous
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import Layout
from lockstep.machine import accelerator
from lockstep.machine.accelerator import default_generator
from lockstep.models.objective import Objective
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.placement import AppliedStrategy, placed_in_order
from lockstep.parallel.reproducible.gradient_trees import LocalTree
from lockstep.parallel.site import Site
from lockstep.randomness import RandomState, derive_key
from lockstep.strategy import Strategy


class DP(Strategy):
    """One process with all of its GPUs."""

    topologies = {"dp": ()}
    one_process = "strategy dp is one process that uses all visible GPUs"
    equal_bits = False
    axes = ("lockstep.parallel.replicas.data_parallel:ThreadsAxis",)

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        return Layout(self.name)

    def keys_random_numbers(self, device: torch.device) -> bool:
        return num_gpus(device) == 1


class ThreadsAxis(Axis):
    """The GPUs of one process, each with a thread that runs its part of a micro-batch."""

    name: ClassVar[str] = "threads"
    in_threads: ClassVar[bool] = True

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        if config.precision.fp8 != "none":
            what = f"fp8: {config.precision.fp8} would be another step under dp"
            fix = "write strategy: ddp, or fp8: none"
            why = "dp cuts a micro-batch, and each GPU's part of it would get a scale of its own"
            yield Contradiction(("precision.fp8", "distributed.strategy"), what, fix, why)

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        return cls(site)

    def place_model(self) -> ParallelModel | None:
        """Copy the model to this process's GPUs, or leave it where there is one."""
        site = self.site
        site.materialise()
        if site.ways.patterns and num_gpus(site.device) > 1:
            what = (
                f"dp cuts a micro-batch over {num_gpus(site.device)} GPUs, and keeps what the first"
                " makes of buffers"
            )
            fix = "write strategy: ddp, which is faster as well"
            raise UsageError(what, where="distributed.buffers, distributed.strategy", fix=fix)
        refuse_mean_losses(site.model, site.objective, num_gpus(site.device))
        runs = apply_dp(site.model, site.config, site.random_state, site.log_lines)
        objective = over_parts(site.objective)
        tree = LocalTree(list(site.model.parameters())) if site.reproducible else None
        return placed_in_order(
            site, AppliedStrategy(assign_contiguous, runs=runs, objective=objective, tree=tree)
        )


_SERVED = ("cuda", "xpu")  # by torch.nn.DataParallel, of the devices that may be several


def num_gpus(device: torch.device) -> int:
    """Return the number of GPUs that share a micro-batch; 1 on the CPU."""
    return max(1, accelerator.count(device.type)) if device.type in _SERVED else 1


def apply_dp(
    model: nn.Module, config: StepConfig, random_state: RandomState, log_lines: list[str]
) -> nn.Module:
    """Wrap a model that is on the first GPU; on the CPU or one GPU, log it and return the model."""
    gpus = num_gpus(random_state.device)
    if gpus == 1:
        where = "one GPU" if random_state.device.type != "cpu" else "the CPU"
        log_lines.append(f"dp on {where}: nothing to share out, runs as single")
        return model
    training = config.training
    for key, asked in (
        ("compile", training.compile),
        ("gradient_checkpointing", training.gradient_checkpointing),
    ):
        if asked not in (False, "none"):
            why = (
                "it copies the model to each GPU, and the copies would share one block's replaced"
                " forward"
            )
            fix = "write strategy: ddp, which is faster as well"
            raise UsageError(
                f"dp does not work with training.{key}",
                where="distributed.strategy",
                why=why,
                fix=fix,
            )
    log_lines.append(
        f"dp: {gpus} GPUs share out each micro-batch, driven by one process; ddp is faster. What"
        " the model draws at random differs from other strategies"
    )

    def seed_all(_module: nn.Module, _args: Any) -> None:
        at = (random_state.seed, random_state.phase, random_state.step, random_state.micro_batch)
        for index in range(gpus):
            generator = default_generator(torch.device(random_state.device.type, index))
            generator.manual_seed(derive_key(*at, "dp", index))

    wrapped = nn.DataParallel(model)
    wrapped.register_forward_pre_hook(seed_all)
    return wrapped


def refuse_mean_losses(model: nn.Module, objective: Objective, gpus: int) -> None:
    """Refuse a model that takes means in its forward pass.

    Each would be the mean over one GPU's part of the samples.

    The number of targets in a part's mean is unknown: parts run in threads at once, so it can't be
    observed, and `count(batch)` counts the whole micro-batch. Sums of parts add up.
    """
    in_forward = (objective.in_outputs and objective.is_mean) or getattr(
        model, "averages_in_forward", False
    )
    if gpus > 1 and in_forward:
        what = (
            f"dp on {gpus} GPUs can't weigh a mean loss that {type(model).__name__} computes in its"
            " forward pass"
        )
        why = (
            "each GPU returns the mean over its own part of a micro-batch, and nothing tells over"
            " how many targets"
        )
        fix = (
            "write strategy: ddp, which is faster as well; or let the model return a sum, with"
            ' loss_reduction = "sum"; or pass a loss_fn, which gets the outputs of all GPUs'
            " together"
        )
        raise UsageError(what, where="distributed.strategy", why=why, fix=fix)


def over_parts(objective: Objective) -> Objective:
    """Return the objective for a model that returns its sum as one number for each GPU's part."""

    def loss(outputs: Any, batch: Any) -> Tensor:
        if objective.in_outputs and isinstance(outputs, Tensor):
            outputs = outputs.sum()
        return objective.loss(outputs, batch).sum()

    return replace(objective, loss=loss)
