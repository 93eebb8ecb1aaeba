"""Trains a model with an optimizer and data (`Trainer`): a whole run, step by step, or one micro-batch at a time.

Tests: tests/trainer/test_trainer.py, tests/trainer/test_cost_of_a_step.py
"""

import atexit
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import checkpoint, cluster
from lockstep.bad_numbers import AnomalyDetector, BadNumbersError
from lockstep.checkpoint import Snapshot
from lockstep.config import Config, MonitorConfig, apply_flags
from lockstep.config.names import advice_for_method
from lockstep.data import StepBatches, StepSource, holds_token_ids
from lockstep.errors import UsageError
from lockstep.heartbeat import called_by_all_ranks, own_heartbeat
from lockstep.mesh import layout_of
from lockstep.models.hf_cache import switch_cache_off
from lockstep.models.protocol import blocks_of, objective_of
from lockstep.monitor import Monitor
from lockstep.monitor.callbacks import understood
from lockstep.monitor.meters import waits_counted
from lockstep.optim import PlateauSchedule, scaled_learning_rate
from lockstep.parallel.activation import apply_activation_checkpointing
from lockstep.parallel.loss_weights import refuse_hidden
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.place import place
from lockstep.paths import local_path
from lockstep.precision import LossScale, Precision, loss_scale_for, resolve_mode
from lockstep.records import RunDirectory, StepRecord
from lockstep.run_lock import RunLock
from lockstep.step import Step
from lockstep.trainer import arguments, no_effect, setup, whole_run
from lockstep.trainer.average import AVERAGE
from lockstep.trainer.caller_batches import StepWindow
from lockstep.trainer.checkpointer import (
    Checkpointer,
    after_restart,
    best_of,
    evaluations,
    find,
    is_same_folder,
    load,
    require_same_epoch,
    resume,
)
from lockstep.trainer.evaluator import (
    Evaluator,
    Metrics,
    evaluated,
    evaluated_weights,
    predicted,
    sample,
)
from lockstep.trainer.loss_check import LossCheck
from lockstep.trainer.modes import Modes
from lockstep.trainer.plain_state import plain_state_dict
from lockstep.trainer.run_state import Following, RunState
from lockstep.trainer.setup import AfterUpdate, MakeOptimizer, MakeScheduler, TrainerSettings
from lockstep.trainer.train_loop import TrainLoop
from lockstep.trainer.training_run import TakenStep, TakenSteps, TrainingRun
from lockstep.trainer.whole_batch import WholeBatch, WholeBatchSteps


