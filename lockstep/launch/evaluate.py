"""Implements `lockstep evaluate`: starts ranks, or is one.

Tests: tests/evaluate/test_evaluate.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from lockstep.errors import EXIT_DONE
from lockstep.evaluate.subject import Asked, find_subject, for_ranks
from lockstep.launch.launcher import LaunchJob, launch, log_to_stderr
from lockstep.launch.options import LaunchOptions, process_count
from lockstep.launch.roles import in_this_process, is_rank, prepare
from lockstep.launch.worker import run_as_worker
from lockstep.machine.environment import rank_facts
from lockstep.prepared.process import give_back


@dataclass(frozen=True)
class Wanted:
    """Holds the metrics that a user asks for, and the form in which they are printed."""

    metrics: Sequence[str] = ()
    prompts: Sequence[str] = ()
    num_tokens: int = 60
    temperature: float = 0.0
    tasks: Sequence[str] = ()  # of lm-evaluation-harness
    limit: int | None = None  # requests of each task
    in_json: bool = False


def evaluate(
    asked: Asked, wanted: Wanted, options: LaunchOptions, *, output_dir: Path, argv: Sequence[str]
) -> int:
    """Evaluate, on this rank or on ranks that are started with `argv`; return the exit code."""
    subject = find_subject(asked)
    logs = output_dir / "logs"

    def work() -> int:
        """Evaluate on this rank, and print the results on rank 0."""
        facts = rank_facts()
        config, line = for_ranks(
            subject.config, asked.overrides, facts.world_size, facts.local_world_size
        )
        if line and facts.is_main:
            log_to_stderr(line)
        measure = import_module("lockstep.evaluate.measure")
        # before minutes of work: the harness may not be installed
        harness = import_module("lockstep.evaluate.harness") if wanted.tasks else None
        cluster = import_module("lockstep.process_group.cluster")
        prompts = measure.Prompts(wanted.prompts, wanted.num_tokens, wanted.temperature)
        opened = measure.opened(subject, config)
        evaluation = measure.evaluate(opened, metrics=wanted.metrics, prompts=prompts)
        if harness is not None:
            answers = harness.ask(opened, wanted.tasks, wanted.limit)
            evaluation = replace(evaluation, tasks=answers)
        if facts.is_main:
            text = import_module("lockstep.evaluate.text")
            print(
                text.as_json(evaluation) if wanted.in_json else text.as_text(evaluation), flush=True
            )
        cluster.cleanup()
        return EXIT_DONE

    if is_rank(options):
        return run_as_worker(work, logs=logs)
    distributed = subject.config.distributed
    training = subject.config.training
    fresh = prepare(
        options,
        may_be_alone=distributed.device == "cpu",
        compiles=training.compile or training.gradient_checkpointing != "none",
    )
    processes, _ = process_count(options, use_gpus=distributed.device != "cpu")
    logs.mkdir(parents=True, exist_ok=True)
    if in_this_process(processes, options):
        give_back()
        return run_as_worker(work, logs=logs, launched=False)
    variables = import_module("lockstep.process_group.cluster").environment(distributed)
    job = LaunchJob(("-m", "lockstep", "evaluate", *argv), logs, variables, fresh=fresh)
    return launch(job, options, processes)
