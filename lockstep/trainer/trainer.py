"""`Trainer`: a model, an optimizer and data become a run.

    steps of the data → Step.run → record → monitor, evaluation, checkpoints

The loop below is the whole of it; what a step does is in `lockstep.step`, where it runs in `lockstep.parallel`.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import checkpoint, cluster
from lockstep.bad_numbers import BadNumbersError, Judge
from lockstep.config import Config
from lockstep.data import StepSource, adopt
from lockstep.errors import RunError, UsageError
from lockstep.heartbeat import Heartbeat
from lockstep.mesh import layout_of
from lockstep.models.protocol import blocks_of, objective_of
from lockstep.monitor import Monitor
from lockstep.monitor.phases import waits_counted
from lockstep.optim import Schedule
from lockstep.parallel import Placed, Share, place
from lockstep.parallel.activation import apply_activation_checkpointing
from lockstep.parallel.initial import canonical_names
from lockstep.precision import LossScale, Precision, loss_scale_for, resolve_mode
from lockstep.records import RunDirectory, StepRecord
from lockstep.step import Step, nominal_count
from lockstep.trainer import state
from lockstep.trainer.evaluation import WINDOW, evaluate, sample_from
from lockstep.trainer.flight import answer_in_background
from lockstep.trainer.garbage import what_is_there_kept
from lockstep.trainer.opening import open_monitor
from lockstep.trainer.optimizing import (
    MakeOptimizer,
    MakeScheduler,
    make_optimizer,
    scaled_rate,
    schedule_over,
    user_schedule,
    with_batch_size_of,
)
from lockstep.trainer.rollback import Rollback
from lockstep.trainer.saving import Saving
from lockstep.trainer.settings import loss_fn_of, with_settings
from lockstep.trainer.window import Window


class Trainer:
    """Train a model under any strategy.

    Args:
        model: any `nn.Module`, not wrapped. On `meta` if it has `init_weights()`.
        optimizer: made over `model.parameters()` and not yet used, a function `parameters -> optimizer`, or a name;
            unset: as `config.training` says (AdamW).
        loss_fn: `(outputs, targets) -> loss`; unset: the one that the config names, else the model's own.
        scheduler: one of torch's over `optimizer`, or a function `optimizer -> scheduler`; its steps are updates.
            Unset: as the config says (`lr_schedule`, `warmup_steps`).
        config: the whole config; unset: defaults.
        output_dir: the run directory; unset: nothing is written, except where a path is given.
        settings: single keys by their short names: strategy, precision, gradient_accumulation_steps, batch_size,
            learning_rate, max_steps, grad_clip, compile, seed …

    Raises:
        UsageError: before anything is started, where settings contradict each other or the model.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | MakeOptimizer | str | None = None,
        loss_fn: Callable[..., Tensor] | None = None, *, scheduler: LRScheduler | MakeScheduler | None = None,
        config: Config | None = None, output_dir: str | Path | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        if isinstance(optimizer, str):
            settings, optimizer = {**settings, "optimizer": optimizer}, None
        self.config = with_settings(config or Config(), settings)
        self.cluster = cluster.setup(self.config.distributed)
        self.device = self.cluster.device
        self.layout = layout_of(self.config.distributed, self.cluster.facts)
        self.mode, self.why_mode = resolve_mode(self.config.precision.mode, self.device)
        before, _ = canonical_names(model)
        self.placed: Placed = place(
            model,
            self.layout,
            self.config,
            objective=objective_of(model, loss_fn or loss_fn_of(self.config)),
            device=self.device,
            precision=Precision(self.mode, self.device.type),
        )
        training = self.config.training
        self._scales_rate = optimizer is None  # a user's optimizer brings its own learning rate
        rate, self.rate_line = scaled_rate(training, self.global_batch_size)
        self.optimizer = make_optimizer(optimizer, before, self.placed, self.config, rate)
        if not self._scales_rate:
            rate = self.optimizer.param_groups[0]["lr"]
            self.rate_line = f"learning rate {rate:g}, as {type(self.optimizer).__name__} says"
        self._user_schedule = user_schedule(scheduler, self.optimizer, training)
        self.step = Step(
            self.placed,
            self.optimizer,
            # Until `train` knows the number of steps:
            self._user_schedule or Schedule("constant", 0, training.warmup_steps),
            training.gradient_clip,
            loss_scale_for(self.config.precision, self.mode),
            judge=Judge(training.bad_numbers),
        )
        self.run_directory = RunDirectory(Path(output_dir)) if output_dir is not None else None
        self.best: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}  # the newest, as `checkpoint.keep_best` names them
        self.source_state: dict[str, Any] = {}
        self.last_record: StepRecord | None = None
        self._nominal_known = False
        self._shared: bool | None = None
        self.heartbeat = Heartbeat.of_this_rank(self.cluster.facts.rank)
        if self.heartbeat.folder is not None:
            answer_in_background(self.heartbeat.folder, self.cluster.facts.rank)
        self.later_lines: list[str] = []  # to be said at start
        self.around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self._window = Window(self)
        self._rollback = Rollback(self)

    # ---- the whole run ----

    def train(self, train_data: Any, val_data: Any = None, epochs: int | None = None) -> StepRecord | None:
        """Train to the end, with logs, evaluations and checkpoints.

        Args:
            train_data: a dataset, a DataLoader, or an iterable of batches.
            val_data: the same, to be evaluated on every `eval_steps` and at the end.
            epochs: passes over the data; unset: as the config says.

        Returns:
            the last step's record, or None if there was nothing left to do.
        """
        source, total = self._source(train_data, epochs)
        monitor = open_monitor(self, total)
        try:
            saving = Saving(self, monitor)
            while True:
                try:
                    record = self._train(source, total, val_data, monitor, saving)
                    break
                except BadNumbersError as error:
                    self._rollback.report(monitor, source, error.bad)
                    source.close()
                    self._rollback.go_back(error, monitor, saving)
                    source, _ = self._source(train_data, epochs)
            monitor.event("stop", step=self.step.progress.step, reason="preempted" if self.step.stopping else "done")
        except RuntimeError as error:
            explain = getattr(source, "explain", None)  # torch raises a data worker's death wherever the loop is
            raise (explain(error) if explain else None) or error from None
        finally:
            source.close()
            monitor.close()
        return record

    def _train(
        self, source: StepSource, total: int | None, val_data: Any, monitor: Monitor, saving: Saving
    ) -> StepRecord | None:
        """From where the run stands to its end, or to a step whose numbers are bad."""
        record = None
        for record, last_of_epoch in self._run(source):
            step = self.step.progress.step
            last = step == total or self.step.stopping
            if record is not None:
                monitor.on_step(record)
                monitor.say(*self.placed.said_later)
                self.placed.said_later.clear()
                self.metrics |= {"loss": record.loss, "grad_norm": record.grad_norm}
            if self.step.bad is not None:
                self._rollback.report(monitor, source, self.step.bad)
            if val_data is not None and self._evaluates_after(step, last):
                self.heartbeat.beat(step, "pause")
                with self.step.clock.during("evaluation"):
                    loss = self.evaluate(val_data)
                self._report_evaluation(monitor, step, loss)
            saving.after_step(last=last, last_of_epoch=last_of_epoch)
            if self.step.stopping:
                break
        self.step.settle()
        saving.finish(must_succeed=True)
        return record

    def steps(self, train_data: Any, epochs: int | None = None) -> Iterator[StepRecord]:
        """The loop is the caller's: one record a step, and nothing else happens.

        Args:
            epochs: in the whole run, those of earlier calls included.
        """
        source, total = self._source(train_data, epochs)
        if total is not None and self.step.progress.step >= total:
            warnings.warn(
                f"no step is left to take: {self.step.progress.step} are done, and the run has {total}. Epochs and "
                "max_steps are counted from the start of the run: ask for more of them",
                stacklevel=2,
            )
        try:
            for record, _ in self._run(source):
                if record is not None:
                    self.heartbeat.beat(self.step.progress.step, "pause")  # the caller may take its time
                    yield record
        finally:
            source.close()

    def _run(self, source: StepSource) -> Iterator[tuple[StepRecord | None, bool]]:
        """(record, last of its epoch) of each step; no record where the data are passed over."""
        clock = self.step.clock
        clock.enter("data")
        beat = self.heartbeat.beat
        beat(self.step.progress.step + 1, "first")
        with waits_counted(clock), what_is_there_kept():
            for batches in source:
                self.step.bad, record = None, None
                if batches.step in self.step.avoid:
                    self.step.pass_over(batches.samples)
                    yield None, batches.last_of_epoch
                    continue
                shares = [Share(m.index, m.batch, m.real) for m in batches.mine]
                self.learn_nominal_from(shares[0].batch, batches.num_micro_batches)
                self.step.progress.epoch = batches.epoch
                with self.around_step():
                    record = self.step.run(shares, batches.num_micro_batches, batches.samples)
                self.source_state = source.state_dict()
                self.last_record = record
                yield record, batches.last_of_epoch
                beat(self.step.progress.step + 1, "step")
                clock.enter("data")
        beat(self.step.progress.step, "done")

    # ---- one micro-batch at a time ----

    def training_step(self, batch: Any) -> Tensor:
        """Forward and backward of one micro-batch; every `gradient_accumulation_steps`-th call updates, or with a
        `global_batch_size` the one that fills it.

        Args:
            batch: this rank's micro-batch. Ranks must make the same number of calls.

        Returns:
            its mean loss, 0-dim, detached.
        """
        return self._window.add(batch)

    def flush(self) -> None:
        """Train on an incomplete window of `training_step`, weighted by what it holds; all ranks call it together."""
        self._window.flush()

    # ---- evaluation, checkpoints ----

    def evaluate(self, val_data: Any) -> float:
        """The mean loss over all of `val_data`, weighted by valid targets; the same number on all ranks, which all
        call it.
        """
        training = self.config.training
        size = training.eval_batch_size or training.batch_size
        source = adopt(
            val_data, self.config.data.model_copy(update={"shuffle": False, "drop_last": False}), batch_size=size,
            global_batch_size=size * WINDOW, assign=self.placed.assign, epochs=1, seed=training.seed,
            device=self.device, wanted=self.placed.wants_data, own_batch_size=True,
        )  # fmt: skip
        return evaluate(self.placed, source)

    def save_checkpoint(
        self, path: str | Path, include_optimizer: bool = True, metadata: dict[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint into the folder `path`; all ranks call it. Whole when this returns, or not there.

        Returns:
            the checkpoint, `path/step-00000100`.
        """
        snapshot = self.snapshot(include_optimizer=include_optimizer, metadata=metadata)
        return checkpoint.save(Path(path), self.step.progress.step, snapshot, config_yaml=self.config.to_yaml())

    def snapshot(
        self, *, include_optimizer: bool = True, metadata: dict[str, Any] | None = None
    ) -> checkpoint.Snapshot:
        """What a checkpoint holds of the run as it stands; tensors are the live ones."""
        return state.snapshot(self, include_optimizer=include_optimizer, metadata=metadata or {})

    def load_checkpoint(self, path: str | Path) -> tuple[int, dict[str, Any]]:
        """Take up a checkpoint, whatever strategy and number of ranks wrote it; all ranks call it.

        Args:
            path: a checkpoint, or a folder of them, of which the newest whole one is taken.

        Returns:
            its step, and the metadata that it was saved with.
        """
        found = state.find(self, str(path))
        if found is None:
            raise UsageError(
                f"there is no checkpoint in {path}", fix="give a checkpoint, a run directory or its folder checkpoints/"
            )
        return state.restore(self, found)

    def resume(self, how: str) -> Path | None:
        """Go on from the newest whole checkpoint of the run directory (`auto`), from nowhere (`never`), or from a path.

        Returns:
            where it goes on from; None for a fresh start.
        """
        started = time.perf_counter()
        found, step = state.go_back(self, how)
        if found is None:
            return None
        self.later_lines.append(f"goes on after step {step}, from {found}")
        if self.run_directory is not None and self.is_main_process:
            self.run_directory.append_event(
                "resume", step=step, checkpoint=str(found), seconds=time.perf_counter() - started
            )
        return found

    @property
    def storage_is_shared(self) -> bool:
        """Whether all ranks see one run directory; found out once, by all ranks together.

        Raises:
            UsageError: they do not, and the format of checkpoints needs it.
        """
        if self._shared is None:
            directory, config = self.run_directory, self.config.checkpoint
            alone = self.layout.world_size == 1 or directory is None or config.save_strategy == "none"
            self._shared = alone or checkpoint.is_shared(directory.checkpoints)  # type: ignore[union-attr]
            if not self._shared and config.format != "full":
                raise UsageError(
                    f"the hosts do not share {directory.checkpoints}",  # type: ignore[union-attr]
                    where="checkpoint.format: " + config.format,
                    why="each rank writes its part of a checkpoint, and they belong into one folder",
                    fix="choose an --output-dir that all hosts mount, or checkpoint.format: full, which rank 0 writes",
                )
        return self._shared

    # ---- small things ----

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.cluster.facts.is_main

    @property
    def scaler(self) -> LossScale:
        """The loss scale of fp16; one that stays at 1 otherwise."""
        return self.step.loss_scale or LossScale(dynamic=False, initial_scale=1.0)

    @property
    def global_batch_size(self) -> int:
        """Samples in a full step, over all ranks."""
        training = self.config.training
        per_round = training.batch_size * (self.layout.workers or self.layout.data_parallel_size)
        return training.global_batch_size or per_round * training.gradient_accumulation_steps

    def enable_gradient_checkpointing(self, mode: str = "full") -> None:
        """Recompute the activations of blocks in the backward pass, from now on."""
        for part in self.placed.parts:
            apply_activation_checkpointing(blocks_of(part), mode, self.placed.cursor)

    def sampler(self) -> Callable[..., Any]:
        """The model as a function, in evaluation mode, to draw samples from; all ranks call it together."""
        return sample_from(self.placed)

    # ---- how it is put together ----

    def _source(self, train_data: Any, epochs: int | None) -> tuple[StepSource, int | None]:
        """The steps that are left to do, and the number of the last one, where it is known; sets the schedule."""
        self._take_batch_size(train_data)
        training = self.config.training
        epochs = epochs or (None if training.max_steps else training.num_train_epochs or 1)
        source = adopt(
            train_data, self.config.data, batch_size=training.batch_size, global_batch_size=self.global_batch_size,
            assign=self.placed.assign, start_step=self.step.progress.step, stop_step=training.max_steps, epochs=epochs,
            seed=training.seed, device=self.device, wanted=self.placed.wants_data, state=self.source_state,
        )  # fmt: skip
        per_epoch = source.steps_per_epoch
        total = training.max_steps or (per_epoch * epochs if per_epoch and epochs else None)
        self.step.schedule = self._user_schedule or schedule_over(training, total)
        self.step.total = total or 0
        if source.notice:
            self.later_lines.append(source.notice)
        return source, total

    def _take_batch_size(self, data: Any) -> None:
        """A DataLoader's own batch size may stand; the learning rate follows its rule."""
        config = with_batch_size_of(data, self.config)
        if config is self.config:
            return
        self.config = config
        if self._scales_rate:
            rate, self.rate_line = scaled_rate(self.config.training, self.global_batch_size)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] = rate

    def learn_nominal_from(self, first: Any, slots: int) -> None:
        """What backward divides by: from the very first micro-batch of the run, which rank 0 has, for all ranks."""
        if self._nominal_known:
            return
        count = float(self.placed.objective.count(first)) if self.is_main_process else 0.0
        if self.layout.world_size > 1:
            box = torch.tensor([count], dtype=torch.float64, device=self.device)
            dist.broadcast(box, src=0)
            count = box.item()
        self.learn_nominal(nominal_count(count, slots))

    def learn_nominal(self, nominal: float) -> None:
        """Set it, once and for all steps."""
        self.step.nominal, self._nominal_known = nominal, True

    def _evaluates_after(self, step: int, last: bool) -> bool:
        every = self.config.training.eval_steps
        return last or (every is not None and step % every == 0)

    def _report_evaluation(self, monitor: Monitor, step: int, loss: float) -> None:
        self.metrics["eval_loss"] = loss
        self.best["eval_loss"] = min(loss, self.best.get("eval_loss", loss))
        monitor.on_eval({"step": step, "eval_loss": loss})


__all__ = ["RunError", "Trainer"]
