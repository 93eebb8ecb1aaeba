"""Predicts long runs on machines that fail: how often to save, and the fraction of time spent on
training.

At each failure, a run that saves every T seconds loses its work since the last save, and the time
to notice, restart and load. Young (1974): T = √(2·δ·M), where δ is the time of a save and M the
mean time between failures; Daly (2006) also covers short M.
"""

import heapq
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Reliability:
    """Failures of a job.

    Attributes:
        gpu_hours_per_failure: mean GPU-hours between two interruptions, over all causes.
        restart_seconds: from a failure to the first new step: noticing, rescheduling, loading.
        save_seconds: time in which training waits for a checkpoint.
    """

    gpu_hours_per_failure: float
    restart_seconds: float
    save_seconds: float

    def mean_time(self, num_gpus: int) -> float:
        """Return the mean seconds between failures of a job."""
        return self.gpu_hours_per_failure * 3600 / num_gpus


def best_interval(save: float, mean_time: float) -> float:
    """Return the seconds of work between two saves that lose least (Daly's higher-order estimate).

    Args:
        save: seconds per save; from twice `mean_time` on no interval helps, and `mean_time` is
            returned.
    """
    if save <= 0:
        return 0.0
    if save >= 2 * mean_time:
        return mean_time
    x = save / (2 * mean_time)
    return math.sqrt(2 * save * mean_time) * (1 + math.sqrt(x) / 3 + x / 9) - save


def expected_goodput(interval: float, save: float, restart: float, mean_time: float) -> float:
    """Return the fraction of time with training that is kept, for failures at random times (Daly
    2006, exact).
    """
    # Expected wall time of one interval of work and its save, including restarts.
    wall = math.exp(restart / mean_time) * mean_time * math.expm1((interval + save) / mean_time)
    return interval / wall


@dataclass(frozen=True)
class Run:
    """A simulated run: seconds of wall time, of kept training and of lost work, and the number of
    failures.
    """

    wall: float
    trained: float
    lost: float
    failures: int

    @property
    def goodput(self) -> float:
        """Fraction of time with training that is kept."""
        return self.trained / self.wall


def simulate(
    work: float,
    interval: float,
    reliability: Reliability,
    num_gpus: int,
    *,
    gpus_per_node: int = 8,
    seed: int = 0,
) -> Run:
    """Simulate `work` seconds of training on nodes that fail independently, at exponential times.

    Args:
        interval: seconds of training between two saves.
    """
    generator = random.Random(seed)
    nodes = max(1, num_gpus // gpus_per_node)
    node_mean = reliability.mean_time(num_gpus) * nodes
    failures = [generator.expovariate(1 / node_mean) for _ in range(nodes)]
    heapq.heapify(failures)
    now = saved = lost = 0.0
    count = 0
    while saved < work:
        step = min(interval, work - saved)
        ends = now + step + reliability.save_seconds
        if failures[0] >= ends:
            now = ends
            saved = saved + step
            continue
        failed = failures[0]
        heapq.heapreplace(
            failures, failed + reliability.restart_seconds + generator.expovariate(1 / node_mean)
        )
        if failed > now:
            lost += min(step, failed - now)
            now = failed
        now += reliability.restart_seconds
        count += 1
    return Run(now, saved, lost, count)
