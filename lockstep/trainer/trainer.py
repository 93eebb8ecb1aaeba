"""Trains a model with an optimizer and data (`Trainer`).

It trains a full run in one call, step by step, or one micro-batch at a time.

Tests: tests/trainer/test_trainer.py, tests/trainer/test_cost_of_a_step.py
"""

import atexit
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import checkpoint, cluster
from lockstep.bad_numbers import AnomalyDetector, BadNumbersError
from lockstep.config import Config, MonitorConfig, apply_flags
from lockstep.config.checks import launch_contradictions
from lockstep.config.names import advice_for_method
from lockstep.data import StepSource
from lockstep.errors import UsageError, refuse
from lockstep.heartbeat.writer import called_by_all_ranks, own_heartbeat, write_limits
from lockstep.mesh import layout_of
from lockstep.models.hf_cache import switch_cache_off
from lockstep.models.protocol import blocks_of, objective_of
from lockstep.monitor import Monitor
from lockstep.monitor.callbacks import understood
from lockstep.optim import PlateauSchedule
from lockstep.parallel.activation import apply_activation_checkpointing
from lockstep.parallel.loss_weights import refuse_hidden
from lockstep.parallel.place import place
from lockstep.paths import local_path
from lockstep.precision import LossScale, Precision, loss_scale_for, resolve_mode
from lockstep.records import StepRecord
from lockstep.step import Step
from lockstep.trainer import (
    arguments,
    data_setup,
    no_effect,
    optimizer_setup,
    resume,
    run_monitor,
    saved_state,
    start_lines,
)
from lockstep.trainer.caller_batches import StepWindow
from lockstep.trainer.changed_settings import require_same_epoch
from lockstep.trainer.checkpointer import Checkpointer, best_of, evaluations
from lockstep.trainer.evaluation import sample
from lockstep.trainer.evaluator import Evaluator, evaluated, evaluated_weights, predicted
from lockstep.trainer.flight_dump import dump_collectives_on_request
from lockstep.trainer.loss_check import LossCheck
from lockstep.trainer.metrics import Metrics
from lockstep.trainer.modes import Modes
from lockstep.trainer.named_loss import loss_fn_of
from lockstep.trainer.optimizer_setup import AfterUpdate, MakeOptimizer, MakeScheduler
from lockstep.trainer.plain_state import plain_state_dict
from lockstep.trainer.results import Results
from lockstep.trainer.run_end import closed_at_exit
from lockstep.trainer.run_output import RunOutput
from lockstep.trainer.run_state import RunState
from lockstep.trainer.settings import TrainerSettings, with_settings
from lockstep.trainer.train_loop import TrainLoop
from lockstep.trainer.training_run import TrainingRun
from lockstep.trainer.whole_batch import WholeBatch, with_whole_batch_loss


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
            own["optimizer"] = optimizer
            optimizer = None
        self._callbacks = [
            one for one in own.get("callbacks") or () if not isinstance(one, str | Mapping)
        ]
        if self._callbacks:
            own["callbacks"] = [one for one in own["callbacks"] if isinstance(one, str | Mapping)]
        for callback in self._callbacks:
            understood(callback)
        arguments.check_settings(
            own, (Trainer.train, Trainer.steps, Trainer.evaluate, Trainer.predict)
        )
        given = apply_flags(own)
        config = with_settings(config or Config(), given)
        asked = no_effect.asked_keys(config, given)

        here = cluster.setup(config.distributed)
        refuse(
            launch_contradictions(
                config,
                max_restarts=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
                several_machines=here.facts.num_nodes > 1,
            )
        )
        self.device = here.device
        self.layout = layout_of(config.distributed, here.facts)
        mode, why_mode = resolve_mode(config.precision.mode, here.device)
        loss_fn = loss_fn or loss_fn_of(config)
        objective = objective_of(model, loss_fn)
        before = optimizer_setup.Unplaced.of(model, objective, loss_fn)
        trained = {p for p in (*model.parameters(), *before.of_loss) if p.requires_grad}
        num_trained = sum(p.numel() for p in trained if not is_lazy(p))  # `place` refuses lazy ones
        precision = Precision(mode, here.device.type)
        placed = place(
            model,
            self.layout,
            config.step,
            device=here.device,
            precision=precision,
            objective=objective,
        )
        refuse_hidden(placed, before.hidden)
        if isinstance(loss_fn, WholeBatch):
            placed = with_whole_batch_loss(placed, loss_fn)
        self.placed = placed

        training = config.training
        own_optimizer = optimizer is not None
        batch = data_setup.global_batch_size(training, self.layout)
        self.optimizer, rate_line = optimizer_setup.make_optimizer(
            optimizer, before, placed, config, batch
        )
        modes = Modes(placed, self.optimizer)
        user_schedule = optimizer_setup.user_schedule(
            scheduler, self.optimizer, training, scheduler_metric
        )
        plateau = user_schedule if isinstance(user_schedule, PlateauSchedule) else None
        self.step = Step(
            placed,
            self.optimizer,
            user_schedule
            or optimizer_setup.schedule_before_data(training, own_optimizer=own_optimizer),
            training.gradient_clip,
            loss_scale_for(config.precision, mode),
            anomaly_detector=AnomalyDetector(training.bad_numbers),
            after_update=optimizer_setup.after_update_calls(after_update, freeze_until, placed),
            frozen_until=optimizer_setup.frozen_until(
                freeze_until or {}, list(before.names.values())
            ),
        )
        if plateau is None and scheduler_metric != "eval_loss":
            what = "scheduler_metric is for a ReduceLROnPlateau, and the trainer has none"
            fix = "leave it out"
            raise UsageError(what, where="Trainer(scheduler_metric=…)", fix=fix)

        self.loss_check = LossCheck(placed, compiled=training.compile, coarse=mode != "fp32")
        if isinstance(loss_fn, WholeBatch):
            self.loss_check.skip()
        self.state = RunState(
            config=config,
            asked=asked,
            cluster=here,
            output=RunOutput(output_dir, config.checkpoint, world_size=self.layout.world_size),
            step=self.step,
            modes=modes,
            loss_check=self.loss_check,
            results=Results(
                training.early_stopping,
                plateau,
                config.checkpoint.keep_best,
                config.checkpoint.keep_best_mode,
            ),
            mode=mode,
            why_mode=why_mode,
            num_trained=num_trained,
            user_schedule=user_schedule,
            own_optimizer=own_optimizer,
            rate_line=rate_line,
        )
        hang = config.distributed.hang
        seconds = config.distributed.timeout_seconds
        write_limits(hang.factor, hang.seconds, seconds)
        dump_collectives_on_request(own_heartbeat().folder, here.facts.rank)
        found = no_effect.of_trainer(
            config,
            self.layout,
            own_optimizer=own_optimizer,
            own_schedule=user_schedule is not None,
            has_directory=output_dir is not None,
            has_memory=self.state.output.memory is not None,
        )
        no_effect.report(found, asked, is_main=self.is_main_process)

        self._start_is_decided = False  # the run was resumed, loaded, or told to start afresh
        # until its data are compared with this run's
        self._resumed_from: checkpoint.CheckpointPath | None = None
        self._start_lines: list[str] = []  # to log at the start
        # the ways to train, and data, whose settings without effect were reported
        self._reported: set[str] = set()
        self._window = StepWindow(self.state)
        self._current: TrainingRun | None = None  # the run in progress, or the last
        self._monitor: Monitor | None = None  # that of the recorded run, or of `log` alone
        # that a loop which nothing records has not printed
        self._placement_warnings = placed.warnings()

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
        run = self.state
        with ExitStack() as ending:
            ending.callback(run.output.release)
            self._report("validation", lambda: no_effect.of_validation(run.config, val_data))
            if metrics is not None and val_data is None:
                no_effect.warn(
                    "metrics= means nothing without validation data: pass val_data to train(…)"
                )
            run.results.check_names(metrics, evaluates=val_data is not None)
            self._begin(train_data)
            source, total = self._open_source(train_data, epochs)
            evaluator = Evaluator(run, val_data, metrics)
            lines = [*self._start_lines, *start_lines.nothing_to_do(run, total, val_data)]
            if line := evaluator.too_few(total):
                lines.append(line)
            monitor, around_step = run_monitor.open_monitor(run, total, lines, self._callbacks)
            self._monitor = monitor
            self._start_lines = []
            ending.callback(self._close_run)
            self._current = TrainingRun(run, monitor, around_step)
            steps = self._current.steps(
                source, total, lambda: self._open_source(train_data, epochs)[0], "train"
            )
            record = TrainLoop(run, self._current, evaluator).to_end(steps)
            run.modes.eval()
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

    @closed_at_exit
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
            ending.callback(self.state.output.release)
            self._begin(train_data, no_effect.STEPS)
            source, total = self._open_source(train_data, epochs)
            if line := start_lines.no_step_left(self.state, total):
                warnings.warn(line, stacklevel=2)
            run = self._open_run(total, progress)
            steps = run.steps(
                source, total, lambda: self._open_source(train_data, epochs)[0], "steps"
            )
            for taken in ending.enter_context(closing(steps)):
                if taken.record is not None:
                    # the caller may take any time
                    own_heartbeat().beat(self.step.progress.step, "pause")
                    yield taken.record
            is_last = epochs is None or self.state.was_stopped
            run.end_loop(is_last=is_last)
            if is_last:
                self._load_best()

    @property
    def done(self) -> bool:
        """Return whether the run has come to its end.

        The end is its last step, an early stop, or a request to stop.
        """
        return self.state.done

    @property
    def config(self) -> Config:
        """The whole config, with the batch size that the data have brought."""
        return self.state.config

    @property
    def last_record(self) -> StepRecord | None:
        """The record of the newest step; None before the first."""
        return self.state.results.last_record

    def _report(self, where: str, found: Callable[[], Iterable[no_effect.NoEffect]]) -> None:
        """Report settings without effect somewhere, once."""
        if where not in self._reported:
            self._reported.add(where)
            no_effect.report(found(), self.state.asked, is_main=self.is_main_process)

    def _begin(self, data: Any, where: str | None = None) -> None:
        """Lock the run directory, and resume by `checkpoint.resume` before the first step.

        All ranks call it.

        `where` names the way to train in messages about settings that have no effect in it; None:
        `train`.
        """
        if where is not None:
            self._report(where, lambda: no_effect.of_way(self.config, where))
        self.state.output.acquire()
        if self._start_is_decided or self.step.progress.step:
            return
        self.state.adopt_batch_size(data)
        how = self.config.checkpoint.resume
        if self.state.output.directory is not None or how not in ("auto", "never"):
            self.go_on_from(how)

    def _open_run(self, total: int | None, progress: bool | None) -> TrainingRun:
        """Return the run of a loop of the caller's own: the open one, or a new one."""
        current = self._current
        state = self.state
        if current is not None and current.is_recorded and not current.is_closed:
            current.settle()
            current.monitor.go_on_to(total)
            return current
        self._close_run()
        lines = self._start_lines
        self._start_lines = []
        around_step: run_monitor.AroundStep = nullcontext
        is_recorded = run_monitor.records_steps(state, self._callbacks)
        if is_recorded:
            prints = progress is not False
            monitor, around_step = run_monitor.open_monitor(
                state, total, lines, self._callbacks, prints=prints
            )
            self._monitor = monitor
        else:
            monitor = run_monitor.open_bar(state, total, progress)
            if not progress:
                self._report("log_steps", no_effect.of_unrecorded_loop)
            idle = start_lines.idle_ranks(state)
            if idle and self.is_main_process:
                warnings.warn(idle, stacklevel=3)
        run = TrainingRun(
            state,
            monitor,
            around_step,
            in_callers_loop=True,
            is_recorded=is_recorded,
            open_step=self._window.open_step,
        )
        self._current = run
        if not is_recorded:
            warnings_of_placement = self._placement_warnings
            self._placement_warnings = []
            run.say(*warnings_of_placement, *lines)
        return run

    def _close_run(self) -> None:
        """Close the monitor of an earlier loop, or of `log` alone."""
        if self._current is not None:
            self._current.close()
        if self._monitor is not None:
            self._monitor.close()
        self._monitor = None

    def _load_best(self) -> None:
        if not self.config.checkpoint.load_best or self.step.stopping:
            return
        best = self.best_checkpoint
        if best is not None:
            saved_state.load(self.state, best)

    def _open_source(self, data: Any, epochs: int | None) -> tuple[StepSource, int | None]:
        """Return the remaining steps, and the number of the last one, if it is known."""
        run = self.state
        run.check_can_train()
        self._report("data", lambda: no_effect.beside_data(run.config, data))
        data_setup.require_one_length(run.config, epochs)
        run.adopt_batch_size(data)
        source, total = data_setup.open_source(
            data,
            run.config,
            self.placed,
            epochs=epochs,
            global_batch_size=run.global_batch_size,
            start_step=self.step.progress.step,
            position=run.position,
        )
        run.adopt_source(source, data_setup.data_workers(data, run.config))
        if self._resumed_from is not None and not run.config.checkpoint.allow_changes:
            found = self._resumed_from
            self._resumed_from = None
            require_same_epoch(source, run.global_batch_size, found)
        run.plan_steps(total)
        if line := no_effect.unused_of_loader(data):
            self._start_lines.append(f"warning: {line}")
        if source.notice:
            self._start_lines.append(source.notice)
        return source, total

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
            loss, record = self._window.add(batch, self._begin_training_steps)
            if record is not None:
                self._record_update(record)
        return loss

    @contextmanager
    def _bad_numbers_recorded(self) -> Iterator[None]:
        """Record bad numbers that end the caller's loop of `training_step`."""
        try:
            yield
        except BadNumbersError as error:
            if self._current is not None:
                self._current.report_and_finish(error)
            raise

    def _record_update(self, record: StepRecord) -> None:
        assert self._current is not None
        self._current.after_update(record)

    def _begin_training_steps(self, batch: Any) -> None:
        """Resume and open the run, before the first step of a loop of `training_step`."""
        self.state.adopt_batch_size([batch])
        self._begin([batch], no_effect.TRAINING_STEP)
        total = self.config.training.max_steps
        self.state.plan_steps(total)
        self._open_run(total, progress=None if self.state.output.directory is not None else False)

    @called_by_all_ranks
    def flush(self) -> None:
        """Train on an incomplete window of `training_step`, weighted by its contents.

        All ranks call it together.
        """
        with self._bad_numbers_recorded():
            record = self._window.flush()
            if record is not None:
                self._record_update(record)

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
        if self._current is not None:
            self._current.settle()
        self._report("validation", lambda: no_effect.of_validation(self.config, val_data))
        found = evaluated(self.state, val_data, metrics)
        if counts and self._current is not None and self._current.in_callers_loop:
            self._current.add_evaluation(found)
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
        return predicted(self.state, data, transform)

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
                directory = self.state.output.directory
                if directory is not None:
                    directory.create()
                self._monitor = Monitor(self.config.monitor, directory, is_main=True)
                atexit.register(self._monitor.close)
            lost = self._monitor.on_log(self.step.progress.step if step is None else step, values)
            if lost and "log" not in self._reported:
                self._reported.add("log")
                no_effect.warn(
                    no_effect.of_log(lost, records=self.state.output.directory is not None)
                )

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
        contents = saved_state.snapshot(
            self.state, include_optimizer=include_optimizer, metadata=metadata
        )
        output = self.state.output
        if path is None and output.checkpoints is None:
            raise UsageError(
                "save_checkpoint() has no folder to write to", fix="give it a path, or output_dir=…"
            )
        if path is None or output.keeps(path):
            if self._current is not None:
                return self._current.checkpointer.save_as_asked(contents)
            monitor = Monitor(
                MonitorConfig(sinks=[]), output.directory, is_main=self.is_main_process
            )
            return Checkpointer(self.state, monitor).save_as_asked(contents)
        config = self.config.checkpoint
        text = self.config.to_yaml()
        options = checkpoint.SaveOptions(config.format, config.retries, sets_aside=True)
        folder = local_path(path, "save_checkpoint")
        return checkpoint.save(
            folder, self.step.progress.step, contents, config_yaml=text, options=options
        )

    @called_by_all_ranks
    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's parameters and persistent buffers, gathered on the CPU.

        The plain model's `load_state_dict` takes them.

        All of them are on rank 0; other ranks get none, since they would fill the host's memory.
        They are the weights that `evaluate` sees: the average's of a
        `WeightAverage(evaluate=True)`. Names that begin with `loss_fn.` are of a loss function that
        has weights of its own (docs/how_to/loss.md).
        """
        with evaluated_weights(self.state):
            return plain_state_dict(self.placed)

    @called_by_all_ranks
    def load_checkpoint(self, path: str | Path) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint of any strategy and number of ranks; return its step, and its metadata.

        All ranks call it.

        The path is a checkpoint, or a folder of them, whose newest complete one is loaded. Settings
        are compared with those of the checkpoint, as in `resume`: changed rates apply, and another
        training is refused.
        """
        found = resume.find(self.state.output, str(path), "load_checkpoint")
        if found is None:
            what = f"there is no checkpoint in {path}"
            raise UsageError(
                what, fix="give a checkpoint, a run directory or its folder checkpoints/"
            )
        self._start_is_decided = True
        self._resumed_from = found
        metadata, log_lines = resume.load(self.state, found)
        self._start_lines += log_lines
        return self.step.progress.step, metadata

    @called_by_all_ranks
    def resume(self, how: str) -> checkpoint.CheckpointPath | None:
        """Resume from the run directory's newest complete checkpoint, a path, or nowhere.

        `how` is `auto` (the newest complete checkpoint), `never` (nowhere) or a path. Returns the
        checkpoint, or None.

        Without this call a run resumes by `checkpoint.resume` at its first step.
        """
        if self.config.checkpoint.resume == "never" != how:
            what = f"checkpoint.resume is never, and resume({how!r}) is called"
            fix = "write one of the two"
            raise UsageError(what, where="checkpoint.resume", fix=fix)
        return self.go_on_from(how)

    def go_on_from(self, how: str) -> checkpoint.CheckpointPath | None:
        """Resume as `resume` does.

        Ranks that a launcher has started again go on from what this launch has saved.
        """
        output = self.state.output
        output.acquire()
        how = resume.after_restart(output, how)
        self._resumed_from, log_lines = resume.resume(self.state, how)
        self._start_is_decided = True
        self._start_lines += log_lines
        return self._resumed_from

    @property
    def best_checkpoint(self) -> checkpoint.CheckpointPath | None:
        """The best checkpoint by `checkpoint.keep_best`, if there is one.

        All ranks ask for it together.
        """
        config = self.config.checkpoint
        output = self.state.output
        directory = output.directory
        folder = output.checkpoints
        if folder is None or directory is None:
            return None
        return checkpoint.Ranks().broadcast(
            "the checkpoints could not be read",
            lambda: best_of(folder, config, evaluations(directory, config.keep_best)),
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest metrics, by the names in `checkpoint.keep_best`."""
        return self.state.results.metrics

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""
        return self.state.is_main_process

    @property
    def scaler(self) -> LossScale:
        """The loss scale of fp16; one that stays at 1 otherwise."""
        return self.step.loss_scale or LossScale(dynamic=False, initial_scale=1.0)

    @property
    def global_batch_size(self) -> int:
        """Samples in a full step, over all ranks."""
        return self.state.global_batch_size

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
        self.state.change_settings({"training.gradient_checkpointing": mode})

    @called_by_all_ranks
    def forward(self, *inputs: Any, **more: Any) -> Any:
        """Return the model's outputs in evaluation mode, without a graph.

        The same arguments on all ranks.
        """
        self.state.modes.eval()
        return sample(self.placed, 0, *inputs, **more)
