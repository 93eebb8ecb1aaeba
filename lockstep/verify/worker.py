"""Takes the steps of a case in the processes that `configs.py` starts.

    one process     record    takes the reference's steps, and stores them in the case's folder
    each rank       compare   takes the topology's steps, and compares each with the stored one
    both            trainer_of   the trainer at the case's first step, with its experiments applied

`compare` gathers what ranks find after each step (`RankReport`); rank 0 writes the step's result.

Tests: tests/verify/test_command.py, tests/verify/test_reference.py
"""

import copy
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import CheckpointConfig, Config, MonitorConfig
from lockstep.data.batches import MicroBatch
from lockstep.errors import LockstepError, RunError, first_line
from lockstep.layout import SIZED
from lockstep.models.protocol import offered
from lockstep.monitor.figures import gather_objects
from lockstep.process_group import cluster, collectives
from lockstep.run_directory.records import StepRecord
from lockstep.strategy import EXPERT, SINGLE, parse_topology, strategy_named
from lockstep.tensors import local, shard_like, with_other_last_bits
from lockstep.torch_compat.pytree import tree_map_only
from lockstep.trainer import Trainer
from lockstep.verify import comparisons, experiments
from lockstep.verify.comparisons import MessageRounding, Tolerance
from lockstep.verify.differences import RankReport, StepResult, TensorDifference, combine_reports
from lockstep.verify.flow import FlowRecorder
from lockstep.verify.modes import CompleteSequences
from lockstep.verify.recorded_flow import load
from lockstep.verify.subject import MAIN, Case, Spec, VerifyJob
from lockstep.verify.trace import (
    BOUND,
    BUFFER,
    GRADIENT,
    VALUE,
    StepFacts,
    StepObserver,
    Stored,
    Trace,
)

_SIZES = tuple(f"distributed.{axis}_size" for axis in SIZED)
_FLOW = "flow.pt"  # file with what flowed through the reference
_SAMPLES = "samples.pt"  # file with its micro-batches
# Experiments in which the reference's gradients are others by design.
_OTHER_REFERENCES = frozenset({experiments.DOUBLE, experiments.PERTURB})


def settings_of(topology: str) -> dict[str, Any]:
    """Return the settings that a topology (`ddp:2`, `single`) changes in a config.

    Experts stay spread as the config has them, where the strategy can spread them.
    """
    values, _ = parse_topology(topology)
    strategy = strategy_named(values["strategy"])
    settings: dict[str, Any] = {
        **dict.fromkeys(_SIZES),
        **({} if strategy.goes_with(EXPERT) else {f"distributed.{EXPERT}_size": None}),
        "distributed.divergence_check_steps": None,  # it would stop the steps to compare
        **{f"distributed.{key}": value for key, value in values.items()},
    }
    if not strategy.in_buckets:
        settings["distributed.ddp.compression.kind"] = "none"
    return settings


def step_alone(config: Config) -> Config:
    """Return the config without what stands around the steps: records, checkpoints, evaluations."""
    bad_numbers = config.training.bad_numbers
    if bad_numbers.action == "rollback":  # it needs checkpoints
        bad_numbers = bad_numbers.model_copy(update={"action": "stop"})
    training = config.training.model_copy(
        update={
            "early_stopping": None,
            "bad_numbers": bad_numbers,
            "eval_steps": None,
            "eval_strategy": "steps",
        }
    )
    around = {
        "checkpoint": CheckpointConfig(allow_changes=True),
        "monitor": MonitorConfig(),
        "training": training,
    }
    return config.model_copy(update=around)


class PreparedTrainer(NamedTuple):
    """A trainer before the first step of a case."""

    trainer: Trainer
    data: Any  # the argument of `Trainer.steps`
    module_names: dict[int, str]  # id of a module → its name in the author's model


# ---- the reference ----


def record(spec: Spec, case: Case, folder: Path) -> None:
    """Take the steps of a case in this process alone, and store them."""
    began = time.monotonic()
    with trainer_of(spec, SINGLE, case, folder) as prepared:
        _record(prepared, case, folder, exact=spec.exact)
    (folder / case.name / "seconds").write_text(str(time.monotonic() - began))


