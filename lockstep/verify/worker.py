"""Runs in the started processes, which take steps.

One takes the reference's steps and stores them; ranks take theirs and compare.

Tests: tests/verify/test_command.py, tests/verify/test_reference.py
"""

import copy
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from lockstep import cluster, collectives
from lockstep.config import CheckpointConfig, Config, MonitorConfig
from lockstep.data.batches import MicroBatch
from lockstep.errors import LockstepError, RunError, first_line
from lockstep.layout import SIZED
from lockstep.models.protocol import offered
from lockstep.monitor.figures import gather_objects
from lockstep.strategy import EXPERT, SINGLE, parse_topology, strategy_named
from lockstep.tensors import local, shard_like, with_other_last_bits
from lockstep.torch_compat.pytree import tree_map_only
from lockstep.trainer import Trainer
from lockstep.verify import comparisons, experiments
from lockstep.verify.differences import RankReport, StepResult, TensorDifference, combine_reports
from lockstep.verify.flow import FlowRecorder
from lockstep.verify.modes import CompleteSequences
from lockstep.verify.recorded_flow import load
from lockstep.verify.subject import MAIN, Case, Spec, VerifyJob
from lockstep.verify.trace import BOUND, BUFFER, GRADIENT, VALUE, StepObserver, Stored, Trace

_SIZES = tuple(f"distributed.{axis}_size" for axis in SIZED)
_FLOW = "flow.pt"  # file with what flowed through the reference
_SAMPLES = "samples.pt"  # file with its micro-batches


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


def record(spec: Spec, case: Case, folder: Path) -> None:
    """Take the steps of a case in this process alone, and store them."""
    began = time.monotonic()
    with trainer_of(spec, SINGLE, case, folder) as (trainer, data, names):
        _record(trainer, data, names, case, folder, exact=spec.exact)
    (folder / case.name / "seconds").write_text(str(time.monotonic() - began))


def _record(
    trainer: Trainer, data: Any, names: dict[int, str], case: Case, folder: Path, *, exact: bool
) -> None:
    """Take the steps of a case, and store what they compute."""
    trace = Trace(folder / case.name)
    placed = trainer.placed
    trace.write(None, None, _named(VALUE, placed.parameters) | _named(BUFFER, placed.buffers))
    nudges = experiments.NUDGED in case.switches
    stored = load(folder / experiments.FORCED / _FLOW) if nudges else None
    recorder = (
        FlowRecorder(trainer, names, stored, nudge=nudges)
        if experiments.FORCED in case.switches
        else None
    )
    if experiments.SAMPLES in case.switches:

        def write(micro_batches: Sequence[MicroBatch]) -> None:
            samples = {micro_batch.index: micro_batch.batch for micro_batch in micro_batches}
            torch.save(samples, trace.folder / _SAMPLES)

        experiments.before_step(trainer, write)
    observer = StepObserver(trainer, bounds=not exact, outputs=experiments.AGAIN in case.switches)
    if case.name == MAIN:
        trainer.save_checkpoint(trace.states)
    step = case.start - 1
    for step, done in enumerate(islice(trainer.steps(data), case.steps), start=case.start):
        facts = observer.facts(done)
        bounds = observer.bounds(done)
        norms = {name: float(g.double().norm()) for name, g in observer.gradients.items()}
        norms |= {name: norms.get(name, 0.0) for name in placed.parameters}
        facts = replace(
            facts,
            norms=norms,
            bound=sum(float(b.double().square().sum()) for b in bounds.values()) ** 0.5,
            elements=sum(b.numel() for b in bounds.values()),
        )
        tensors = _named(GRADIENT, observer.gradients) | _named(BOUND, bounds)
        trace.write(
            step, facts, tensors | _named(VALUE, placed.parameters) | _named(BUFFER, placed.buffers)
        )
        if case.name == MAIN:
            trainer.save_checkpoint(trace.states)
    observer.close()
    if recorder is not None:
        recorder.finish()
        path = folder / experiments.FORCED / _FLOW
        if stored is None:
            torch.save(vars(recorder.stored), path)
        else:  # what changed last bits do is how far a part may deviate
            path.with_suffix(".bounds").write_bytes(pickle.dumps(recorder.stored.bounds))
    if step + 1 < case.start + case.steps:
        text = f"the reference ended after {step + 1} of {case.steps} steps"
        why = "training.max_steps or training.num_train_epochs allows no more"
        raise RunError(text, why=why, fix=f"verify fewer steps: --steps {max(1, step + 1)}")


