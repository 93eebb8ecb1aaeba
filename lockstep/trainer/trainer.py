"""Trains a model with an optimizer and data (`Trainer`).

It trains a full run in one call, step by step, or one micro-batch at a time.

Tests: tests/trainer/test_trainer.py, tests/trainer/test_cost_of_a_step.py
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, overload

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import checkpoint
from lockstep.bad_numbers import BadNumbersError
from lockstep.config import Config
from lockstep.config.names import advice_for_method
from lockstep.errors import NoEffectWarning, UsageError, warn_at_caller
from lockstep.heartbeat.writer import called_by_all_ranks, own_heartbeat, tell_call
from lockstep.models.hf_cache import switch_cache_off
from lockstep.models.protocol import blocks_of
from lockstep.parallel.execution.activation import apply_activation_checkpointing
from lockstep.precision import LossScale
from lockstep.run_directory.records import StepRecord
from lockstep.trainer import arguments, no_effect, saved_state, start_lines
from lockstep.trainer.assembly import TrainerArguments, assemble, settings_and_callbacks
from lockstep.trainer.caller_batches import StepWindow
from lockstep.trainer.checkpointer import best_checkpoint, save_elsewhere
from lockstep.trainer.evaluation import sample
from lockstep.trainer.evaluator import Evaluator, evaluated, evaluated_weights, predicted
from lockstep.trainer.metrics import Metrics
from lockstep.trainer.open_run import OpenRun
from lockstep.trainer.optimizer_setup import AfterUpdate, MakeOptimizer, MakeScheduler
from lockstep.trainer.plain_state import plain_state_dict
from lockstep.trainer.run_end import closed_at_exit
from lockstep.trainer.run_start import RunStart
from lockstep.trainer.settings import TrainerSettings


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

    # what to do where there is none and a setting asks for evaluations
    advice_on_validation: ClassVar[str] = "pass val_data to train(…)"

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
        given = TrainerArguments(
            model,
            optimizer,
            loss_fn,
            scheduler,
            scheduler_metric,
            config,
            output_dir,
            after_update,
            freeze_until,
        )
        given.check()
        methods = (Trainer.train, Trainer.steps, Trainer.evaluate, Trainer.predict)
        by_key, callbacks = settings_and_callbacks(given, settings, methods)
        self.state = assemble(given, by_key)

        self.device = self.state.cluster.device
        self.layout = self.state.layout
        self.step = self.state.step
        self.placed = self.step.placed
        self.optimizer = self.step.optimizer
        self.loss_check = self.state.loss_check

        self._start = RunStart(self.state)
        self._window = StepWindow(self.state)
        self._open = OpenRun(self.state, self._start, callbacks, self._window.open_step)
        self._is_looping = False  # in `train`, or in a loop over `steps` that has not ended

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
        state = self.state
        with ExitStack() as ending:
            ending.enter_context(self._only_loop("Trainer.train"))
            tell_call("Trainer.train")
            self._open.close()
            ending.callback(state.output.release)
            advice = self.advice_on_validation
            self._start.report(
                "validation", lambda: no_effect.of_validation(state.config, val_data, advice)
            )
            if metrics is not None and val_data is None:
                warn_at_caller(
                    f"metrics= means nothing without validation data: {advice}", NoEffectWarning
                )
            state.results.check_names(metrics, evaluates=val_data is not None, advice=advice)

            self._start.begin(train_data)
            source, total = self._start.open_data(train_data, epochs)
            evaluator = Evaluator(state, val_data, metrics)
            lines = [
                *self._start.take_lines(),
                *start_lines.nothing_to_do(state, total),
                *evaluator.too_few(total),
            ]
            run, evaluations = self._open.for_train(total, lines, evaluator)
            ending.callback(self._open.close)

            evaluations.catch_up()
            begun = self.step.progress.step
            record = None
            steps = run.steps(source, lambda: self._start.open_data(train_data, epochs)[0], "train")
            for newest in ending.enter_context(closing(steps)):
                record = newest or record  # None: the data of a step were skipped
            if self.step.progress.step > begun:
                evaluations.at_end()
            run.finish(took_steps=record is not None)

            state.modes.eval()
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
            ending.enter_context(self._only_loop("Trainer.steps"))
            ending.callback(self.state.output.release)
            tell_call("Trainer.steps")
            self._start.begin(train_data, no_effect.STEPS)
            source, total = self._start.open_data(train_data, epochs)
            if line := start_lines.no_step_left(self.state, total):
                warn_at_caller(line)
            run = self._open.for_callers_loop(total, progress)
            steps = run.steps(source, lambda: self._start.open_data(train_data, epochs)[0], "steps")
            for record in ending.enter_context(closing(steps)):
                if record is not None:
                    # the caller may take any time
                    own_heartbeat().beat(self.step.progress.step, "pause")
                    yield record
            is_last = epochs is None or self.state.was_stopped
            run.end_loop(is_last=is_last)
            if is_last:
                self._load_best()

    @contextmanager
    def _only_loop(self, name: str) -> Iterator[None]:
        """Refuse a loop inside of another one: their steps would not be those of other ranks.

        It is refused before other ranks are asked for anything: they may not be in it.
        """
        if self._is_looping:
            raise UsageError(
                f"{name} is called while a loop over the steps of the same trainer has not ended",
                where=name,
                why="a trainer takes its steps one after another, on all ranks together, and two"
                " loops would take each other's",
                fix="let the first loop end, or leave it (`break`, or close() of its iterator), or"
                " train another model in a Trainer of its own",
            )
        self._is_looping = True
        try:
            yield
        finally:
            self._is_looping = False

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

    def _load_best(self) -> None:
        if not self.config.checkpoint.load_best or self.step.stopping:
            return
        best = self.best_checkpoint
        if best is not None:
            saved_state.load(self.state, best)

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
                self._consume(record)
        return loss

    @contextmanager
    def _bad_numbers_recorded(self) -> Iterator[None]:
        """Record bad numbers that end the caller's loop of `training_step`."""
        try:
            yield
        except BadNumbersError as error:
            if self._open.current is not None:
                self._open.current.report_and_finish(error)
            raise

    def _consume(self, record: StepRecord) -> None:
        assert self._open.current is not None
        self._open.current.after_update(record)

    def _begin_training_steps(self, batch: Any) -> None:
        """Resume and open the run, before the first step of a loop of `training_step`."""
        self.state.adopt_batch_size([batch])
        self._start.begin([batch], no_effect.TRAINING_STEP)
        total = self.config.training.max_steps
        self.state.plan_steps(total)
        progress = None if self.state.output.directory is not None else False
        self._open.for_callers_loop(total, progress)

    @called_by_all_ranks
    def flush(self) -> None:
        """Train on an incomplete window of `training_step`, weighted by its contents.

        All ranks call it together.
        """
        with self._bad_numbers_recorded():
            record = self._window.flush()
            if record is not None:
                self._consume(record)

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
        run = self._open.current
        if run is not None:
            run.settle()
        advice = self.advice_on_validation
        self._start.report(
            "validation", lambda: no_effect.of_validation(self.config, val_data, advice)
        )
        values = evaluated(self.state, val_data, metrics)
        if counts and run is not None and run.in_callers_loop:
            run.add_evaluation(values)
        return float(values["loss"]) if metrics is None else values

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
            self._open.log(values, self.step.progress.step if step is None else step)

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
            return self._open.checkpointer().save_as_asked(contents)
        return save_elsewhere(self.state, path, contents)

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

        The path is a checkpoint, or a folder of them, whose newest complete one is loaded; or the
        URL of a run in a bucket, or of one of its checkpoints. Settings are compared with those of
        the checkpoint, as in `resume`: changed rates apply, and another training is refused.
        """
        metadata = self._start.load(str(path))
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
        return self._start.go_on_from(how)

    @property
    def best_checkpoint(self) -> checkpoint.CheckpointPath | None:
        """The best checkpoint by `checkpoint.keep_best`, if there is one.

        All ranks ask for it together.
        """
        return best_checkpoint(self.state)

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