def _record(prepared: PreparedTrainer, case: Case, folder: Path, *, exact: bool) -> None:
    """Take the steps of a case, and store what they compute; RunError if the data end before."""
    trainer = prepared.trainer
    trace = Trace(folder / case.name)
    trace.write(None, None, _state_of(trainer))
    flow = _FlowOfReference(prepared, case, folder) if experiments.FORCED in case.switches else None
    if experiments.SAMPLES in case.switches:
        _store_samples(trainer, trace.folder / _SAMPLES)
    observer = StepObserver(trainer, bounds=not exact, outputs=experiments.AGAIN in case.switches)
    if case.name == MAIN:
        trainer.save_checkpoint(trace.states)

    last = case.start - 1
    steps = islice(trainer.steps(prepared.data), case.steps)
    for step, step_record in enumerate(steps, start=case.start):
        bounds = observer.bounds(step_record)
        facts = _with_norms(observer.facts(step_record), observer.gradients, bounds, trainer)
        tensors = _named(GRADIENT, observer.gradients) | _named(BOUND, bounds)
        trace.write(step, facts, tensors | _state_of(trainer))
        if case.name == MAIN:
            trainer.save_checkpoint(trace.states)
        last = step
    observer.close()
    if flow is not None:
        flow.store()
    if last + 1 < case.start + case.steps:
        text = f"the reference ended after {last + 1} of {case.steps} steps"
        why = "training.max_steps or training.num_train_epochs allows no more"
        raise RunError(text, why=why, fix=f"verify fewer steps: --steps {max(1, last + 1)}")


def _with_norms(
    facts: StepFacts,
    gradients: Mapping[str, Tensor],
    bounds: Mapping[str, Tensor],
    trainer: Trainer,
) -> StepFacts:
    """Return the facts of a step with the norms of its gradients and of their bounds.

    A parameter without a gradient has the norm 0.
    """
    norms = {name: float(gradient.double().norm()) for name, gradient in gradients.items()}
    for name in trainer.placed.parameters:
        norms.setdefault(name, 0.0)
    squared = sum(float(bound.double().square().sum()) for bound in bounds.values())
    elements = sum(bound.numel() for bound in bounds.values())
    return replace(facts, norms=norms, bound=squared**0.5, elements=elements)


class _FlowOfReference:
    """Records what flows through the reference's modules, for the experiments part by part.

    The case `FORCED` stores it. The case `NUDGED` runs with other last bits beside it, and stores
    how far each part moves by them: so far a part of a topology may deviate.
    """

    def __init__(self, prepared: PreparedTrainer, case: Case, folder: Path) -> None:
        self._path = folder / experiments.FORCED / _FLOW
        self._is_nudged = experiments.NUDGED in case.switches
        reference = load(self._path) if self._is_nudged else None
        self._recorder = FlowRecorder(
            prepared.trainer, prepared.module_names, reference, nudge=self._is_nudged
        )

    def store(self) -> None:
        """End recording, and write what was recorded."""
        self._recorder.finish()
        stored = self._recorder.stored
        if self._is_nudged:
            self._path.with_suffix(".bounds").write_bytes(pickle.dumps(stored.bounds))
        else:
            torch.save(vars(stored), self._path)


def _store_samples(trainer: Trainer, path: Path) -> None:
    """Write the micro-batches of each step to a file: index → batch."""

    def store(micro_batches: Sequence[MicroBatch]) -> None:
        samples = {micro_batch.index: micro_batch.batch for micro_batch in micro_batches}
        torch.save(samples, path)

    experiments.before_step(trainer, store)