def _named(kind: str, tensors: Any) -> dict[str, Any]:
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def compare(job: VerifyJob, case: Case) -> None:
    """Take the steps of a case on this rank, and compare; rank 0 writes the results."""
    try:
        with trainer_of(job.spec, job.topology, case, job.folder) as (trainer, data, names):
            found: list[StepResult] | str = list(
                _compare(trainer, data, names, case, job.folder, job.spec.exact)
            )
    except LockstepError as error:
        if case.name == MAIN:
            raise
        found = first_line(error)  # the same on all ranks
    if collectives.is_main_process():
        job.results_of(case).write_bytes(pickle.dumps(found))
    if dist.is_initialized():
        dist.barrier()


def _compare(
    trainer: Trainer, data: Any, names: dict[int, str], case: Case, folder: Path, exact: bool
) -> Iterator[StepResult]:
    """Take the steps of a case on this rank; yield each step's result, combined over ranks."""
    trace = Trace(folder / case.name)
    states = Trace(folder / MAIN)
    layout = trainer.layout
    rank, piece = divmod(collectives.rank(), layout.same_batch_size)
    replica = rank // layout.data_parallel_size, rank % layout.shard, piece % layout.tensor
    factor, floor = comparisons.message_rounding(trainer)
    parts = experiments.FORCED in case.switches
    recorder = FlowRecorder(trainer, names, load(trace.folder / _FLOW)) if parts else None
    complete = CompleteSequences(trainer, names) if experiments.COMPLETE in case.switches else None
    if experiments.SAMPLES in case.switches:
        _use_samples(trainer, trace.folder / _SAMPLES)
    if experiments.OPTIONS in case.switches:
        experiments.use_options(trainer, trace.facts(case.start).update.options)
    if experiments.SETTINGS in case.switches:
        experiments.use_settings(trainer, names, load(folder / experiments.FORCED / _FLOW).settings)
    observer = StepObserver(trainer, outputs=experiments.AGAIN in case.switches)
    at_start: dict[str, TensorDifference] = {}
    if case.start == 0 and not case.switches & {experiments.DOUBLE, experiments.PERTURB}:
        with trace.tensors(None) as stored:
            if experiments.START in case.switches:
                _start_from(trainer, stored)
            compared = comparisons.compare_with_reference(trainer, stored)
            at_start = compared[VALUE] | compared[BUFFER]
    for step, done in enumerate(islice(trainer.steps(data), case.steps), start=case.start):
        facts = observer.facts(done)
        reference = trace.facts(step)
        not_comparable = ""
        with trace.tensors(step) as stored, states.tensors(step) as in_float32:
            if case.switches & {experiments.DOUBLE, experiments.PERTURB}:
                double = experiments.DOUBLE in case.switches
                compared_with = (
                    comparisons.compare_with_float64
                    if double
                    else comparisons.compare_with_perturbed
                )
                names_here = trainer.placed.parameters
                pieces, not_comparable = compared_with(
                    names_here, observer.gradients, stored, in_float32
                )
                found = {GRADIENT: pieces}
            else:
                found = comparisons.compare_with_reference(
                    trainer,
                    stored,
                    observer,
                    rate=None if exact else max(facts.learning_rate, reference.learning_rate),
                    exact=exact,
                    factor=factor,
                    floor=floor * facts.scale,
                )
            if recorder is not None:
                recorder.see_reduced(observer.gradients, stored, facts.scale)
        report = RankReport(
            collectives.rank(),
            replica,
            facts,
            {**found, "start": at_start},
            observer.fingerprints,
            trainer.placed.random_state.seed,
            not_comparable,
            None if recorder is None else recorder.finish(),
        )
        reports = gather_objects(report)
        if why := next((theirs.not_comparable for theirs in reports if theirs.not_comparable), ""):
            raise RunError(why)
        norm_limit = comparisons.limit_of_norm(reference, factor, floor)
        result = combine_reports(step, reports, reference, norm_limit, exact=exact)
        if complete is not None:
            result = replace(result, module=complete.module, numbers=complete.numbers)
        yield result
        if result.differences and exact:
            break  # the steps after it are another run
        if any(d.missing for d in result.differences if d.aspect == "start"):
            break  # the reference's state is that of other parameters
        at_start = {}
        if not exact and case.name == MAIN and step + 1 < case.start + case.steps:
            # Each step starts from the reference's state: rounding does not accumulate, and an
            # error shows in the step that makes it.
            trainer.load_checkpoint(states.state(step + 1))
    observer.close()


