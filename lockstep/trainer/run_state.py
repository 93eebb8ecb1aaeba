"""Holds a run's state: its contents in a checkpoint, how they are loaded, and what follows from evaluations.

Tests: tests/trainer/test_resume.py, tests/trainer/test_formats.py
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.config import EarlyStoppingConfig
from lockstep.errors import UsageError, did_you_mean, listed
from lockstep.optim import PlateauSchedule
from lockstep.records import StepRecord, plain
from lockstep.step import Step
from lockstep.trainer.evaluator import Metrics
from lockstep.trainer.plain_state import load_imported, load_state_of_model, state_of_model

OPTIMIZER = "main"
WORKERS = "workers"  # name of the workers' tensors
_UNKNOWN_TO_A_LOOP = {  # a loop over `lockstep.place` saves only its step and metadata
    "skipped": [],
    "epoch": 0,
    "samples": 0,
    "nominal": None,
    "loss_scale": None,
    "source": {},
    "best": {},
}


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
class Following:
    """Stops the run early, and steps a scheduler that follows a metric, by the results of evaluations."""

    early_stopping: EarlyStoppingConfig | None = None
    plateau: PlateauSchedule | None = None
    best: float | None = None  # of the early stopping's metric
    since: int = 0  # evaluations since then

    @property
    def stopped(self) -> bool:
        """Return whether the run has stopped early."""
        return self.early_stopping is not None and self.since >= self.early_stopping.patience

    def why_stopped(self) -> str:
        """Return the log line of a run that has stopped early."""
        assert self.early_stopping is not None
        config, times = self.early_stopping, self.since
        best = "any number" if self.best is None else f"{self.best:.6g}"
        why = (
            f"{config.metric} has not become better than {best} in {times}"
            f" evaluation{'s' * (times != 1)}"
        )
        return f"stopped early: {why} (training.early_stopping)"

    def add(self, results: Mapping[str, Any]) -> None:
        """Take the results of an evaluation, `eval_loss` and others; nan, as without a valid target, is passed over."""
        if self.early_stopping is not None and not math.isnan(
            value := float(results[self.early_stopping.metric])
        ):
            if is_better(value, self.best, self.early_stopping.mode, self.early_stopping.min_delta):
                self.best, self.since = value, 0
            else:
                self.since += 1
        if self.plateau is not None and not math.isnan(
            value := float(results[self.plateau.metric])
        ):
            self.plateau.follow(value)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later decisions depend on."""
        return {
            "best": self.best,
            "since": self.since,
            "plateau": self.plateau and self.plateau.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.best, self.since = state.get("best"), state.get("since", 0)
        if self.plateau is not None and state.get("plateau"):
            self.plateau.load_state_dict(state["plateau"])


@dataclass
class RunState:
    """The state of a run: model, optimizer, schedule and progress (in `step`), position in the data, and results."""

    step: Step
    source: dict[str, Any] = field(default_factory=dict)  # the position in the data
    best: dict[str, float] = field(default_factory=dict)  # by metric
    # the newest, by the names in `checkpoint.keep_best`
    metrics: dict[str, Any] = field(default_factory=dict)
    steps_per_epoch: int | None = None  # of the data, if it is known
    ended_epoch: bool = False  # the last step was the last of its epoch
    following: Following = field(default_factory=Following)
    # metric by which the best checkpoint is kept; min or max
    keep_best: tuple[str | None, str] = (None, "min")
    best_is_new: bool = False  # the newest evaluation was the best by it
    # the optimizer's options, as it came, by group
    _given: list[dict[str, Any]] = field(default_factory=list)
    _given_before: list[dict[str, Any]] | None = None  # those in the checkpoint that was loaded

    def __post_init__(self) -> None:
        self._given = [_options(group) for group in self.step.optimizer.param_groups]

    def record_step(self, record: StepRecord) -> None:
        """Keep the metrics of a step."""
        self.metrics |= {"loss": record.loss, "grad_norm": record.grad_norm}
        self.best_is_new = False

    @property
    def follows_evaluations(self) -> bool:
        """Return whether later steps depend on the results of evaluations."""
        return self.following.early_stopping is not None or self.following.plateau is not None

    @property
    def acts_on_evaluations(self) -> bool:
        """Return whether later steps or checkpoints depend on the results of evaluations."""
        return self.follows_evaluations or (self.keep_best[0] or "").startswith("eval_")

    def waits_for_evaluations(self) -> str:
        """Return the names of the settings that do nothing without an evaluation.

        "" if there is none.
        """
        waiting = {
            "training.early_stopping": self.following.early_stopping is not None,
            "the ReduceLROnPlateau": self.following.plateau is not None,
            "checkpoint.keep_best": (self.keep_best[0] or "").startswith("eval_"),
        }
        return ", ".join(name for name, waits in waiting.items() if waits)

    def check_followed(self, metrics: Metrics | None, *, evaluates: bool) -> None:
        """Reject a metric named by the config or the caller that no evaluation of the run will compute."""
        if metrics is not None and not isinstance(metrics, Mapping):
            return
        wanted = {}
        if self.following.early_stopping is not None:
            wanted["training.early_stopping.metric"] = self.following.early_stopping.metric
        if self.following.plateau is not None:
            wanted["Trainer(scheduler_metric=…)"] = self.following.plateau.metric
        kept = self.keep_best[0]
        if kept is not None and kept not in ("loss", "grad_norm"):
            wanted["checkpoint.keep_best"] = kept
        if wanted and not evaluates:
            where, name = next(iter(wanted.items()))
            why = "the run has no data to evaluate on"
            raise UsageError(
                f"{name} is never computed", where=where, why=why, fix="pass val_data to train(…)"
            )
        results = ["eval_loss", *(f"eval_{name}" for name in metrics or ())]
        for where, name in wanted.items():
            known = [*results, "loss", "grad_norm"] if where == "checkpoint.keep_best" else results
            if name not in known:
                what = f"there is no metric {name}{did_you_mean(name, known)}"
                raise UsageError(what, where=where, fix=f"one of {listed(sorted(known))}")

    def require_followed(self, results: Mapping[str, Any]) -> None:
        """Reject an evaluation of the caller's that lacks a metric that early stopping or a scheduler follows."""
        following = self.following
        wanted = {}
        if following.early_stopping is not None:
            wanted["training.early_stopping.metric"] = following.early_stopping.metric
        if following.plateau is not None:
            wanted["Trainer(scheduler_metric=…)"] = following.plateau.metric
        for where, name in wanted.items():
            if name not in results:
                what = f"{name} is followed, and this evaluation has {listed(sorted(results))}"
                fix = (
                    f"compute it: evaluate(data, {{'{name.removeprefix('eval_')}': …}}); or write"
                    " counts=False for "
                )
                fix += "data that are not to be followed"
                raise UsageError(what, where=where, fix=fix)

    def record_evaluation(self, results: Mapping[str, Any], *, followed: bool) -> None:
        """Keep the results of an evaluation.

        Early stopping and schedulers act on it if it is `followed`.
        """
        numbers = {name: value for name, value in results.items() if isinstance(value, int | float)}
        self.metrics |= numbers
        kept, mode = self.keep_best
        self.best_is_new = kept in numbers and is_better(numbers[kept], self.best.get(kept), mode)
        for name, its_mode in {"eval_loss": "min", kept: mode}.items():
            if name in numbers and is_better(numbers[name], self.best.get(name), its_mode):
                self.best[name] = numbers[name]
        if followed:
            self.following.add(results)

    def apply_new_options(self) -> list[str]:
        """Set the options with which the user's optimizer came another time than before the loaded checkpoint.

        A rate that the run has changed since keeps its proportion to the first one. Returns what
        has changed, in words.
        """
        groups, changed = self.step.optimizer.param_groups, []
        before = self._given_before
        if before is None:  # a checkpoint of an older version: its groups know the first rate alone
            before = [
                {"lr": group["initial_lr"]} if "initial_lr" in group else {} for group in groups
            ]
        # others were added by the run
        for group, old, new in zip(groups, before, self._given, strict=False):
            for name in sorted(new.keys() & old.keys() - {"initial_lr"}):
                if _comparable(old[name]) == _comparable(new[name]):
                    continue
                changed.append(f"the optimizer's {name} {old[name]} → {new[name]}")
                if name == "lr":
                    proportion = float(group["lr"]) / old["lr"] if old["lr"] else 1.0
                    group["lr"], group["initial_lr"] = (
                        new["lr"] * proportion,
                        new.get("initial_lr", new["lr"]),
                    )
                else:
                    group[name] = new[name]
        return list(dict.fromkeys(changed))

    def state_dict(self) -> dict[str, Any]:
        """Return all state besides tensors."""
        own = {
            name: getattr(self, name)
            for name in ("steps_per_epoch", "source", "ended_epoch", "best")
        }
        own["given_options"] = self._given
        metrics = {name: plain(value) for name, value in self.metrics.items()}
        return {
            **self.step.state_dict(),
            **own,
            "following": self.following.state_dict(),
            "metrics": metrics,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step.load_state_dict(state)
        self.source, self.best = state["source"], state["best"]
        self.metrics = dict(state.get("metrics", {}))
        self.ended_epoch = state.get("ended_epoch", False)
        self._given_before = state.get("given_options")
        self.following.load_state_dict(state.get("following", {}))

    def snapshot(
        self, facts: Mapping[str, Any], metadata: dict[str, Any], *, include_optimizer: bool = True
    ) -> checkpoint.Snapshot:
        """Return a checkpoint's contents for the current state, with the live tensors.

        `facts` join the state.
        """
        placed, local = self.step.placed, self.step.placed.local_training
        state = {**self.state_dict(), **facts, **state_of_model(placed), "metadata": metadata}
        extra = placed.state if local is None else {**placed.state, WORKERS: local.state()}
        snapshot = checkpoint.Snapshot(
            placed.kept(), state=state, extra=extra, aliases=placed.named_aliases
        )
        if include_optimizer:
            snapshot.optimizers[OPTIMIZER], snapshot.groups[OPTIMIZER] = self._optimizer_state()
        return snapshot

    def load(self, path: checkpoint.Checkpoint) -> tuple[dict[str, Any], list[str]]:
        """Load a checkpoint of any topology.

        Return the caller's metadata in it, and lines to log.
        """
        state, log_lines = self._fill(path), []
        if "updates" not in state:
            state = {**_UNKNOWN_TO_A_LOOP, "updates": state["step"], **state}
            log_lines.append(
                f"{path} is of a loop over lockstep.place: data go on as after {state['step']}"
                " steps of this trainer"
            )
        self.load_state_dict(state)
        load_state_of_model(self.step.placed, state)
        return state["metadata"], log_lines

    def _optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer's state, or that of each worker's model under its own names."""
        tensors: dict[str, Tensor] = {}
        groups: dict[str, Any] = {}
        for prefix in self._prefixes():
            names = {id(p): prefix + name for name, p in self.step.placed.parameters.items()}
            some, own = checkpoint.optimizer_state(self.step.optimizer, names)
            tensors |= some
            if groups:
                groups["values"] |= own["values"]
                for group, more in zip(groups["groups"], own["groups"], strict=True):
                    group["params"] += more["params"]
            groups = groups or own
        return tensors, groups

    def _prefixes(self) -> Iterable[str]:
        local = self.step.placed.local_training
        return [""] if local is None else local.each(self.step.optimizer)

    def _fill(self, path: checkpoint.Checkpoint) -> dict[str, Any]:
        """Fill the tensors of the model, the strategy and the optimizer.

        Return the state besides tensors.
        """
        placed, local = self.step.placed, self.step.placed.local_training
        if (imported := load_imported(placed, path)) is not None:
            if local is not None:
                local.begin_from_common()
            return imported
        target = self.snapshot({}, {}, include_optimizer=False)
        # Workers may start from a run without workers: each takes over its model and its optimizer
        # state.
        begins = (
            local is not None and f"extra/{WORKERS}" not in checkpoint.read_manifest(path).parts
        )
        if begins:
            del target.extra[WORKERS]
        elif (
            local is not None
            and (stored := checkpoint.read_state(path).get("workers")) != local.total
        ):
            why = "each worker goes on from its own parameters and its own optimizer state"
            fix = f"set distributed.diloco.workers: {stored}, on a number of ranks that divides it"
            raise UsageError(
                f"{path} holds {stored} workers, and this run has {local.total}", why=why, fix=fix
            )
        optimizer = _optimizer_in(path)
        named = {}
        for prefix in self._prefixes():
            named[prefix] = {
                ("" if begins else prefix) + name: p for name, p in placed.parameters.items()
            }
        if optimizer is not None and local is None:
            checkpoint.add_missing_groups(self.step.optimizer, placed.parameters, path, optimizer)
        if optimizer is not None:
            wanted = {name: p for names in named.values() for name, p in names.items()}
            target.optimizers[optimizer] = checkpoint.optimizer_targets(path, optimizer, wanted)
        with torch.no_grad():
            state = checkpoint.load(path, target)
        if local is not None and begins:
            local.begin_from_common()
        if optimizer is None:
            return state
        for prefix in self._prefixes():
            names = {id(p): name for name, p in named[prefix].items()}
            tensors = target.optimizers[optimizer]
            if begins:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            checkpoint.restore_optimizer(
                self.step.optimizer, names, tensors, state["optimizer_groups"][optimizer]
            )
        return state


def _optimizer_in(path: checkpoint.Checkpoint) -> str | None:
    """Return the name of the one optimizer in a checkpoint.

    A user's own loop may choose any name.
    """
    names = checkpoint.optimizers_in(path)
    if len(names) > 1:
        what = f"{path} holds the optimizers {listed(names)}, and a Trainer has one"
        fix = (
            "go on with lockstep.place(…).load_checkpoint(path, optimizers); or take the weights"
            " alone: "
        )
        fix += "model.load_state_dict(lockstep.checkpoint.weights(path)) before the Trainer is made"
        raise UsageError(what, why="a loop over lockstep.place wrote it", fix=fix)
    return names[0] if names else None


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of an optimizer's parameters that JSON can hold."""
    found = {}
    for name, value in group.items():
        value = plain(value) if isinstance(value, Tensor) and value.numel() == 1 else value
        if name != "params" and (
            value is None or isinstance(value, bool | int | float | str | tuple | list)
        ):
            found[name] = value
    return found


def _comparable(option: Any) -> Any:
    return list(option) if isinstance(option, tuple) else option