def _state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the parameters and buffers by the names that they have in a trace."""
    placed = trainer.placed
    return _named(VALUE, placed.parameters) | _named(BUFFER, placed.buffers)


def _named(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


# ---- a topology's ranks ----


def compare(job: VerifyJob, case: Case) -> None:
    """Take the steps of a case on this rank, and compare; rank 0 writes the results."""
    results: list[StepResult] | str
    try:
        with trainer_of(job.spec, job.topology, case, job.folder) as prepared:
            results = list(_ComparedSteps(prepared, case, job.folder, exact=job.spec.exact))
    except LockstepError as error:
        if case.name == MAIN:
            raise
        results = first_line(error)  # the same on all ranks
    if collectives.is_main_process():
        job.results_of(case).write_bytes(pickle.dumps(results))
    if dist.is_initialized():
        dist.barrier()


class _ComparedSteps:
    """Takes the steps of a case on this rank; yields each step's result, combined over ranks."""

    def __init__(self, prepared: PreparedTrainer, case: Case, folder: Path, *, exact: bool) -> None:
        self._trainer = prepared.trainer
        self._data = prepared.data
        self._case = case
        self._exact = exact
        self._trace = Trace(folder / case.name)
        self._main = Trace(folder / MAIN)
        self._messages = MessageRounding.of(prepared.trainer)
        self._flow: FlowRecorder | None = None
        self._complete: CompleteSequences | None = None
        self._set_up_experiments(prepared, folder)
        self._observer = StepObserver(prepared.trainer, outputs=experiments.AGAIN in case.switches)

    def _set_up_experiments(self, prepared: PreparedTrainer, folder: Path) -> None:
        """Change the trainer where an experiment needs what the reference has stored."""
        trainer = self._trainer
        names = prepared.module_names
        switches = self._case.switches
        if experiments.FORCED in switches:
            self._flow = FlowRecorder(trainer, names, load(self._trace.folder / _FLOW))
        if experiments.COMPLETE in switches:
            self._complete = CompleteSequences(trainer, names)
        if experiments.SAMPLES in switches:
            _use_samples(trainer, self._trace.folder / _SAMPLES)
        if experiments.OPTIONS in switches:
            options = self._trace.facts(self._case.start).update.options
            experiments.use_options(trainer, options)
        if experiments.SETTINGS in switches:
            settings = load(folder / experiments.FORCED / _FLOW).settings
            experiments.use_settings(trainer, names, settings)

    def __iter__(self) -> Iterator[StepResult]:
        case = self._case
        end = case.start + case.steps
        at_start = self._compare_start()
        steps = islice(self._trainer.steps(self._data), case.steps)
        for step, step_record in enumerate(steps, start=case.start):
            result = self._compare_step(step, step_record, at_start)
            yield result
            if result.differences and self._exact:
                break  # the steps after it are another run
            if any(d.missing for d in result.differences if d.aspect == "start"):
                break  # the reference's state is that of other parameters
            at_start = {}
            if not self._exact and case.name == MAIN and step + 1 < end:
                # Each step starts from the reference's state: rounding does not accumulate, and an
                # error shows in the step that makes it.
                self._trainer.load_checkpoint(self._main.state(step + 1))
        self._observer.close()

    def _compare_start(self) -> dict[str, TensorDifference]:
        """Compare the first values with the reference's; nothing where a case starts later.

        A reference that is perturbed, or computes in float64, has other values by design.
        """
        switches = self._case.switches
        if self._case.start or switches & _OTHER_REFERENCES:
            return {}
        with self._trace.tensors(None) as stored:
            if experiments.START in switches:
                _start_from(self._trainer, stored)
            return comparisons.compare_first_values(self._trainer.placed, stored)

    def _compare_step(
        self, step: int, step_record: StepRecord, at_start: dict[str, TensorDifference]
    ) -> StepResult:
        """Compare a step that this rank has taken; all ranks call it together.

        Raises:
            RunError: the reference is too uncertain to be compared with.
        """
        facts = self._observer.facts(step_record)
        reference = self._trace.facts(step)
        with self._trace.tensors(step) as stored, self._main.tensors(step) as in_float32:
            pieces, not_comparable = self._compare_tensors(facts, reference, stored, in_float32)
            if self._flow is not None:
                self._flow.see_reduced(self._observer.gradients, stored, facts.scale)
        report = RankReport(
            rank=collectives.rank(),
            replica=self._trainer.layout.pieces_of(collectives.rank()),
            facts=facts,
            pieces={**pieces, "start": at_start},
            fingerprints=self._observer.fingerprints,
            seed=self._trainer.placed.random_state.seed,
            not_comparable=not_comparable,
            flow=None if self._flow is None else self._flow.finish(),
        )
        reports = gather_objects(report)
        for of_rank in reports:
            if of_rank.not_comparable:
                raise RunError(of_rank.not_comparable)
        norm_limit = self._messages.limit_of_norm(reference)
        result = combine_reports(step, reports, reference, norm_limit, exact=self._exact)
        if self._complete is not None:
            return replace(result, module=self._complete.module, numbers=self._complete.numbers)
        return result

    def _compare_tensors(
        self, facts: StepFacts, reference: StepFacts, stored: Stored, in_float32: Stored
    ) -> tuple[dict[str, dict[str, TensorDifference]], str]:
        """Return the differences of this rank's tensors by kind and name, as the case asks for.

        And why they can't be compared, else "".
        """
        placed = self._trainer.placed
        gradients = self._observer.gradients
        if self._case.switches & _OTHER_REFERENCES:
            in_float64 = experiments.DOUBLE in self._case.switches
            compare_gradients = (
                comparisons.compare_with_float64
                if in_float64
                else comparisons.compare_with_perturbed
            )
            differences, why_not = compare_gradients(
                placed.parameters, gradients, stored, in_float32
            )
            return {GRADIENT: differences}, why_not
        tolerance = None
        if not self._exact:
            rate = max(facts.learning_rate, reference.learning_rate)
            tolerance = Tolerance(rate, self._messages, facts.scale)
        return comparisons.compare_with_reference(placed, gradients, stored, tolerance), ""


