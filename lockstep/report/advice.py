"""Advises what to do next: rules over a run's numbers, each with its evidence.

Tests: tests/report/test_report.py
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from shlex import quote
from statistics import median
from typing import Any

from lockstep.errors import first_line
from lockstep.layout import SAME_BATCH
from lockstep.report import read, units
from lockstep.report.read import (
    PHASE_NAMES,
    RunData,
    after_warmup,
    flat_config,
    phase_totals,
    step_shares,
)

_FIRST = {"bad": 0, "warn": 1, "info": 2}


@dataclass(frozen=True)
class Advice:
    """One piece of advice."""

    level: str  # `bad` (the run failed or is failing), `warn` (time or memory is lost), `info`
    found: str  # what the numbers show
    do: str  # what to change
    evidence: str  # the numbers, and where they come from


def advise(run: RunData) -> list[Advice]:
    """Return all advice that applies, the most urgent first."""
    applying: list[Advice] = []
    for rule in _RULES:
        what = f"the advice “{rule.__name__.strip('_').replace('_', ' ')}”"
        make = partial(list[Advice], rule(run))
        applying += read.attempted(what, make, run.left_out.append) or []
    return sorted(applying, key=lambda advice: _FIRST[advice.level])


def _crashed(run: RunData) -> Iterator[Advice]:
    """Say how to resume a run that ended without a last event."""
    if run.status != "crashed":
        return
    saves = [event["step"] for event in run.of_kind("save") if isinstance(event.get("step"), int)]
    step = run.rows[-1]["step"] if run.rows else 0
    lost = f"the newest checkpoint is of step {saves[-1]}" if saves else "there is no checkpoint"
    found = f"The run ended after step {step} without a last event."
    config = quote(str(run.path / "config.yaml"))
    folder = quote(str(run.path))
    do = (
        f"Look at the end of {run.path / 'logs' / 'rank-0.log'}; resume with `lockstep train"
        f" {config} --output-dir {folder} --resume auto`."
    )
    yield Advice(
        "bad",
        found,
        do,
        f"events.jsonl does not end with `stop`; the last logged step is {step}, {lost}.",
    )


def _non_finite_loss(run: RunData) -> Iterator[Advice]:
    if run.not_numbers:
        found = f"The loss was not a number at step {run.not_numbers[0]}."
        do = (
            "Lower training.learning_rate, lengthen training.warmup_steps, or look at the samples"
            " of that step."
        )
        evidence = (
            f"{len(run.not_numbers)} logged step(s) have a loss of nan or infinity, the first is"
            f" {run.not_numbers[0]}."
        )
        yield Advice("bad", found, do, evidence)


def _restarts(run: RunData) -> Iterator[Advice]:
    restarts = run.of_kind("restart", "fault")
    if restarts:
        reasons = "; ".join(
            dict.fromkeys(first_line(event.get("reason", "")) for event in restarts[-3:])
        )
        found = (
            "The ranks were restarted"
            f" {'once' if len(restarts) == 1 else f'{len(restarts)} times'}."
        )
        do = "Read the reasons; consider removing a machine that recurs in them."
        yield Advice("warn", found, do, f"events.jsonl: {reasons}")


def _data(run: RunData) -> Iterator[Advice]:
    """Advise more workers where steps wait for data."""
    share = step_shares(run).get("data", 0.0)
    if share < 0.1:
        return
    asked = flat_config(run.config_text).get("data.num_workers", 0)
    workers = run.start.get("data_workers", asked)
    advice = (
        "Raise data.num_workers"
        if not workers
        else f"Raise data.num_workers above {workers} or prefetch_factor"
    )
    if workers != asked:
        advice = f"Raise num_workers of the DataLoader, which is {workers}"
    found = f"{share:.0%} of each step waits for data."
    do = (
        f"{advice}, or put the data on a faster disk (`lockstep data prepare` makes tokens"
        " beforehand)."
    )
    yield Advice("warn", found, do, _of_a_step(run, share) + f"; data.num_workers is {workers}.")


def _communication(run: RunData) -> Iterator[Advice]:
    """Advise what sends less, or less often, where steps wait for other ranks."""
    share = step_shares(run).get("communication", 0.0)
    if share < 0.2 or run.of_kind("straggler"):
        return
    if _oversubscribed_hosts(run):  # ranks wait for cores, whatever they exchange
        return
    config = flat_config(run.config_text)
    sizes = run.start.get("sizes") or {}
    hosts = _ranks_by_host(run)
    ways = ["train larger micro-batches (training.batch_size)"]
    if sizes.get("shard", 1) > 1:
        ways += [
            "hold gradients whole until the last micro-batch (distributed.fsdp.accumulate:"
            " unsharded)"
        ]
        if len(hosts) > 1 and sizes.get("replicate", 1) == 1:
            ways += ["shard within a host only (distributed.fsdp.sharding_strategy: hybrid_shard)"]
        if str(config.get("precision.mode")) != "fp32":
            ways += ["reduce in half precision (distributed.fsdp.reduce_dtype: bf16)"]
    elif sizes.get("replicate", 1) > 1:
        ways += ["reduce less often (training.gradient_accumulation_steps)"]
        if (
            config.get("distributed.ddp.compression.kind", "none") == "none"
            and "pipeline" not in sizes
        ):
            ways += ["compress (distributed.ddp.compression.kind: bf16)"]
    if "pipeline" in sizes:
        ways += [
            "give the pipeline more micro-batches a step (training.gradient_accumulation_steps)"
        ]
    if set(SAME_BATCH) & set(sizes) and len(hosts) > 1:
        ways += ["keep the ranks of distributed.tensor_size and context_size within a host"]
    found = f"{share:.0%} of each step waits for other ranks."
    do = f"To wait less: {'; '.join(ways)}."
    yield Advice(
        "warn",
        found,
        do,
        _of_a_step(run, share) + f"; the ranks are {run.start.get('layout', 'unknown')}.",
    )


def _ranks_by_host(run: RunData) -> dict[str, list[dict[str, Any]]]:
    hosts: dict[str, list[dict[str, Any]]] = {}
    for rank in run.start.get("ranks") or []:
        hosts.setdefault(str(rank.get("host")), []).append(rank)
    return hosts


def _oversubscribed_hosts(run: RunData) -> dict[str, tuple[int, int]]:
    """Return threads and cores of each host that has more threads than cores.

    Ranks on CPUs run there.
    """
    hosts = {}
    for host, ranks in _ranks_by_host(run).items():
        threads = sum(
            rank.get("threads") or 0 for rank in ranks if "CPU" in str(rank.get("device"))
        )
        cores = max((rank.get("cores") or 0 for rank in ranks), default=0)
        if cores and threads > cores:
            hosts[host] = threads, cores
    return hosts


def _oversubscribed(run: RunData) -> Iterator[Advice]:
    for host, (threads, cores) in list(_oversubscribed_hosts(run).items())[:1]:
        ranks = len(_ranks_by_host(run)[host])
        found = (
            f"{host} has {cores} core{'s' * (cores != 1)} for {threads} threads of {ranks}"
            f" rank{'s' * (ranks != 1)}: they take turns, and wait for each other."
        )
        do = (
            f"Set OMP_NUM_THREADS={cores // ranks}."
            if cores >= ranks
            else f"Start at most {cores} ranks there."
        )
        yield Advice(
            "warn",
            found,
            do,
            "The start event has each rank's threads, and the cores that it may use.",
        )


def _straggler(run: RunData) -> Iterator[Advice]:
    for event in {event.get("rank"): event for event in run.of_kind("straggler")}.values():
        host = event.get("host") or "its machine"
        phase = str(event.get("phase"))
        found = (
            f"Rank {event.get('rank')} on {host} keeps the others waiting, with"
            f" {PHASE_NAMES.get(phase, phase)}."
        )
        do = (
            f"Look at {host}: other processes, heat, a slow disk; `lockstep doctor` compares it"
            " with the others."
        )
        yield Advice("warn", found, do, f"step {event.get('step')}: {event.get('text')}.")


def _pauses(run: RunData) -> Iterator[Advice]:
    """Advise rarer or cheaper pauses where checkpoints and evaluations take long."""
    totals = phase_totals(run)
    wall = sum(totals.values()) - totals.get("outside", 0.0)
    if not wall:
        return
    saving = totals["checkpoint"] / wall
    evaluating = totals["evaluation"] / wall
    if saving > 0.05:
        config = flat_config(run.config_text)
        how = (
            "Set checkpoint.async: true"
            if config.get("checkpoint.async") is False
            else "Raise checkpoint.save_steps"
        )
        found = f"Checkpoints take {saving:.0%} of the time."
        do = f"{how}."
        evidence = (
            f"{units.seconds(totals['checkpoint'])} of {units.seconds(wall)},"
            f" {len(run.of_kind('save'))} checkpoints."
        )
        yield Advice("warn", found, do, evidence)
    if evaluating > 0.2:
        found = f"Evaluations take {evaluating:.0%} of the time."
        do = "Raise training.eval_steps or training.eval_batch_size."
        evidence = (
            f"{units.seconds(totals['evaluation'])} of {units.seconds(wall)} in"
            f" {len(run.evaluations)} evaluations."
        )
        yield Advice("info", found, do, evidence)


def _memory(run: RunData) -> Iterator[Advice]:
    """Advise on memory that is nearly full, unequal between ranks, or unused."""
    for event in run.of_kind("memory_high", "memory_imbalance")[:2]:
        found, do = {
            "memory_high": (
                "Memory is nearly full.",
                "Turn on training.gradient_checkpointing, or lower training.batch_size.",
            ),
            "memory_imbalance": (
                "Ranks hold unequal memory.",
                (
                    "Move the cuts (distributed.pipeline.split_spec), or shard along a dimension"
                    " that divides evenly."
                ),
            ),
        }[event["kind"]]
        yield Advice("warn", found, do, f"step {event.get('step')}: {event.get('text')}.")
    memory = run.gathered[-1].get("memory", {}) if run.gathered else {}
    has_all = {"reserved", "total", "peak"} <= set(memory)
    if has_all and 0 <= memory["peak"][2] < 0.5 * memory["total"][2]:
        peak = memory["peak"][2]
        total = memory["total"][2]
        found = f"Much of the GPUs' memory is free: the fullest has held {peak / total:.0%} of it."
        do = (
            "Raise training.batch_size (and keep training.global_batch_size), or turn"
            " gradient_checkpointing off."
        )
        evidence = (
            f"rank {memory['peak'][3]}: a peak of {units.size(peak)} out of {units.size(total)}."
        )
        yield Advice("info", found, do, evidence)


def _precision(run: RunData) -> Iterator[Advice]:
    skipped = run.last("skipped_steps") or 0
    steps = run.rows[-1]["step"] if run.rows else 0
    if skipped > max(3, 0.02 * steps):
        found = f"{skipped} of {steps} steps were skipped: gradients overflowed under fp16."
        do = (
            "Use precision.mode: bf16 where the device has it; else lower"
            " precision.loss_scale.initial_scale."
        )
        evidence = (
            f"skipped_steps is {skipped}, and the loss scale is {run.last('loss_scale')} at the"
            " end."
        )
        yield Advice("warn", found, do, evidence)


def _clipping(run: RunData) -> Iterator[Advice]:
    values = [row["clipped"] for row in after_warmup(run.rows) if row.get("clipped") is not None]
    if len(values) >= 10 and sum(value > 0 for value in values) > 0.9 * len(values):
        limit = flat_config(run.config_text).get("training.gradient_clip.value")
        norms = [
            row["grad_norm"] for row in after_warmup(run.rows) if row.get("grad_norm") is not None
        ]
        typical = f"the median norm is {median(norms):.3g}, " if norms else ""
        found = (
            "Nearly every step's gradient is clipped: the learning rate acts as a step of fixed"
            " length."
        )
        do = "Raise training.gradient_clip.value above the usual norm, or lower the learning rate."
        evidence = (
            f"{sum(value > 0 for value in values)} of {len(values)} logged steps; {typical}the"
            f" limit {limit}."
        )
        yield Advice("info", found, do, evidence)


def _overfitting(run: RunData) -> Iterator[Advice]:
    losses = [
        (row["step"], row["eval_loss"])
        for row in run.evaluations
        if row.get("eval_loss") is not None
    ]
    if len(losses) < 3:
        return
    best_step, best = min(losses, key=lambda pair: pair[1])
    last_step, last = losses[-1]
    if last > 1.02 * best and last_step > best_step:
        found = f"The evaluation loss has risen since step {best_step}."
        do = (
            "Stop there (checkpoint.keep_best: eval_loss keeps it), add data or dropout, or train"
            " for fewer steps."
        )
        yield Advice(
            "warn", found, do, f"{best:.4f} at step {best_step}, {last:.4f} at step {last_step}."
        )


def _slowing(run: RunData) -> Iterator[Advice]:
    """Say that throughput has fallen since the second quarter of the run."""
    name = "tokens_per_second" if run.last("tokens_per_second") else "samples_per_second"
    unit = name.partition("_")[0]
    values = [row[name] for row in run.rows if row.get(name)]
    if len(values) < 20:
        return
    early = median(values[len(values) // 4 : len(values) // 2])
    late = median(values[-len(values) // 4 :])
    if late < 0.8 * early:
        found = f"The run has become slower: {1 - late / early:.0%} fewer per second than before."
        do = (
            "Look at other programs on the machines, at the disk, and at “Time per phase” for the"
            " phase that grew."
        )
        evidence = (
            f"{units.count(early)} {unit}/s in the second quarter of the run, {units.count(late)}"
            " in the last."
        )
        yield Advice("warn", found, do, evidence)


def _utilisation(run: RunData) -> Iterator[Advice]:
    shares = step_shares(run)
    mfu = run.last("mfu")
    on_gpu = "CPU" not in str((run.start.get("ranks") or [{}])[0].get("device", "CPU"))
    if on_gpu and mfu is not None and mfu < 0.2 and shares.get("forward_backward", 0.0) > 0.7:
        found = f"The devices compute at {mfu:.0%} of their peak."
        do = "Try training.compile: true, precision.mode: bf16, or a larger training.batch_size."
        evidence = (
            f"mfu {mfu:.3g}; {shares['forward_backward']:.0%} of a step is forward and backward;"
            f" peak: {run.start.get('peak_source')}."
        )
        yield Advice("info", found, do, evidence)


def _sinks(run: RunData) -> Iterator[Advice]:
    for event in run.of_kind("sink_failed"):
        found = (
            f"{str(event.get('sink', 'a sink')).capitalize()} failed; training went on without it."
        )
        do = "Repair it, or remove it from monitor.sinks."
        yield Advice("info", found, do, f"{event.get('reason')}")


def _of_a_step(run: RunData, share: float) -> str:
    step = read.typical_step(run)
    count = len(after_warmup(run.gathered))
    of = f"{units.seconds(share * step)} of a step of {units.seconds(step)}"
    return f"{of}, the median over ranks and {count} measurements"


_RULES: tuple[Callable[[RunData], Iterator[Advice]], ...] = (
    _crashed,
    _non_finite_loss,
    _restarts,
    _oversubscribed,
    _data,
    _communication,
    _straggler,
    _pauses,
    _memory,
    _precision,
    _clipping,
    _overfitting,
    _slowing,
    _utilisation,
    _sinks,
)
