"""What happens before the first step: the run directory, the monitor, what ranks measure, and what is said."""

from typing import TYPE_CHECKING

from lockstep.checkpoint import Ranks
from lockstep.monitor import Figures, Monitor, PhaseClock
from lockstep.monitor.flops import FirstStep, peak_flops
from lockstep.monitor.over_ranks import gather_objects
from lockstep.strategy import strategy_named
from lockstep.trainer.about import describe, versions

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


def lock_run_directory(trainer: "Trainer") -> None:
    """Let rank 0 take the run directory's lock, which it has until `train` ends; all ranks call it.

    Raises:
        UsageError: another run has it; on every rank.
    """
    if trainer.lock is not None:
        Ranks().broadcast("the run directory could not be locked", trainer.lock.acquire)


def open_monitor(trainer: "Trainer", total: int | None) -> Monitor:
    """The monitor of a run that is about to start; all ranks call it.

    Args:
        total: the last step's number, where it is known.
    """
    directory, config = trainer.run_directory, trainer.config.monitor
    if directory is not None and trainer.is_main_process:
        directory.create()
        directory.config.write_text(trainer.config.to_yaml())
    figures = _figures(trainer)
    ranks = gather_objects(describe(trainer.cluster))
    start = trainer.step.progress.step
    monitor = Monitor(
        config, directory, is_main=trainer.is_main_process, total_steps=total, start_step=start, figures=figures,
        hosts=[rank["host"] for rank in ranks],
    )  # fmt: skip
    if config.gradient_norms:
        trainer.step.wants_layer_norms = monitor.logs
    lines = _lines(trainer, total)
    monitor.say(*lines)
    trainer.start_lines.clear()
    monitor.event(
        "start", layout=str(trainer.layout), world_size=trainer.layout.world_size, lines=lines, ranks=ranks,
        step=start, total_steps=total, parameters=trainer.placed.num_parameters, peak_flops=figures.peak,
        peak_source=figures.peak_source, versions=versions(),
    )  # fmt: skip
    return monitor


def _figures(trainer: "Trainer") -> Figures:
    """What ranks will measure of themselves in this run."""
    trainer.step.clock = PhaseClock(on_cuda=trainer.device.type == "cuda")
    figures = Figures(trainer.step.clock)
    training = trainer.config.training
    in_threads = strategy_named(trainer.layout.strategy).uses_threads
    if not training.compile and not in_threads:  # counted as it runs, in this thread, in eager mode
        trainer.around_step = FirstStep(figures)
        figures.recomputes = training.gradient_checkpointing != "none"
    if trainer.is_main_process:
        figures.peak, figures.peak_source = peak_flops(trainer.device, trainer.mode)
    return figures


def _lines(trainer: "Trainer", last_step: int | None) -> list[str]:
    """What is said at start: the strategy first, always by name."""
    training, ranks = trainer.config.training, trainer.layout.data_parallel_size
    total = trainer.global_batch_size
    micro_batches = total // training.batch_size
    precision = f"{trainer.mode} ({trainer.why_mode})" if trainer.why_mode else trainer.mode
    return [
        f"strategy {trainer.layout} on {trainer.cluster.facts.world_size} × {trainer.device.type}, {precision}, "
        f"{trainer.placed.num_parameters:,} parameters",
        f"global batch {total} = {micro_batches} micro-batches × {training.batch_size}, over {ranks} "
        f"data-parallel rank{'s' * (ranks != 1)}; {trainer.rate_line}",
        *_idle(micro_batches, ranks, training.batch_size),
        *_never_warm(training.warmup_steps, last_step),
        *([trainer.layout.notice] if trainer.layout.notice else []),
        *trainer.placed.log_lines,
        *trainer.start_lines,
    ]


def _never_warm(warmup: int, last_step: int | None) -> list[str]:
    """A warning where the learning rate never reaches its peak, as in the first steps of a long run's config."""
    if last_step is None or warmup <= last_step:
        return []
    return [f"warning: the run ends after {last_step} steps, in the warm-up of {warmup}: training.warmup_steps"]


def _idle(micro_batches: int, ranks: int, batch_size: int) -> list[str]:
    """A warning where a step has fewer micro-batches than there are ranks to share them."""
    idle = ranks - micro_batches
    if idle <= 0:
        return []
    return [
        f"warning: a step has {micro_batches} micro-batch{'es' * (micro_batches != 1)} for {ranks} data-parallel "
        f"ranks: {idle} of them compute{'s' * (idle == 1)} nothing that counts. Use {micro_batches} "
        f"rank{'s' * (micro_batches != 1)}, a smaller batch_size, or global_batch_size={ranks * batch_size}"
    ]
