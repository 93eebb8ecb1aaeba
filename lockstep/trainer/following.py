"""Acts on the results of a run's evaluations: early stopping, and schedulers that follow a metric.

All ranks have the same results, so they act alike. What is decided depends on the results alone, and its state is in
every checkpoint: a run that resumes goes on as if it had not stopped.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config import EarlyStoppingConfig
from lockstep.errors import UsageError, did_you_mean, listed
from lockstep.optim import PlateauSchedule


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Return whether `value` is better than `best` by more than `min_delta`; None is worse than any number."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


@dataclass
class Following:
    """Acts on the results of evaluations: stops the run early, and steps a scheduler that follows a metric.

    Attributes:
        early_stopping: when to stop; None: never.
        plateau: a scheduler that follows a metric, if there is one.
        best: the best value of the early stopping's metric.
        since: evaluations since then.
    """

    early_stopping: EarlyStoppingConfig | None
    plateau: PlateauSchedule | None
    best: float | None = None
    since: int = 0

    @property
    def acts(self) -> bool:
        """Return whether anything follows the results."""
        return self.early_stopping is not None or self.plateau is not None

    @property
    def stopped(self) -> bool:
        """Return whether the run has stopped early."""
        return self.early_stopping is not None and self.since >= self.early_stopping.patience

    def why_stopped(self) -> str:
        """Return the log line of a run that has stopped early."""
        assert self.early_stopping is not None
        config, times = self.early_stopping, self.since
        return (
            f"stopped early: {config.metric} has not become better than {self.best:.6g} in {times} "
            f"evaluation{'s' * (times != 1)} (training.early_stopping)"
        )

    def check(self, known: Collection[str], *, evaluates: bool) -> None:
        """Check that the metrics that are followed will be there.

        Args:
            known: names of the results of an evaluation.
            evaluates: whether the run evaluates.

        Raises:
            UsageError: one will not.
        """
        wanted = {}
        if self.early_stopping is not None:
            wanted["training.early_stopping.metric"] = self.early_stopping.metric
        if self.plateau is not None:
            wanted["Trainer(scheduler_metric=…)"] = self.plateau.metric
        for where, name in wanted.items():
            if not evaluates:
                raise UsageError(
                    f"{name} is never computed", where=where, why="the run has no data to evaluate on",
                    fix="pass val_data to train(…)",
                )  # fmt: skip
            require_metric(name, known, where)

    def add(self, results: Mapping[str, Any]) -> None:
        """Take the results of an evaluation: `eval_loss` and others."""
        if self.early_stopping is not None:
            value = float(results[self.early_stopping.metric])
            if is_better(value, self.best, self.early_stopping.mode, self.early_stopping.min_delta):
                self.best, self.since = value, 0
            else:
                self.since += 1
        if self.plateau is not None:
            self.plateau.follow(float(results[self.plateau.metric]))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later decisions depend on."""
        return {"best": self.best, "since": self.since, "plateau": self.plateau and self.plateau.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.since = state.get("best"), state.get("since", 0)
        if self.plateau is not None and state.get("plateau"):
            self.plateau.load_state_dict(state["plateau"])


def require_metric(name: str, known: Collection[str], where: str) -> None:
    """Reject a metric that no evaluation computes.

    Raises:
        UsageError: with the names that there are.
    """
    if name not in known:
        raise UsageError(
            f"there is no metric {name}{did_you_mean(name, known)}", where=where, fix=f"one of {listed(sorted(known))}"
        )
