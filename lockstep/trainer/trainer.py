"""Trains a model with an optimizer and data as a run (`Trainer`).

    steps of the data → Step.run → record → monitor, evaluation, checkpoints

The loop below is complete; `lockstep.step` makes a step, and `lockstep.parallel` runs it on the ranks.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import checkpoint, cluster
from lockstep.bad_numbers import AnomalyDetector, BadNumbersError
from lockstep.checkpoint import Snapshot
from lockstep.config import Config
from lockstep.data import StepBatches, StepSource, holds_token_ids
from lockstep.errors import UsageError
from lockstep.heartbeat import called_by_all_ranks, own_heartbeat, write_limits
from lockstep.mesh import layout_of
from lockstep.models.protocol import blocks_of, objective_of
from lockstep.monitor import Monitor
from lockstep.monitor.meters import waits_counted
from lockstep.parallel.activation import apply_activation_checkpointing
from lockstep.parallel.initial import canonical_names
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.place import place
from lockstep.precision import LossScale, Precision, loss_scale_for, resolve_mode
from lockstep.records import RunDirectory, StepRecord
from lockstep.run_lock import RunLock
from lockstep.step import Step
from lockstep.trainer import setup, start
from lockstep.trainer.caller_batches import StepWindow
from lockstep.trainer.checkpointer import Checkpointer, Rollback, checkpoints_of, find, resume, storage_is_shared
from lockstep.trainer.evaluator import Evaluator, evaluate, sample_from, validation_source
from lockstep.trainer.loss_check import LossCheck
from lockstep.trainer.run_state import RunState, require_same_epoch
from lockstep.trainer.setup import AfterUpdate, MakeOptimizer, MakeScheduler


class Trainer:
    """Trains a model under any strategy.

    Args:
        model: any `nn.Module`, not wrapped. On `meta` if it has `init_weights()`.
        optimizer: made over `model.parameters()` and not yet used, a function `parameters -> optimizer`, or a name;
            unset: the config's (AdamW).
        loss_fn: `(outputs, targets) -> loss`; unset: the one that the config names, else the model's own.
        scheduler: one of torch's over `optimizer`, or a function `optimizer -> scheduler`; its steps are updates.
            Unset: by `lr_schedule` and `warmup_steps`; if neither is set, the optimizer's rate is not changed.
        config: the whole config; unset: defaults.
        output_dir: the run directory; unset: nothing is written, except to paths that methods are given.
        after_update: called on every rank after each update, without gradients, with the number of updates: for
            teachers that follow their students, or a `lockstep.WeightAverage`.
        freeze_until: name of a module or a parameter → the first step, counted from 0, that trains it.
        settings: single keys by their short names: strategy, precision, batch_size, learning_rate, max_steps, compile …
            Without `lr_schedule`, `warmup_steps` and `grad_clip` this is the plain loop. `None` switches one off that
            the config sets.

    Raises:
        UsageError: before anything is started, if settings contradict each other or the model.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | MakeOptimizer | str | None = None,
        loss_fn: Callable[..., Tensor] | None = None, *, scheduler: LRScheduler | MakeScheduler | None = None,
        config: Config | None = None, output_dir: str | Path | None = None,
        after_update: AfterUpdate | list[AfterUpdate] | None = None, freeze_until: Mapping[str, int] | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        if isinstance(optimizer, str):
            settings, optimizer = {**settings, "optimizer": optimizer}, None
        self.config = setup.with_settings(config or Config(), settings)
        self.cluster = cluster.setup(self.config.distributed)
        self.device = self.cluster.device
        self.layout = layout_of(self.config.distributed, self.cluster.facts)
        self.mode, self.why_mode = resolve_mode(self.config.precision.mode, self.device)
        names, _ = canonical_names(model)
        self.placed: ParallelModel = place(
            model, self.layout, self.config.step, device=self.device, precision=Precision(self.mode, self.device.type),
            objective=objective_of(model, loss_fn or setup.loss_fn_of(self.config)),
        )  # fmt: skip
        training = self.config.training
        self.scales_rate = optimizer is None  # a user's optimizer brings its own learning rate
        self.optimizer, self.rate_line = setup.make_optimizer(
            optimizer, names, self.placed, self.config, self.global_batch_size
        )
        self.user_schedule = setup.user_schedule(scheduler, self.optimizer, training)
        schedule = self.user_schedule or setup.schedule_before_data(training, own_optimizer=not self.scales_rate)
        self.step = Step(
            self.placed, self.optimizer, schedule, training.gradient_clip,
            loss_scale_for(self.config.precision, self.mode), anomaly_detector=AnomalyDetector(training.bad_numbers),
            after_update=setup.after_update_calls(after_update, freeze_until, self.placed),
            frozen_until=setup.frozen_until(freeze_until or {}, list(names.values())),
        )  # fmt: skip
        self.state = RunState(self.step)
        self.run_directory = RunDirectory(Path(output_dir)) if output_dir is not None else None
        self.checkpoints = checkpoints_of(self)
        self.lock = RunLock(self.run_directory.path, _print) if self.run_directory is not None else None
        self.last_record: StepRecord | None = None
        self.reads_tokens = False  # known after the first batch
        self._start_is_decided = False  # the run was resumed, loaded, or told to start afresh
        self._resumed_from: checkpoint.CheckpointPath | None = None  # until its data are compared with this run's
        self.heartbeat = own_heartbeat()
        hang = self.config.distributed.hang
        write_limits(hang.factor, hang.seconds, self.config.distributed.timeout_seconds)
        start.dump_collectives_on_request(self.heartbeat.folder, self.cluster.facts.rank)
        self._start_lines: list[str] = []  # to log at the start
        self.around_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self.loss_check = LossCheck(self.placed, compiled=training.compile, coarse=self.mode != "fp32")
        self._window = StepWindow(self)
        self._rollback = Rollback(self)

    # ---- the whole run ----

    def train(self, train_data: Any, val_data: Any = None, epochs: int | None = None) -> StepRecord | None:
        """Train to the end, with logs, evaluations and checkpoints.

        A run with a run directory that was not resumed or loaded yet resumes by `checkpoint.resume`.

        Args:
            train_data: a dataset, a DataLoader, or an iterable of batches.
            val_data: the same, to evaluate every `eval_steps` and at the end.
            epochs: passes over the data; unset: the config's.

        Returns:
            the last step's record, or None if there was nothing left to do.
        """
        start.lock_run_directory(self)
        try:
            return self._train_locked(train_data, val_data, epochs)
        finally:
            if self.lock is not None:
                self.lock.release()

    def _train_locked(self, train_data: Any, val_data: Any, epochs: int | None) -> StepRecord | None:
        if self.run_directory is not None and not self._start_is_decided and self.step.progress.step == 0:
            self._adopt_batch_size(train_data)
            self.resume(self.config.checkpoint.resume)
        source, total = self._open_source(train_data, epochs)
        if total is not None and self.step.progress.step >= total:
            self._start_lines.append(self._nothing_left(total))
        opened = start.open_monitor(self, total, self._start_lines)
        self._start_lines = []
        self.step.observe(opened.clock, opened.wants_layer_norms)
        self.around_step = opened.around_step or self.around_step
        monitor, evaluator = opened.monitor, Evaluator(self, val_data)
        try:
            checkpointer = Checkpointer(self, monitor)
            while True:
                try:
                    record = self._train(source, total, evaluator, monitor, checkpointer)
                    break
                except BadNumbersError as error:
                    self._rollback.report(monitor, source, error.anomaly)
                    source.close()
                    self._rollback.roll_back(error, monitor, checkpointer)
                    source, _ = self._open_source(train_data, epochs)
                except Exception:
                    checkpointer.finish_alone()
                    raise
            monitor.event("stop", step=self.step.progress.step, reason="preempted" if self.step.stopping else "done")
        finally:
            source.close()
            monitor.close()
        return record

    def _nothing_left(self, total: int) -> str:
        """Return the log line of a finished run that is started again."""
        return (
            f"nothing left to do: {self.step.progress.step} steps are done, and the run has {total}. For more of them "
            "raise training.max_steps or num_train_epochs; --resume never starts afresh"
        )

    def _train(
        self, source: StepSource, total: int | None, evaluator: Evaluator, monitor: Monitor, checkpointer: Checkpointer
    ) -> StepRecord | None:
        """Train from the run's current step to its end, or to a step with bad numbers."""
        record, last = None, True
        if evaluator.was_stopped():
            self._evaluate(evaluator, monitor)
        begun = self.step.progress.step
        with start.explain_worker_deaths(source):
            for record, last_of_epoch in () if self.step.stopping else self._run(source, "train"):
                if self.lock is not None:
                    self.lock.check()
                if record is not None:
                    monitor.counts_tokens = self.reads_tokens
                    monitor.on_step(record)
                    monitor.say(*self.placed.take_log_lines())
                    self.state.record_step(record)
                if self.step.anomaly is not None:
                    self._rollback.report(monitor, source, self.step.anomaly)
                last = self.step.progress.step == total or self.step.stopping
                if not last and evaluator.is_due:
                    self._evaluate(evaluator, monitor)
                    last = self.step.stopping
                checkpointer.after_step(last=last, last_of_epoch=last_of_epoch)
                if self.step.stopping:
                    break
        self.step.flush()
        if not last:  # the data ended, at an unknown length
            checkpointer.after_step(last=True, last_of_epoch=True)
        checkpointer.finish(must_succeed=True)
        if self.step.progress.step > begun and not self.step.stopping and evaluator.is_due_at_end:
            self._evaluate(evaluator, monitor)  # after the save: a run that is killed now loses this number alone
        return record

    def _evaluate(self, evaluator: Evaluator, monitor: Monitor) -> None:
        """Evaluate, and record the result; the run ends here if a rank was asked to stop meanwhile."""
        step = self.step.progress.step
        with self.step.clock.during("evaluation"), self.heartbeat.call("evaluate"):
            loss = evaluator.run()
        if loss is None:
            self.step.stop()
            monitor.event("evaluation_stopped", step=step)
            return
        self.state.record_evaluation(loss)
        monitor.on_eval({"step": step, "eval_loss": loss})

    def steps(self, train_data: Any, epochs: int | None = None) -> Iterator[StepRecord]:
        """Yield a record for each step of the caller's loop, and do nothing else.

        Args:
            epochs: in the whole run, including earlier calls.
        """
        source, total = self._open_source(train_data, epochs)
        if total is not None and self.step.progress.step >= total:
            warnings.warn(
                f"no step is left to take: {self.step.progress.step} are done, and the run has {total}. Epochs and "
                "max_steps are counted from the start of the run: ask for more of them",
                stacklevel=2,
            )
        try:
            with start.explain_worker_deaths(source):
                for record, _ in self._run(source, "steps"):
                    if record is not None:
                        self.heartbeat.beat(self.step.progress.step, "pause")  # the caller may take any time
                        yield record
        finally:
            source.close()

    def _run(self, source: StepSource, name: str) -> Iterator[tuple[StepRecord | None, bool]]:
        """Yield (record, last of its epoch) of each step; no record if its data are skipped.

        Args:
            name: of the calling function; each step counts as a call of it, which all ranks make together.
        """
        clock, beat, taken = self.step.clock, self.heartbeat.beat, iter(source)
        clock.enter("data")
        beat(self.step.progress.step + 1, "first")
        with waits_counted(clock), start.frozen_garbage():
            while True:
                with self.heartbeat.call(name):
                    batches = next(taken, None)
                    if batches is None:
                        break
                    record = self._take(batches, source)
                yield record, batches.last_of_epoch
                beat(self.step.progress.step + 1, "step")
                clock.enter("data")
        beat(self.step.progress.step, "done")

    def _take(self, batches: StepBatches, source: StepSource) -> StepRecord | None:
        """Take one step; return no record if its data are skipped."""
        if batches.step in self.step.avoid:
            self.step.skip_step(batches.samples)
            return None
        self.reads_tokens = self.reads_tokens or holds_token_ids(batches.mine[0].batch)
        if self.loss_check.left:
            self.loss_check.before_step(batches.mine, batches.num_micro_batches, batches.step)
        with self.around_step():
            record = self.step.run(batches.mine, batches.num_micro_batches, batches.samples, epoch=batches.epoch)
        self.state.keep_position(source.state_dict())
        self.last_record = record
        return record

    def _open_source(self, data: Any, epochs: int | None) -> tuple[StepSource, int | None]:
        """Return the remaining steps, and the number of the last one, if it is known."""
        self.cluster.check()
        self._adopt_batch_size(data)
        source, total = setup.open_source(
            data, self.config, self.placed, epochs=epochs, global_batch_size=self.global_batch_size,
            start_step=self.step.progress.step, position=self.state.source,
        )  # fmt: skip
        self.state.set_steps_per_epoch(source.steps_per_epoch)
        if self._resumed_from is not None and not self.config.checkpoint.allow_changes:
            found, self._resumed_from = self._resumed_from, None
            require_same_epoch(source, self.global_batch_size, found)
        own_optimizer = not self.scales_rate
        schedule = self.user_schedule or setup.schedule_over(self.config.training, total, own_optimizer=own_optimizer)
        self.step.plan_run(total, schedule)
        if source.notice:
            self._start_lines.append(source.notice)
        return source, total

    def _adopt_batch_size(self, data: Any) -> None:
        """Use a DataLoader's own batch size, if the settings have none; the learning rate follows its rule."""
        config = setup.with_batch_size_of(data, self.config)
        if config is self.config:
            return
        self.config = config
        if self.scales_rate:
            rate, self.rate_line = setup.scaled_rate(config.training, self.global_batch_size)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] = rate

    # ---- one micro-batch at a time ----

    @called_by_all_ranks
    def training_step(self, batch: Any) -> Tensor:
        """Run forward and backward of one micro-batch, and update with the last one of a step.

        A step has `gradient_accumulation_steps` calls, or those that fill a `global_batch_size`.

        Args:
            batch: this rank's micro-batch. Ranks must make the same number of calls.

        Returns:
            its mean loss, 0-dim, detached.
        """
        loss, record = self._window.add(batch)
        self.last_record = record or self.last_record
        return loss

    @called_by_all_ranks
    def flush(self) -> None:
        """Train on an incomplete window of `training_step`, weighted by its contents; all ranks call it together."""
        self.last_record = self._window.flush() or self.last_record

    # ---- evaluation, checkpoints ----

    @called_by_all_ranks
    def evaluate(self, val_data: Any) -> float:
        """Return the mean loss over `val_data`, weighted by valid targets; all ranks call it, and get the same number.

        With `training.eval_batches` it is over that many micro-batches.
        """
        return evaluate(self.placed, validation_source(self, val_data), limit=self.config.training.eval_batches)

    @called_by_all_ranks
    def save_checkpoint(
        self, path: str | Path, include_optimizer: bool = True, metadata: dict[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint into the folder `path`; all ranks call it. It is whole when this returns, or not there.

        Returns:
            the checkpoint, `path/step-00000100`.

        Raises:
            BadNumbersError: the last step's numbers are bad; on a GPU they are read only here.
        """
        self.step.flush()
        snapshot = self.snapshot(include_optimizer=include_optimizer, metadata=metadata)
        saved = checkpoint.save(Path(path), self.step.progress.step, snapshot, config_yaml=self.config.to_yaml())
        assert isinstance(saved, Path)
        return saved

    def snapshot(self, *, include_optimizer: bool = True, metadata: dict[str, Any] | None = None) -> Snapshot:
        """Return a checkpoint's contents for the current state; tensors are the live ones."""
        facts = {
            "seed": self.config.training.seed,
            "layout": str(self.layout),
            "global_batch_size": self.global_batch_size,
            "workers": self.layout.workers,
        }
        return self.state.snapshot(facts, metadata or {}, include_optimizer=include_optimizer)

    @called_by_all_ranks
    def load_checkpoint(self, path: str | Path) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint, whatever strategy and number of ranks wrote it; all ranks call it.

        Args:
            path: a checkpoint, or a folder of them, whose newest whole one is loaded.

        Returns:
            its step, and the metadata that it was saved with.
        """
        found = find(self, str(path))
        if found is None:
            raise UsageError(
                f"there is no checkpoint in {path}", fix="give a checkpoint, a run directory or its folder checkpoints/"
            )
        self._start_is_decided = True
        loaded = self.state.load(found)
        self._start_lines += loaded.log_lines
        return loaded.step, loaded.metadata

    @called_by_all_ranks
    def resume(self, how: str) -> checkpoint.CheckpointPath | None:
        """Resume from the run directory's newest whole checkpoint (`auto`), from nowhere (`never`), or from a path.

        Returns:
            the checkpoint; None for a fresh start.
        """
        start.lock_run_directory(self)
        resumed = resume(self, how)
        self._start_is_decided, self._resumed_from = True, resumed.checkpoint
        self._start_lines += resumed.log_lines
        return resumed.checkpoint

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest metrics, by the names in `checkpoint.keep_best`."""
        return self.state.metrics

    @cached_property
    def storage_is_shared(self) -> bool:
        """Return whether all ranks see the same folder of checkpoints; all ranks find out once, together."""
        return storage_is_shared(self)

    # ---- small things ----

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""
        return self.cluster.facts.is_main

    @property
    def scaler(self) -> LossScale:
        """The loss scale of fp16; one that stays at 1 otherwise."""
        return self.step.loss_scale or LossScale(dynamic=False, initial_scale=1.0)

    @property
    def global_batch_size(self) -> int:
        """Samples in a full step, over all ranks."""
        training = self.config.training
        per_round = training.batch_size * self.layout.batch_shares
        return training.global_batch_size or per_round * training.accumulation

    def enable_gradient_checkpointing(self, mode: str = "full") -> None:
        """Recompute the activations of blocks in the backward pass, from now on."""
        for part in self.placed.parts:
            apply_activation_checkpointing(blocks_of(part), mode, self.placed.random_state)

    def sampler(self) -> Callable[..., Any]:
        """Return the model as a function, in evaluation mode, to draw samples from; all ranks call it together."""
        return sample_from(self.placed)


def _print(text: str) -> None:
    print(f"lockstep: {text}", flush=True)
