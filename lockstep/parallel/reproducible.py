"""The same bits on any number of ranks: what must be switched on, and what is refused.

Three things make a sum of micro-batches' gradients the same in every bit: each gradient is (the same kernels on the
same shapes, this file), they are added as one expression (`lockstep.parallel.tree`), and so is what the step computes
of the sum (an exact norm, element by element updates: `lockstep.step`, `lockstep.optim`).

It holds among processors of one kind: a CPU with wider vectors, or another GPU, has other kernels.
"""

import os
import re

import torch

from lockstep.config import StepConfig
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.micro_step import AroundMicroBatch
from lockstep.parallel.tree import traffic
from lockstep.strategy import strategy_named

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def switch_on(device: torch.device) -> list[str]:
    """Deterministic kernels, and as many threads on every rank; returns lines to be said at start."""
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads it
    torch.backends.cudnn.benchmark = False
    if device.type != "cpu":
        return ["reproducible: deterministic kernels"]
    # Reductions (LayerNorm's and embedding's gradients, sums) are cut by the number of threads.
    torch.set_num_threads(1)
    return ["reproducible: deterministic kernels, one thread a rank"]


def extra_traffic(config: StepConfig, layout: Layout) -> list[str]:
    """A line to be said at start where the tree sends more than a plain reduction would: not on 2ⁿ replicas."""
    replicas = strategy_named(layout.strategy).replicas(layout)
    training = config.training
    micro_batches = training.accumulation * layout.data_parallel_size
    if training.global_batch_size is not None:
        micro_batches = -(-training.global_batch_size // training.batch_size)
    more = traffic(micro_batches, replicas) - 1
    if replicas < 2 or more <= 0:
        return []
    return [
        f"reproducible: on {replicas} replicas gradients take {more:.0%} more traffic than in a plain step: the sum of "
        f"{micro_batches} micro-batches has no {replicas} equal parts. On 2, 4, 8 … replicas it takes no more"
    ]


class DeterministicKernels(AroundMicroBatch):
    """Turns torch's complaint about an operation without a deterministic kernel into one line."""

    def failed(self, error: BaseException) -> Exception | None:
        return explain_kernel(error)


def explain_kernel(error: BaseException) -> UsageError | None:
    """Return an error that names the operation without a deterministic kernel; None for other errors."""
    found = re.search(r"(\S+) does not have a deterministic implementation", str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    return UsageError(
        f"{found[1]} has no deterministic kernel on this device",
        where="distributed.reproducible",
        fix="use another operation in the model, or set distributed.reproducible: false",
    )