@contextmanager
def trainer_of(
    spec: Spec, topology: str, case: Case, folder: Path
) -> Iterator[tuple[Trainer, Any, dict[int, str]]]:
    """Build a trainer at the case's first step.

    The result is the trainer, its data, and the names of its modules by their ids.
    """
    double = experiments.DOUBLE in case.switches and topology == SINGLE
    with ExitStack() as stack:
        if double:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        # Another number of CPU threads is another order of summation within one operation.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(spec.threads)
        config, subject = spec.build({**settings_of(topology), **case.settings})
        config = step_alone(config)
        stack.callback(subject.close)
        # A copy: the user's function may return the same model each time, and later cases need it
        # in float32.
        model = copy.deepcopy(subject.model).double() if double else subject.model
        names = {id(module): name for name, module in model.named_modules()}
        # their rows are those of several micro-batches
        if (config.distributed.expert_size or 1) > 1:
            inside = {
                id(m) for _, each in (offered(model, "experts") or list)() for m in each.modules()
            }
            names = {key: name for key, name in names.items() if key not in inside}
        if topology == SINGLE:
            stack.callback(cluster.cleanup)
        trainer = Trainer(model, subject.optimizer, subject.loss_fn, config=config)
        if topology != SINGLE or case.name != MAIN:  # the reference logs its result once
            trainer.loss_check.skip()
        subject.prepare(trainer)
        experiments.apply(trainer, case.switches, model)
        trace = Trace(folder / MAIN)
        if double:
            with trace.tensors(case.start - 1 if case.start else None) as stored, torch.no_grad():
                for name, parameter in trainer.placed.parameters.items():
                    value = stored.get(VALUE, name)
                    assert value is not None
                    parameter.copy_(value)
            trainer.step.start_after(case.start)
        elif case.start:
            trainer.load_checkpoint(trace.state(case.start))
        if case.switches & {experiments.PERTURB, experiments.NUDGED} and topology == SINGLE:
            generator = torch.Generator().manual_seed(0)
            for parameter in trainer.placed.parameters.values():
                if parameter.is_floating_point():
                    with torch.no_grad():
                        parameter.copy_(with_other_last_bits(parameter, generator))
        yield trainer, _InFloat64(subject.data) if double else subject.data, names


def _use_samples(trainer: Trainer, path: Path) -> None:
    right = torch.load(path, weights_only=False, map_location=trainer.device)

    def given(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        known = [m for m in micro_batches if m.batch is not None and m.index in right]
        by_index = {m.index: replace(m, batch=right[m.index]) for m in known}
        return [by_index.get(m.index, m) for m in micro_batches]

    experiments.before_step(trainer, given)


@torch.no_grad()
def _start_from(trainer: Trainer, stored: Stored) -> None:
    for kind, tensors in ((VALUE, trainer.placed.parameters), (BUFFER, trainer.placed.buffers)):
        for name, tensor in tensors.items():
            value = stored.get(kind, name)
            if value is not None:
                local(tensor.detach()).copy_(shard_like(value, tensor))


class _InFloat64(Dataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.deterministic = getattr(dataset, "deterministic", False)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return tree_map_only(
            Tensor, lambda t: t.double() if t.is_floating_point() else t, self._dataset[index]
        )
