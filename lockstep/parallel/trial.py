"""Whether a compression pays, tried on real steps: what backward hides of the traffic costs nothing.

Steps take turns with and without it, so that what else the machine does falls on both. What a step waits for besides,
its data for one, counts on both sides, too: where that is most of a step, compression is not worth the lost digits.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs lack it

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

WARM = 2  # steps: buckets are cut anew after the first
TURNS = 5  # of each
PAYS_BELOW = 0.9  # of the time of a step


class Trial:
    """A hook that sends gradients plain in one step and compressed in the next, and then stays with one.

    Args:
        name: of the compression.
        plain, small: the hooks.
        later_log_lines: receives the line that says what came out.
    """

    def __init__(
        self, name: str, plain: Hook, small: Hook, group: dist.ProcessGroup, device: torch.device,
        later_log_lines: list[str],
    ) -> None:  # fmt: skip
        self._name, self._plain, self._small = name, plain, small
        self._group, self._device, self._log_lines = group, device, later_log_lines
        self._compresses = False
        self._over = False
        self._began: float | None = None
        self._seconds: list[float] = []  # of each step but the first

    def hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls."""
        return (self._small if self._compresses else self._plain)(state, bucket)

    def settle(self) -> None:
        """After each update; every rank calls it."""
        if self._over:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a measurement has to wait
        now = time.perf_counter()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began, self._compresses = now, not self._compresses
        if len(self._seconds) == WARM + 2 * TURNS:
            self._decide()

    def _decide(self) -> None:
        """By the slowest rank's medians, so that all ranks decide the same."""
        # The run's first step is plain and not in the list: that begins with a compressed one.
        small, plain = self._seconds[WARM::2], self._seconds[WARM + 1 :: 2]
        times = torch.tensor([median(plain), median(small)], dtype=torch.float64, device=self._device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self._group)
        before, after = times.tolist()
        self._compresses, self._over = after < PAYS_BELOW * before, True
        found = f"a step takes {after:.3g} s with {self._name} and {before:.3g} s without"
        self._log_lines.append(f"compression auto: {self._name if self._compresses else 'none'}, as {found}")