# ---- the trainer of a case ----


@contextmanager
def trainer_of(spec: Spec, topology: str, case: Case, folder: Path) -> Iterator[PreparedTrainer]:
    """Build a trainer at the case's first step, and close what it needs at the end of the block."""
    is_reference = topology == SINGLE
    in_float64 = is_reference and experiments.DOUBLE in case.switches
    with ExitStack() as opened:
        if in_float64:
            opened.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        # Another number of CPU threads is another order of summation within one operation.
        opened.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(spec.threads)

        config, subject = spec.build({**settings_of(topology), **case.settings})
        config = step_alone(config)
        opened.callback(subject.close)
        # A copy: the user's function may return the same model each time, and later cases need it
        # in float32.
        model = copy.deepcopy(subject.model).double() if in_float64 else subject.model
        data = _InFloat64(subject.data) if in_float64 else subject.data
        module_names = _module_names(model, config)

        if is_reference:
            opened.callback(cluster.cleanup)
        trainer = Trainer(model, subject.optimizer, subject.loss_fn, config=config)
        if not is_reference or case.name != MAIN:  # the reference logs its result once
            trainer.loss_check.skip()
        subject.prepare(trainer)
        experiments.apply(trainer, case.switches, model)
        _go_to_first_step(trainer, case, Trace(folder / MAIN), in_float64=in_float64)
        if is_reference and case.switches & {experiments.PERTURB, experiments.NUDGED}:
            _change_last_bits(trainer)
        yield PreparedTrainer(trainer, data, module_names)


def _module_names(model: nn.Module, config: Config) -> dict[int, str]:
    """Return the names of a model's modules by their ids.

    Modules of experts that are spread over ranks are left out: their rows are those of several
    micro-batches.
    """
    names = {id(module): name for name, module in model.named_modules()}
    if (config.distributed.expert_size or 1) > 1:
        list_experts = offered(model, "experts") or list
        for _, experts in list_experts():
            for module in experts.modules():
                names.pop(id(module), None)
    return names


def _go_to_first_step(trainer: Trainer, case: Case, main: Trace, *, in_float64: bool) -> None:
    """Bring the trainer to the reference's state before the case's first step.

    A trainer in float64 takes its parameters alone: a checkpoint is one of float32.
    """
    if in_float64:
        with main.tensors(case.start - 1 if case.start else None) as stored, torch.no_grad():
            for name, parameter in trainer.placed.parameters.items():
                value = stored.get(VALUE, name)
                assert value is not None
                parameter.copy_(value)
        trainer.step.start_after(case.start)
    elif case.start:
        trainer.load_checkpoint(main.state(case.start))


@torch.no_grad()
def _change_last_bits(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.placed.parameters.values():
        if parameter.is_floating_point():
            parameter.copy_(with_other_last_bits(parameter, generator))


def _use_samples(trainer: Trainer, path: Path) -> None:
    """Give each micro-batch that this rank runs the samples that the reference had in it."""
    batches = torch.load(path, weights_only=False, map_location=trainer.device)  # index → batch

    def with_samples(micro_batch: MicroBatch) -> MicroBatch:
        if micro_batch.batch is None or micro_batch.index not in batches:
            return micro_batch
        return replace(micro_batch, batch=batches[micro_batch.index])

    experiments.before_step(trainer, lambda step: [with_samples(each) for each in step])


@torch.no_grad()
def _start_from(trainer: Trainer, stored: Stored) -> None:
    """Give this rank's parameters and buffers the reference's first values."""
    for kind, tensors in ((VALUE, trainer.placed.parameters), (BUFFER, trainer.placed.buffers)):
        for name, tensor in tensors.items():
            value = stored.get(kind, name)
            if value is not None:
                local(tensor.detach()).copy_(shard_like(value, tensor))


class _InFloat64(Dataset[Any]):
    """A data set whose floating-point tensors are converted to float64."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.deterministic = getattr(dataset, "deterministic", False)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, self._dataset[index]
        )