class Trainer:
    """Trains a model under any strategy.

    Args:
        model: any `nn.Module`, not wrapped. On `meta` if it has `init_weights()`.
        optimizer: made over `model.parameters()` and not yet used, a function `parameters ->
            optimizer`, or a name; unset: the config's (AdamW).
        loss_fn: `(outputs, targets) -> loss`; unset: the one that the config names, else the
            model's own. In a `lockstep.WholeBatch` it is over all samples of a step together.
        scheduler: one of torch's over `optimizer`, or a function `optimizer -> scheduler`; its
            steps are updates. Unset: by `lr_schedule` and `warmup_steps`; if neither is set, the
            optimizer's rate is not changed. A ReduceLROnPlateau is stepped by the evaluations of
            `train`.
        scheduler_metric: what a ReduceLROnPlateau follows: `eval_loss` or `eval_NAME`.
        config: the whole config; unset: defaults.
        output_dir: the run directory; unset: nothing is written, except to paths that methods are
            given.
        after_update: called on every rank after each update, without gradients, with the number of
            updates: for teachers that follow their students, or a `lockstep.WeightAverage`.
        freeze_until: name of a module or a parameter → the first step, counted from 0, that trains
            it.
        settings: keys of the config by their names (`TrainerSettings` lists them): strategy,
            precision, batch_size, learning_rate, max_steps, compile … Without `lr_schedule`,
            `warmup_steps` and `gradient_clip` this is the plain loop. `None` switches one off that
            the config sets.

    Raises:
        UsageError: before anything is started, if settings contradict each other or the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | MakeOptimizer | str | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        scheduler: LRScheduler | MakeScheduler | None = None,
        scheduler_metric: str = "eval_loss",
        config: Config | None = None,
        output_dir: str | Path | None = None,
        after_update: AfterUpdate | list[AfterUpdate] | None = None,
        freeze_until: Mapping[str, int] | None = None,
        **settings: Unpack[TrainerSettings],
    ) -> None:
        arguments.check_of_trainer(optimizer, loss_fn, scheduler, config, after_update)
        arguments.check_model(
            model, "Trainer", has_loss_fn=(loss_fn or (config and config.loss_fn)) is not None
        )
        arguments.check_loss_fn(loss_fn, "Trainer")
        own: dict[str, Any] = {**settings}
        if isinstance(optimizer, str):
            own["optimizer"], optimizer = optimizer, None
        self.callbacks = [
            one for one in own.get("callbacks") or () if not isinstance(one, str | Mapping)
        ]
        if self.callbacks:
            own["callbacks"] = [one for one in own["callbacks"] if isinstance(one, str | Mapping)]
        for callback in self.callbacks:
            understood(callback)
        arguments.check_settings(
            own, (Trainer.train, Trainer.steps, Trainer.evaluate, Trainer.predict)
        )
        given = apply_flags(own)
        self.config = setup.with_settings(config or Config(), given)
        self.asked = no_effect.asked_keys(self.config, given)
        self.cluster = cluster.setup(self.config.distributed)
        self.device = self.cluster.device
        self.layout = layout_of(self.config.distributed, self.cluster.facts)
        self.mode, self.why_mode = resolve_mode(self.config.precision.mode, self.device)
        loss_fn = loss_fn or setup.loss_fn_of(self.config)
        objective = objective_of(model, loss_fn)
        before = setup.Unplaced.of(model, objective, loss_fn)
        trained = [*model.parameters(), *before.of_loss]
        self._is_frozen = not any(parameter.requires_grad for parameter in trained)
        self.data_workers = 0  # of the training data
        # Numbers of the whole model, and of a loss with weights; `place` refuses parameters that
        # have none yet.
        self.num_trained = sum(p.numel() for p in {*trained} if p.requires_grad and not is_lazy(p))
        self.placed: ParallelModel = place(
            model,
            self.layout,
            self.config.step,
            device=self.device,
            precision=Precision(self.mode, self.device.type),
            objective=objective,
        )
        refuse_hidden(self.placed, before.hidden)
        self.has_whole_batch_loss = isinstance(loss_fn, WholeBatch)
        if isinstance(loss_fn, WholeBatch):
            self.placed.forward_backward = WholeBatchSteps(self.placed, loss_fn).forward_backward
            self.placed.micro_step = None
        training = self.config.training
        self.scales_rate = optimizer is None  # a user's optimizer brings its own learning rate
        self.optimizer, self.rate_line = setup.make_optimizer(
            optimizer, before, self.placed, self.config, self.global_batch_size
        )
        self.modes = Modes(self.placed, self.optimizer)
        self.user_schedule = setup.user_schedule(
            scheduler, self.optimizer, training, scheduler_metric
        )
        schedule = self.user_schedule or setup.schedule_before_data(
            training, own_optimizer=not self.scales_rate
        )
        self.step = Step(
            self.placed,
            self.optimizer,
            schedule,
            training.gradient_clip,
            loss_scale_for(self.config.precision, self.mode),
            anomaly_detector=AnomalyDetector(training.bad_numbers),
            after_update=setup.after_update_calls(after_update, freeze_until, self.placed),
            frozen_until=setup.frozen_until(freeze_until or {}, list(before.names.values())),
        )
        plateau = self.user_schedule if isinstance(self.user_schedule, PlateauSchedule) else None
        if plateau is None and scheduler_metric != "eval_loss":
            what, fix = (
                "scheduler_metric is for a ReduceLROnPlateau, and the trainer has none",
                "leave it out",
            )
            raise UsageError(what, where="Trainer(scheduler_metric=…)", fix=fix)
        kept = self.config.checkpoint.keep_best, self.config.checkpoint.keep_best_mode
        self.state = RunState(
            self.step, following=Following(training.early_stopping, plateau), keep_best=kept
        )
        self.run_directory = (
            RunDirectory(local_path(output_dir, "output_dir")) if output_dir is not None else None
        )
        self.checkpoints: checkpoint.Directory | None = None  # where the run keeps them
        self.lock: RunLock | None = None
        if self.run_directory is not None:
            storage = self.config.checkpoint.storage
            self.checkpoints = (
                self.run_directory.checkpoints
                if storage is None
                else checkpoint.build_storage(storage)
            )
            self.lock = RunLock(
                self.run_directory.path, lambda text: print(f"lockstep: {text}", flush=True)
            )
        self.last_record: StepRecord | None = None
        self._start_is_decided = False  # the run was resumed, loaded, or told to start afresh
        # until its data are compared with this run's
        self._resumed_from: checkpoint.CheckpointPath | None = None
        self.heartbeat = own_heartbeat()
        setup.write_hang_limits(self.config.distributed)
        whole_run.dump_collectives_on_request(self.heartbeat.folder, self.cluster.facts.rank)
        self._start_lines: list[str] = []  # to log at the start
        self.loss_check = LossCheck(
            self.placed, compiled=training.compile, coarse=self.mode != "fp32"
        )
        if self.has_whole_batch_loss:
            self.loss_check.skip()
        no_effect.report(no_effect.of_trainer(self), self.asked, is_main=self.is_main_process)
        # the ways to train, and data, whose settings without effect were reported
        self._reported: set[str] = set()
        self._window = StepWindow(self)
        self.open_step = self._window.open_step
        self._data_are_new = True  # no batch of the loop's data was looked at
        self.current_run: TrainingRun | None = None  # the one in progress, or the last
        self._monitor: Monitor | None = None  # that of the recorded run, or of `log` alone
        # that a loop which nothing records has not printed
        self._placement_warnings = self.placed.warnings()

    def train(
        self,
        train_data: Any,
        val_data: Any = None,
        epochs: int | None = None,
        *,
        metrics: Metrics | None = None,
    ) -> StepRecord | None:
        """Train to the end, with logs, evaluations and checkpoints.

        Return the last step's record, if there was one.

        A run with a run directory that was not resumed or loaded yet resumes by
        `checkpoint.resume`.

        Args:
            train_data: a dataset, a DataLoader, or an iterable of batches.
            val_data: the same, to evaluate every `eval_steps` and at the end.
            epochs: passes over the data; unset: the config's.
            metrics: computed by each evaluation, and recorded as `eval_NAME`; see `evaluate`.
        """
        arguments.check_epochs(epochs)
        arguments.check_metrics(metrics, "Trainer.train")
        self._close_run()
        with ExitStack() as ending:
            ending.callback(self._release_lock)
            self._report("validation", lambda: no_effect.of_validation(self.config, val_data))
            if metrics is not None and val_data is None:
                no_effect.warn(
                    "metrics= means nothing without validation data: pass val_data to train(…)"
                )
            self.state.check_followed(metrics, evaluates=val_data is not None)
            self._begin(train_data)
            source, total = self._open_source(train_data, epochs)
            evaluator = Evaluator(self, val_data, metrics)
            self._start_lines += whole_run.nothing_to_do(self, total, val_data)
            if line := evaluator.too_few(total):
                self._start_lines.append(line)
            monitor, around_step = whole_run.open_monitor(self, total, self._start_lines)
            self._monitor, self._start_lines = monitor, []
            ending.callback(self._close_run)
            self.current_run = run = TrainingRun(self, monitor, around_step)
            loop = TrainLoop(run, evaluator)
            record = loop.to_end(self._steps_of(run, source, total, train_data, epochs, "train"))
            self.modes.eval()
            self._load_best()
            return record

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Say what to write instead of another trainer's method."""
            advice = (
                None
                if name.startswith("_") or hasattr(type(self), name)
                else advice_for_method(name)
            )
            raise AttributeError(
                f"Trainer has no {name!r}" + (f": {advice}" if advice else ""), name=name, obj=self
            )

    @whole_run.closed_at_exit
    def steps(
        self, train_data: Any, epochs: int | None = None, *, progress: bool | None = None
    ) -> Iterator[StepRecord]:
        """Yield a record for each step of the caller's loop.

        What `train` records and saves, this does, too.

        With an `output_dir` the run is resumed at the first step by `checkpoint.resume`, recorded,
        and saved when that is due, after the caller's code for the step; without one nothing is
        written. Evaluations are the caller's: `evaluate` in the loop counts. A loop that is left is
        saved where it is the only rank's; on several ranks, in the next call that all of them make.

        Args:
            train_data: a dataset, a DataLoader, or an iterable of batches.
            epochs: in the whole run, including earlier calls.
            progress: unset: lines as in `train` with an `output_dir`, else a bar on a terminal;
                True: a line every `log_steps`, also where there is no terminal; False: neither.
        """
        with ExitStack() as ending:
            ending.callback(self._release_lock)
            self._begin(train_data, no_effect.STEPS)
            source, total = self._open_source(train_data, epochs)
            if line := whole_run.no_step_left(self, total):
                warnings.warn(line, stacklevel=2)
            run = self._open_run(total, progress)
            steps = ending.enter_context(
                closing(self._steps_of(run, source, total, train_data, epochs, "steps"))
            )
            for taken in steps:
                if taken.record is not None:
                    # the caller may take any time
                    self.heartbeat.beat(self.step.progress.step, "pause")
                    yield taken.record
            is_last = epochs is None or self.was_stopped
            run.end_loop(is_last=is_last)
            if is_last:
                self._load_best()

    @property
    def done(self) -> bool:
        """Return whether the run has come to its end: its last step, an early stop, or a request to stop."""
        return self.was_stopped or 0 < self.step.total <= self.step.progress.step

    @property
    def was_stopped(self) -> bool:
        """Return whether the run was stopped: early, by its evaluations, or because a rank was asked to."""
        return self.step.stopping or self.state.following.stopped

    def _report(self, where: str, found: Callable[[], Iterable[no_effect.NoEffect]]) -> None:
        """Report settings without effect somewhere, once."""
        if where not in self._reported:
            self._reported.add(where)
            no_effect.report(found(), self.asked, is_main=self.is_main_process)

    def _begin(self, data: Any, where: str | None = None) -> None:
        """Lock the run directory, and resume by `checkpoint.resume` before the first step.

        All ranks call it.

        `where` names the way to train in messages about settings that have no effect in it; None:
        `train`.
        """
        if where is not None:
            self._report(where, lambda: no_effect.of_way(self, where))
        whole_run.lock_run_directory(self)
        if self._start_is_decided or self.step.progress.step:
            return
        self._adopt_batch_size(data)
        how = self.config.checkpoint.resume
        if self.run_directory is not None or how not in ("auto", "never"):
            self.go_on_from(how)

    def _open_run(self, total: int | None, progress: bool | None) -> TrainingRun:
        """Return the run of a loop of the caller's own: the open one, or a new one."""
        run = self.current_run
        if run is not None and run.is_recorded and not run.is_closed:
            run.settle()
            run.monitor.go_on_to(total)
            return run
        self._close_run()
        lines, self._start_lines = self._start_lines, []
        around_step: whole_run.AroundStep = nullcontext
        if is_recorded := whole_run.records_steps(self):
            monitor, around_step = whole_run.open_monitor(
                self, total, lines, prints=progress is not False
            )
        else:
            monitor = whole_run.open_bar(self, total, progress)
            if not progress:
                self._report("log_steps", no_effect.of_unrecorded_loop)
            for line in whole_run.idle_ranks(self) if self.is_main_process else ():
                warnings.warn(line, stacklevel=3)
        self._monitor = monitor if is_recorded else None  # `log` makes one of its own
        self.current_run = run = TrainingRun(
            self, monitor, around_step, in_callers_loop=True, is_recorded=is_recorded
        )
        if not is_recorded:
            warnings_of_placement, self._placement_warnings = self._placement_warnings, []
            run.say(*warnings_of_placement, *lines)
        return run

    def _steps_of(
        self,
        run: TrainingRun,
        source: StepSource,
        total: int | None,
        data: Any,
        epochs: int | None,
        name: str,
    ) -> Generator[TakenStep]:
        return run.steps(
            source,
            total,
            lambda: self._open_source(data, epochs)[0],
            lambda steps: self._take_all(steps, name),
        )

    def _settle(self) -> None:
        """Save the step at which a loop was left, in a call that all ranks make."""
        if self.current_run is not None:
            self.current_run.settle()

    def _close_run(self) -> None:
        """Close the monitor of an earlier loop, or of `log` alone."""
        if self.current_run is not None:
            self.current_run.close()
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None

    def _release_lock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def _load_best(self) -> None:
        if (
            self.config.checkpoint.load_best
            and not self.step.stopping
            and (best := self.best_checkpoint) is not None
        ):
            self.state.load(best)

    def _take_all(self, source: StepSource, name: str) -> TakenSteps:
        """Run the steps of a source.

        Each counts as a call of the function `name`, which all ranks make together.
        """
        clock, beat, taken = self.step.clock, self.heartbeat.beat, iter(source)
        clock.enter("data")
        beat(self.step.progress.step + 1, "first")
        with waits_counted(clock):
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
        if self._data_are_new:
            self._data_are_new = False
            self.step.reads_tokens = self.step.reads_tokens or holds_token_ids(
                batches.mine[0].batch
            )
        self.modes.before_step()
        if self.loss_check.left:
            self.loss_check.before_step(batches.mine, batches.num_micro_batches, batches.step)
        with self.current_run.around_step() if self.current_run is not None else nullcontext():
            record = self.step.run(
                batches.mine, batches.num_micro_batches, batches.samples, epoch=batches.epoch
            )
        self.state.source, self.state.ended_epoch = source.state_dict(), batches.last_of_epoch
        self.last_record = record
        return record

    def _open_source(self, data: Any, epochs: int | None) -> tuple[StepSource, int | None]:
        """Return the remaining steps, and the number of the last one, if it is known."""
        self._data_are_new = True
        self.cluster.check()
        self.check_trains()
        self._report("data", lambda: no_effect.beside_data(self.config, data))
        setup.require_one_length(self.config, epochs)
        self._adopt_batch_size(data)
        source, total = setup.open_source(
            data,
            self.config,
            self.placed,
            epochs=epochs,
            global_batch_size=self.global_batch_size,
            start_step=self.step.progress.step,
            position=self.state.source,
        )
        self.data_workers = setup.data_workers(data, self.config)
        self.state.steps_per_epoch = source.steps_per_epoch
        if self._resumed_from is not None and not self.config.checkpoint.allow_changes:
            found, self._resumed_from = self._resumed_from, None
            require_same_epoch(source, self.global_batch_size, found)
        own_optimizer = not self.scales_rate
        schedule = self.user_schedule or setup.schedule_over(
            self.config.training, total, own_optimizer=own_optimizer
        )
        self.step.plan_run(total, schedule)
        if line := no_effect.unused_of_loader(data):
            self._start_lines.append(f"warning: {line}")
        if source.notice:
            self._start_lines.append(source.notice)
        return source, total

    def check_trains(self) -> None:
        """Raise a UsageError if all of the model was frozen, and is so still.

        A pipeline's stage may be.
        """
        if self._is_frozen:
            arguments.check_trains(self.placed.parameters)

    def _adopt_batch_size(self, data: Any) -> None:
        """Use a DataLoader's own batch size, if the settings have none.

        The learning rate follows its rule.
        """
        config = setup.with_batch_size_of(data, self.config)
        if config is self.config:
            return
        self.config = config
        if self.scales_rate:
            rate, self.rate_line = scaled_learning_rate(config.training, self.global_batch_size)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] = rate

    @called_by_all_ranks
    def training_step(self, batch: Any) -> Tensor:
        """Run forward and backward of one micro-batch of this rank.

        Return its mean loss, 0-dim, detached.

        The last one of a step updates. A step has `gradient_accumulation_steps` calls, or those
        that fill a `global_batch_size`; ranks must make the same number of calls.

        With an `output_dir` the first call resumes by `checkpoint.resume`, and each update is
        recorded, and saved when that is due. Data and their position are the caller's:
        `step.progress.step` says how many steps were made. The loop ends where `done` is true.
        """
        with self._bad_numbers_recorded():
            loss, record = self._window.add(batch)
            self._after_update(record)
        return loss

    @contextmanager
    def _bad_numbers_recorded(self) -> Iterator[None]:
        """Record bad numbers that end the caller's loop of `training_step`."""
        try:
            yield
        except BadNumbersError as error:
            if self.current_run is not None:
                self.current_run.report_and_finish(error)
            raise

    def _after_update(self, record: StepRecord | None) -> None:
        if record is not None:
            self.last_record = record
            assert self.current_run is not None
            self.current_run.after_update(record)

    def begin_training_steps(self, batch: Any) -> None:
        """Do what comes before the first step of a caller's own loop: resume, and open the run.

        All ranks call it.
        """
        self._adopt_batch_size([batch])
        self._begin([batch], no_effect.TRAINING_STEP)
        training = self.config.training
        own_optimizer = not self.scales_rate
        total = training.max_steps
        schedule = self.user_schedule or setup.schedule_over(
            training, total, own_optimizer=own_optimizer
        )
        self.step.plan_run(total, schedule)
        self._open_run(total, progress=None if self.run_directory is not None else False)

    @called_by_all_ranks
    def flush(self) -> None:
        """Train on an incomplete window of `training_step`, weighted by its contents.

        All ranks call it together.
        """
        with self._bad_numbers_recorded():
            self._after_update(self._window.flush())

    @overload
    def evaluate(self, val_data: Any, *, counts: bool = True) -> float: ...
    @overload
    def evaluate(
        self, val_data: Any, metrics: Metrics, *, counts: bool = True
    ) -> dict[str, Any]: ...
    @called_by_all_ranks
    def evaluate(
        self, val_data: Any, metrics: Metrics | None = None, *, counts: bool = True
    ) -> float | dict[str, Any]:
        """Return the mean loss over `val_data`, and metrics.

        All ranks call it, and get the same numbers.

        Each sample counts once on any number of ranks and under every strategy. With
        `training.eval_batches` it is over that many micro-batches.

        In and after a loop of the caller's own (`steps`, `training_step`) an evaluation counts,
        like those of `train`: it is recorded as `eval_loss` and `eval_NAME`; `keep_best`,
        `early_stopping` and a ReduceLROnPlateau follow it.

        Args:
            metrics: by name, functions `(outputs, targets) -> values`, whose mean is the metric; or
                objects with `update` and `compute`, as torchmetrics has them. Outputs are the
                model's, or their member `logits`. Objects are updated on rank 0, to which the
                outputs are sent.
            counts: False for data that are not to be followed, such as a test set.

        Returns:
            the loss, weighted by valid targets; with `metrics` a dict of `loss` and the values by
            name.
        """
        arguments.check_metrics(metrics, "Trainer.evaluate")
        self._settle()
        self._report("validation", lambda: no_effect.of_validation(self.config, val_data))
        found = evaluated(self, val_data, metrics)
        if counts and self.current_run is not None and self.current_run.in_callers_loop:
            self.current_run.add_evaluation(found)
        return float(found["loss"]) if metrics is None else found

    @called_by_all_ranks
    def predict(self, data: Any, transform: Callable[[Any], Any] | None = None) -> Any:
        """Return the model's outputs for each sample of `data`, in its order.

        All ranks call it, and get all of them.

        Args:
            data: a dataset, a DataLoader, or an iterable of batches. Targets are not needed, and
                not used.
            transform: applied to the outputs of each micro-batch before they are sent to the other
                ranks: `lambda outputs: outputs.argmax(-1)`.

        Returns:
            tensors on the CPU, in the structure of the model's outputs (or of their member
            `logits`). Where samples have different shapes, a list of tensors, one for each sample.
        """
        return predicted(self, data, transform)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log values of your own where `monitor.sinks` says.

        What rank 0 passes counts, and no rank waits.

        Args:
            values: by name: a number; a text; a tensor or array of one dim (a histogram), [H, W],
                [C, H, W] or [N, C, H, W] (an image, floats from 0 to 1 or bytes), an image of
                Pillow, a figure of Matplotlib.
            step: unset: the last step.

        Raises:
            UsageError: a value is of another kind.
        """
        if self.is_main_process:
            # nothing is recorded: one for `log` alone, until the process ends
            if self._monitor is None:
                if self.run_directory is not None:
                    self.run_directory.create()
                self._monitor = Monitor(self.config.monitor, self.run_directory, is_main=True)
                atexit.register(self._monitor.close)
            lost = self._monitor.on_log(self.step.progress.step if step is None else step, values)
            if lost and "log" not in self._reported:
                self._reported.add("log")
                no_effect.warn(no_effect.of_log(lost, records=self.run_directory is not None))

    @called_by_all_ranks
    def save_checkpoint(
        self,
        path: str | Path | None = None,
        include_optimizer: bool = True,
        metadata: dict[str, Any] | None = None,
    ) -> checkpoint.CheckpointPath:
        """Write the checkpoint `path/step-00000100`, and return it; all ranks call it.

        On return it is complete.

        `checkpoint.format` and `retries` apply. An older checkpoint of the same step stays, under
        another name.

        Args:
            path: a folder; unset: among the run's own checkpoints, of which `save_total_limit` are
                kept.
            include_optimizer: False: a run can't go on from it, its weights can be used.
            metadata: further data for `load_checkpoint` to return; JSON.

        Raises:
            BadNumbersError: the last step's numbers are bad; on a GPU they are read only here.
            UsageError: there is no path and no `output_dir`.
        """
        self._window.warn_of_open_step("the checkpoint")
        self.step.flush()
        snapshot = self.snapshot(include_optimizer=include_optimizer, metadata=metadata)
        own = self.checkpoints
        if path is None and own is None:
            raise UsageError(
                "save_checkpoint() has no folder to write to", fix="give it a path, or output_dir=…"
            )
        if path is None or (own is not None and is_same_folder(own, path)):
            if self.current_run is not None:
                return self.current_run.checkpointer.save_as_asked(snapshot)
            monitor = Monitor(
                MonitorConfig(sinks=[]), self.run_directory, is_main=self.is_main_process
            )
            return Checkpointer(self, monitor).save_as_asked(snapshot)
        config, text = self.config.checkpoint, self.config.to_yaml()
        options = checkpoint.SaveOptions(config.format, config.retries, sets_aside=True)
        folder = local_path(path, "save_checkpoint")
        return checkpoint.save(
            folder, self.step.progress.step, snapshot, config_yaml=text, options=options
        )

    def snapshot(
        self, *, include_optimizer: bool = True, metadata: dict[str, Any] | None = None
    ) -> Snapshot:
        """Return a checkpoint's contents for the current state, with the live tensors."""
        self.modes.eval()
        facts = {
            "seed": self.config.training.seed,
            "layout": str(self.layout),
            "workers": self.layout.workers,
            "global_batch_size": self.global_batch_size,
        }
        if any(getattr(call, "evaluates", False) for call in self.step.after_update):
            facts["evaluated"] = AVERAGE  # whose weights count
        return self.state.snapshot(facts, metadata or {}, include_optimizer=include_optimizer)

    @called_by_all_ranks
    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's parameters and persistent buffers, whole, on the CPU, for its plain `load_state_dict`.

        All of them are on rank 0; other ranks get none, since they would fill the host's memory.
        They are the weights that `evaluate` sees: the average's of a
        `WeightAverage(evaluate=True)`. Names that begin with `loss_fn.` are of a loss function that
        has weights of its own (docs/how_to/loss.md).
        """
        self.modes.eval()
        with evaluated_weights(self):
            return plain_state_dict(self.placed)

    @called_by_all_ranks
    def load_checkpoint(self, path: str | Path) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint of any strategy and number of ranks; return its step, and its metadata.

        All ranks call it.

        The path is a checkpoint, or a folder of them, whose newest complete one is loaded. Settings
        are compared with those of the checkpoint, as in `resume`: changed rates apply, and another
        training is refused.
        """
        found = find(self, str(path), "load_checkpoint")
        if found is None:
            what = f"there is no checkpoint in {path}"
            raise UsageError(
                what, fix="give a checkpoint, a run directory or its folder checkpoints/"
            )
        self._start_is_decided, self._resumed_from = True, found
        metadata, log_lines = load(self, found)
        self._start_lines += log_lines
        return self.step.progress.step, metadata

    @called_by_all_ranks
    def resume(self, how: str) -> checkpoint.CheckpointPath | None:
        """Resume from the run directory's newest complete checkpoint (`auto`), nowhere (`never`) or a path; return it.

        Without this call a run resumes by `checkpoint.resume` at its first step.
        """
        if self.config.checkpoint.resume == "never" != how:
            what, fix = (
                f"checkpoint.resume is never, and resume({how!r}) is called",
                "write one of the two",
            )
            raise UsageError(what, where="checkpoint.resume", fix=fix)
        return self.go_on_from(how)

    def go_on_from(self, how: str) -> checkpoint.CheckpointPath | None:
        """Resume as `resume` does.

        Ranks that a launcher has started again go on from what this launch has saved.
        """
        whole_run.lock_run_directory(self)
        self._resumed_from, log_lines = resume(self, after_restart(self, how))
        self._start_is_decided = True
        self._start_lines += log_lines
        return self._resumed_from

    @property
    def best_checkpoint(self) -> checkpoint.CheckpointPath | None:
        """The best checkpoint by `checkpoint.keep_best`, if there is one.

        All ranks ask for it together.
        """
        directory, folder, config = self.run_directory, self.checkpoints, self.config.checkpoint
        if folder is None or directory is None:
            return None
        return checkpoint.Ranks().broadcast(
            "the checkpoints could not be read",
            lambda: best_of(folder, config, evaluations(directory, config.keep_best)),
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest metrics, by the names in `checkpoint.keep_best`."""
        return self.state.metrics

    @cached_property
    def storage_is_shared(self) -> bool:
        """Return whether all ranks see the same folder of checkpoints.

        UsageError if not, and their format needs it.
        """
        folder, config = self.checkpoints, self.config.checkpoint
        if self.layout.world_size == 1 or folder is None or config.save_strategy == "none":
            return True
        shared = checkpoint.is_shared(folder)
        if not shared and config.format != "full":
            what = f"the hosts do not share {folder}"
            why = "each rank writes its part of a checkpoint, and they belong into one folder"
            fix = (
                "choose an --output-dir that all hosts mount, or checkpoint.format: full, which"
                " rank 0 writes"
            )
            raise UsageError(what, where="checkpoint.format: " + config.format, why=why, fix=fix)
        return shared

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
        return (
            training.global_batch_size
            or training.batch_size * self.layout.batch_shares * training.accumulation
        )

    def enable_gradient_checkpointing(self, mode: str = "full") -> None:
        """Recompute the activations of blocks in the backward pass from now on.

        "none" keeps them again.
        """
        training = self.config.training
        if training.compile:
            what = (
                "the blocks are compiled with the activation checkpointing that they were placed"
                " with"
            )
            fix = f"give it to the trainer: Trainer(…, gradient_checkpointing={mode!r})"
            raise UsageError(what, where="Trainer.enable_gradient_checkpointing", fix=fix)
        for part in self.placed.parts:
            if mode != "none":
                switch_cache_off(part, blocks_of(part))
            every = training.gradient_checkpointing_every
            apply_activation_checkpointing(
                blocks_of(part), mode, self.placed.random_state, every=every
            )
        self.config = self.config.replaced({"training.gradient_checkpointing": mode})

    @called_by_all_ranks
    def forward(self, *inputs: Any, **more: Any) -> Any:
        """Return the model's outputs in evaluation mode, without a graph.

        The same arguments on all ranks.
        """
        self.modes.eval()
        return sample(self.placed, 0, *inputs, **more)
