"""Contradictions between a config and the way in which its ranks are started.

Tests: tests/config/test_checks.py, tests/test_errors.py
"""

import sys
from collections.abc import Iterator

from lockstep.config.schema import Config
from lockstep.errors import Contradiction
from lockstep.registry import STRATEGIES
from lockstep.strategy import AUTO, strategy_named


def launch_contradictions(
    config: Config,
    *,
    max_restarts: int,
    builds_again: bool,
    device_type: str,
) -> Iterator[Contradiction]:
    """Yield what can't be combined with the way in which the ranks are started.

    Args:
        max_restarts: how often all ranks are started again.
        builds_again: whether a rank builds its run again by itself, as those of `lockstep train`.
        device_type: the type of the ranks' devices.
    """
    if config.distributed.on_failure == "continue":
        yield from _continue(config, builds_again, device_type)
    if config.distributed.on_failure == "stop" and max_restarts:
        what = (
            f"on_failure: stop ends the run when a rank dies, and --max-restarts {max_restarts}"
            " starts the ranks again"
        )
        fix = "leave --max-restarts out, or write on_failure: restart"
        yield Contradiction(("distributed.on_failure", "--max-restarts"), what, fix)


def _continue(config: Config, builds_again: bool, device_type: str) -> Iterator[Contradiction]:
    """Yield what keeps ranks from going on when others have died."""
    key = "distributed.on_failure"
    restart = "write on_failure: restart, and start with --max-restarts N"
    strategy = config.distributed.strategy
    if not builds_again:
        what = "on_failure: continue is for ranks that build their run again by themselves"
        fix = f"run the config by `lockstep train`, or {restart}"
        yield Contradiction((key,), what, fix, "here a script builds it, or another launcher runs")
    elif sys.platform != "linux":
        what = "on_failure: continue is for Linux"
        why = "the connections to a dead rank are found in /proc"
        yield Contradiction((key,), what, restart, why)
    elif device_type != "cpu" or config.distributed.backend not in ("auto", "gloo"):
        what = "on_failure: continue is for gloo, on CPUs"
        why = "a wait in another backend's collective can't be ended from outside"
        yield Contradiction((key, "distributed.device"), what, restart, why)
    elif not _goes_on(strategy):
        what = f"on_failure: continue is not for strategy {strategy}"
        fix = f"write strategy: {' or '.join(filter(_goes_on, STRATEGIES.shipped))}; or {restart}"
        yield Contradiction((key, "distributed.strategy"), what, fix)
    elif config.training.global_batch_size is None:
        what = "on_failure: continue needs training.global_batch_size"
        why = "else a step would have fewer samples on fewer ranks: another training"
        fix = "write the number of samples in a step, over all ranks"
        yield Contradiction((key, "training.global_batch_size"), what, fix, why)


def _goes_on(name: str) -> bool:
    """Return whether a run of this strategy stays the same training on fewer ranks."""
    if name == AUTO:
        return False
    strategy = strategy_named(name)
    return strategy.same_training and strategy.equal_bits and not strategy.one_process
