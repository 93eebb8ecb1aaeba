"""Keeps the metrics of a run, and decides by them.

It decides about an early stop, the learning rate and the best checkpoint.

Tests: tests/trainer/test_metrics.py, tests/trainer/test_scheduler.py
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import EarlyStoppingConfig
from lockstep.errors import UsageError, did_you_mean, listed
from lockstep.optim import PlateauSchedule
from lockstep.run_directory.records import StepRecord, plain
from lockstep.trainer.metrics import Metrics

_OF_STEPS = ("loss", "grad_norm")  # metrics that need no evaluation


def is_better(value: float, best: float | None, mode: str, min_delta: float = 0.0) -> bool:
    """Return whether `value` is better than `best` by more than `min_delta`.

    None is worse than any number.
    """
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return value < best - min_delta if mode == "min" else value > best + min_delta


@dataclass
class Results:
    """The newest and the best metrics of a run, and what follows from its evaluations."""

    early_stopping: EarlyStoppingConfig | None = None
    plateau: PlateauSchedule | None = None  # a scheduler that follows a metric
    keep_best: str | None = None  # the metric by which the best checkpoint is kept
    keep_best_mode: str = "min"  # or "max"
    # the newest, by the names in `checkpoint.keep_best`
    metrics: dict[str, Any] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)  # by metric
    last_record: StepRecord | None = None  # of the newest step
    best_is_new: bool = False  # the newest evaluation was the best by `keep_best`
    stopped: bool = False  # the run has stopped early
    _best_followed: float | None = None  # of the early stopping's metric
    _evaluations_since: int = 0  # since that one

    def why_stopped(self) -> str:
        """Return the log line of a run that has stopped early."""
        assert self.early_stopping is not None
        config = self.early_stopping
        times = self._evaluations_since
        best = "any number" if self._best_followed is None else f"{self._best_followed:.6g}"
        why = (
            f"{config.metric} has not become better than {best} in {times}"
            f" evaluation{'s' * (times != 1)}"
        )
        return f"stopped early: {why} (training.early_stopping)"

    @property
    def are_followed(self) -> bool:
        """Return whether later steps depend on the results of evaluations."""
        return self.early_stopping is not None or self.plateau is not None

    @property
    def are_acted_on(self) -> bool:
        """Return whether later steps or checkpoints depend on the results of evaluations."""
        return self.are_followed or (self.keep_best or "").startswith("eval_")

    def waits_for_evaluations(self) -> str:
        """Return the names of the settings that do nothing without an evaluation.

        "" if there is none.
        """
        waiting = {
            "training.early_stopping": self.early_stopping is not None,
            "the ReduceLROnPlateau": self.plateau is not None,
            "checkpoint.keep_best": (self.keep_best or "").startswith("eval_"),
        }
        return ", ".join(name for name, waits in waiting.items() if waits)

    def check_names(self, metrics: Metrics | None, *, evaluates: bool, advice: str) -> None:
        """Reject a metric named by the config or the caller that no evaluation will compute.

        `advice` says how this way to train gets validation data.
        """
        if metrics is not None and not isinstance(metrics, Mapping):
            return
        wanted = self._followed_names()
        if self.keep_best is not None and self.keep_best not in _OF_STEPS:
            wanted["checkpoint.keep_best"] = self.keep_best
        if wanted and not evaluates:
            where, name = next(iter(wanted.items()))
            why = "the run has no data to evaluate on"
            raise UsageError(f"{name} is never computed", where=where, why=why, fix=advice)
        results = ["eval_loss", *(f"eval_{name}" for name in metrics or ())]
        for where, name in wanted.items():
            known = [*results, *_OF_STEPS] if where == "checkpoint.keep_best" else results
            if name not in known:
                what = f"there is no metric {name}{did_you_mean(name, known)}"
                raise UsageError(what, where=where, fix=f"one of {listed(sorted(known))}")

    def require_followed(self, results: Mapping[str, Any]) -> None:
        """Reject a caller's evaluation that lacks a followed metric.

        Early stopping or a scheduler follows such a metric.
        """
        for where, name in self._followed_names().items():
            if name not in results:
                what = f"{name} is followed, and this evaluation has {listed(sorted(results))}"
                fix = (
                    f"compute it: evaluate(data, {{'{name.removeprefix('eval_')}': …}}); or write"
                    " counts=False for data that are not to be followed"
                )
                raise UsageError(what, where=where, fix=fix)

    def _followed_names(self) -> dict[str, str]:
        """Return where a metric that is followed is named → its name."""
        names = {}
        if self.early_stopping is not None:
            names["training.early_stopping.metric"] = self.early_stopping.metric
        if self.plateau is not None:
            names["Trainer(scheduler_metric=…)"] = self.plateau.metric
        return names

    def record_step(self, record: StepRecord) -> None:
        """Keep the metrics of a step."""
        self.last_record = record
        self.metrics["loss"] = record.loss
        self.metrics["grad_norm"] = record.grad_norm
        self.best_is_new = False

    def record_evaluation(self, results: Mapping[str, Any], *, followed: bool) -> None:
        """Keep `eval_loss` and others.

        Early stopping and schedulers act on them if the evaluation is `followed`.
        """
        numbers = {name: value for name, value in results.items() if isinstance(value, int | float)}
        self.metrics |= numbers
        kept = self.keep_best
        mode = self.keep_best_mode
        self.best_is_new = kept in numbers and is_better(numbers[kept], self.best.get(kept), mode)
        for name, its_mode in {"eval_loss": "min", kept: mode}.items():
            if name in numbers and is_better(numbers[name], self.best.get(name), its_mode):
                self.best[name] = numbers[name]
        if followed:
            self._follow(results)

    def _follow(self, results: Mapping[str, Any]) -> None:
        """Count towards an early stop, and step the scheduler.

        A nan, such as from an evaluation without a valid target, is passed over.
        """
        stopping = self.early_stopping
        if stopping is not None:
            value = float(results[stopping.metric])
            if is_better(value, self._best_followed, stopping.mode, stopping.min_delta):
                self._best_followed = value
                self._evaluations_since = 0
            elif not math.isnan(value):
                self._evaluations_since += 1
            self.stopped = self._evaluations_since >= stopping.patience
        if self.plateau is not None:
            value = float(results[self.plateau.metric])
            if not math.isnan(value):
                self.plateau.follow(value)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later decisions depend on."""
        followed = {
            "best": self._best_followed,
            "since": self._evaluations_since,
            "plateau": self.plateau and self.plateau.state_dict(),
        }
        metrics = {name: plain(value) for name, value in self.metrics.items()}
        return {"best": self.best, "following": followed, "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        followed = state.get("following", {})
        self.best = state["best"]
        self.metrics = dict(state.get("metrics", {}))
        self._best_followed = followed.get("best")
        self._evaluations_since = followed.get("since", 0)
        stopping = self.early_stopping
        self.stopped = stopping is not None and self._evaluations_since >= stopping.patience
        if self.plateau is not None and followed.get("plateau"):
            self.plateau.load_state_dict(followed["plateau"])
