"""Reads what DistributedDataParallel's reducer knows.

How long a backward pass waited, and whether all was sent.

Public torch: DDP measures its waits for its own logger alone. Of a gradient that was never sent it
tells in the next step's forward pass, after the update has used it. Seen to work: torch 2.11.0 to
2.15.0. When gone: training with DDP raises AttributeError in its first step.
"""

from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel


def time_passes(model: DistributedDataParallel, one_in: int) -> None:
    """Measure one backward pass in so many, and the first ten, rather than one in a hundred."""
    model._set_ddp_runtime_logging_sample_rate(one_in)  # type: ignore[no-untyped-call]


def wait_seconds(model: DistributedDataParallel) -> float:
    """Return how long the newest measured backward pass went on sending.

    Counted from when its last gradient was computed.
    """
    figures = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sent = figures.get("backward_comm_time", 0)
    hidden = figures.get("backward_compute_comm_overlap_time", 0)
    return max(0, sent - hidden) * 1e-9  # type: ignore[no-any-return]


def check_of_sent(model: DistributedDataParallel) -> Callable[[], None]:
    """Return a check that the last backward pass has reduced every gradient.

    It raises a RuntimeError that lists the parameters' numbers.
    """
    return model._check_reducer_finalized
