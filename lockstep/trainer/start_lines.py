"""The lines that a run logs as it starts, and those on what it will not do.

Tests: tests/trainer/test_loops.py
"""

from lockstep.trainer.run_state import RunState


def lines_at_start(run: RunState, last_step: int | None) -> list[str]:
    """Return the log lines of every run: the strategy first, always by name."""
    training = run.config.training
    layout = run.layout
    placed = run.step.placed
    micro_batches = run.global_batch_size // training.batch_size
    ranks = layout.data_parallel_size
    warmup = training.warmup_steps
    numbers = f"{placed.num_parameters:,} parameters"
    if run.num_trained != placed.num_parameters:
        numbers = f"{run.num_trained:,} of {numbers} train"
    precision = f"{run.mode} ({run.why_mode})" if run.why_mode else run.mode
    lines = [
        (
            f"strategy {layout} on {run.cluster.facts.world_size} × {run.cluster.device.type},"
            f" {precision}, {numbers}"
        ),
        (
            f"global batch {run.global_batch_size} = {micro_batches}"
            f" micro-batch{'es' * (micro_batches != 1)} × {training.batch_size}, over {ranks}"
            f" data-parallel rank{'s' * (ranks != 1)}; {run.rate_line}"
        ),
    ]
    if line := idle_ranks(run):
        lines.append(f"warning: {line}")
    if last_step is not None and warmup > last_step:
        lines.append(
            f"warning: the run ends after {last_step} steps, in the warm-up of {warmup}:"
            " training.warmup_steps"
        )
    if layout.notice:
        lines.append(layout.notice)
    return [*lines, *placed.log_lines]


def idle_ranks(run: RunState) -> str | None:
    """Return a line if a step has fewer micro-batches than ranks."""
    ranks = run.layout.data_parallel_size
    batch_size = run.config.training.batch_size
    micro_batches = run.global_batch_size // batch_size
    idle = ranks - micro_batches
    if idle <= 0:
        return None
    return (
        f"a step has {micro_batches} micro-batch{'es' * (micro_batches != 1)} for {ranks}"
        f" data-parallel ranks: {idle} of them compute{'s' * (idle == 1)} nothing that counts. Use"
        f" {micro_batches} rank{'s' * (micro_batches != 1)}, a smaller batch_size, or"
        f" global_batch_size={ranks * batch_size}"
    )


def no_step_left(run: RunState, total: int | None) -> str | None:
    """Return a line if a loop of the caller's own has no step to take."""
    step = run.step.progress.step
    if run.results.stopped:
        return f"no step is left to take: {run.results.why_stopped()}"
    if total is None or step < total:
        return None
    return (
        f"no step is left to take: {step} are done, and the run has {total}. Epochs and max_steps"
        " are counted from the start of the run: ask for more of them, such as epochs=epoch + 1 in"
        " a loop over epochs"
    )


def nothing_to_do(run: RunState, total: int | None) -> list[str]:
    """Return a line if the run that begins has ended before."""
    step = run.step.progress.step
    if total is not None and step >= total:
        return [
            f"nothing left to do: {step} steps are done, and the run has {total}. For more of them"
            " raise training.max_steps or num_train_epochs; with checkpoint.resume=never it starts"
            " afresh (in Python: epochs=…, max_steps=…, resume='never')"
        ]
    if run.results.stopped:
        return [f"nothing left to do: {run.results.why_stopped()}"]
    return []
