"""Runs `lockstep plan`, and resolves `strategy: auto`.

From a config, or a model's size alone, `lockstep plan` makes a table of layouts.

For `strategy: auto` each rank makes the choice of `lockstep plan` before it joins the others, from
what is the same for all of them: the config, their number, and the memory of a device like its own.
Choices that change results (bf16 weights) are left to the user.

Tests: tests/plan/test_plan.py, tests/plan/test_auto.py
"""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import psutil
import torch

from lockstep.config import Config
from lockstep.costs.hardware import GIB, GPUS, LINKS, Gpu, GpuCluster, Link, cluster_of, known_gpu
from lockstep.costs.steps import ModelSize
from lockstep.errors import UsageError
from lockstep.machine import accelerator
from lockstep.machine.cores import allowed
from lockstep.machine.environment import rank_facts
from lockstep.plan import calculate_resources, chosen
from lockstep.plan.candidates import (
    Candidate,
    ValuesNeededError,
    candidates,
    evaluate_layout,
    largest_batch,
    micro_batches,
)
from lockstep.plan.layouts import layout_of, model_size_of
from lockstep.plan.workload import Workload, workload_of
from lockstep.run_directory.run_files import exists_already, write_result
from lockstep.strategy import REPLICAS, SINGLE


@dataclass(frozen=True)
class PlanOptions:
    """The command's options; None: not given."""

    gpus: int | None = None
    gpu_type: str | None = None
    interconnect: str | None = None
    per_node: int = 8
    find_batch_size: bool = False
    as_json: bool = False
    write: Path | None = None
    chart: Path | None = None
    price: float | None = None


def plan(config: Config, options: PlanOptions) -> str:
    """Return the plan of a config, as text."""
    for path in (options.chart, options.write):
        if path is not None and os.path.lexists(path):
            raise exists_already(path)
    cluster, notices = cluster_for(options)
    if config.precision.mode == "auto":
        mode = "bf16" if cluster.gpu.has_bf16 else "fp16"
        config = config.replaced({"precision.mode": mode})
        notices.append(f"precision.mode auto is {mode} on {cluster.gpu.name}")
    if config.precision.fp8 != "none":
        notices.append(
            f"precision.fp8 {config.precision.fp8} is not counted: memory and time are those of"
            " fp8: none"
        )
    work = workload_of(config)
    considered = candidates(work, config, cluster, first=print_first, processes=len(allowed()))
    best = considered[0] if considered else None
    batch = None
    if options.find_batch_size and best is not None:
        batch = largest_batch(work, config, cluster, best.changes)
        notices.append(f"the largest training.batch_size that fits under {best.name()}: {batch}")
    if config.checkpoint.memory_steps is not None and best is not None:
        notices.append(copies_in_memory(config, model_size_of(work, config)))
    if options.chart is not None:
        write_result(options.chart, as_svg(considered))
        notices.append(f"chart: {options.chart}")
    if options.write is not None:
        notices.append(write(config, best, options.write, batch))
    if options.as_json:
        where = {
            "gpu": asdict(cluster.gpu),
            "num_gpus": cluster.num_gpus,
            "between": asdict(cluster.between),
        }
        in_all = {"cluster": where, "layouts": [as_dict(c, cluster) for c in considered]}
        return json.dumps(in_all | {"largest_batch_size": batch, "notices": notices}, indent=2)
    tokens = work.tokens_per_sample()
    text = as_text(
        considered,
        cluster,
        tokens_per_sample=tokens,
        steps=config.training.max_steps,
        price=options.price,
    )
    return "\n".join([text, *notices])


def copies_in_memory(config: Config, facts: ModelSize) -> str:
    """Return a sentence on the host memory that `checkpoint.memory_steps` takes."""
    copy = facts.parameters * (4 + facts.optimizer_bytes)
    return (
        f"checkpoint.memory_steps: {config.checkpoint.memory_steps}: {_gib(2 * copy)} GiB of"
        " shared memory (two copies of the run)"
    )


def print_first(candidate: Candidate) -> None:
    """Print the memory of the first layout on stderr, while the others are still rehearsed."""
    needs = f"{_gib(candidate.needed_bytes)} of {candidate.limit / GIB:.1f} GiB a GPU"
    print(
        f"lockstep: first answer, others follow: {candidate.name()} needs {needs}",
        file=sys.stderr,
        flush=True,
    )


def cluster_for(options: PlanOptions) -> tuple[GpuCluster, list[str]]:
    """Return the requested cluster, or this machine's, and notices about it."""
    notices = []
    gpu = options.gpu_type
    number = options.gpus
    if gpu is None or number is None:
        kind = accelerator.found()
        here = accelerator.count()
        if gpu is None:
            known = (
                known_gpu(accelerator.name_of(torch.device(kind, 0)))
                if kind is not None and here
                else None
            )
            gpu = "A100-80GB" if known is None else known.name
            notices.append(
                f"GPU: {gpu}; --gpu-type names another" if known is None else f"GPU: {gpu}, as here"
            )
        number = max(1, here) if number is None else number
    return cluster_of(number, gpu, options.interconnect, per_node=options.per_node), notices


def write(config: Config, best: Candidate | None, path: Path, batch: int | None) -> str:
    """Write the config of the best layout. Raises UsageError: no layout fits."""
    if best is None or not best.fits:
        raise UsageError(
            "no layout fits, so there is no config to write", fix="use more GPUs or a smaller batch"
        )
    changes: dict[str, Any] = dict(best.changes)
    if batch and config.training.global_batch_size is None:
        changes["training.batch_size"] = batch
    write_result(path, config.replaced(changes).to_yaml())
    return f"wrote {path}: {best.name()}"


def plan_by_size(
    params: float, sequence_length: int, batch_size: int, headroom: float, options: PlanOptions
) -> str:
    """Return the plan of a transformer of a given size, as text.

    Raises UsageError: a size or a number is below 1.
    """
    number = 1 if options.gpus is None else options.gpus
    rows = []
    for sharding in ("none", "gradients", "full") if number > 1 else ("none",):
        for each in (False, True):
            needs = calculate_resources(
                params,
                sequence_length,
                batch_size,
                gpus=number,
                sharding=sharding,
                checkpointing=each,
                headroom=headroom,
            )
            rows.append((sharding, each, needs))
    if options.as_json:
        data = [
            {"sharding": s, "checkpointing": c, **asdict(n), "total": n.total} for s, c, n in rows
        ]
        return json.dumps(data, indent=2)
    shape = rows[0][2].shape
    columns = "".join(
        f"{column:>9}" for column in ("params", "grads", "optim.", "activ.", "working", "total")
    )
    lines = [
        f"{params:.3g} parameters (as {shape.layers} layers of width {shape.width}),"
        f" {sequence_length} positions, {batch_size} a micro-batch, {number}"
        f" GPU{'s' * (number > 1)}; GiB a GPU"
        + (f", with {headroom:.0%} headroom" if headroom else ""),
        f"{'strategy':<24}{'recompute':>10}{columns}  fits",
    ]
    names = {
        "none": REPLICAS if number > 1 else SINGLE,
        "gradients": "fsdp shard_grad_op",
        "full": "fsdp full_shard",
    }
    for sharding, checkpointing, n in rows:
        parts = (n.parameters, n.gradients, n.optimizer, n.activations, n.working)
        cells = "".join(f"{part / GIB:9.1f}" for part in parts)
        fits = (
            ", ".join(name for name, gpu in GPUS.items() if n.fits(gpu.memory))
            or "none of the table"
        )
        lines.append(
            f"{names[sharding]:<24}{'yes' if checkpointing else 'no':>10}{cells}{n.gib:9.1f} "
            f" {fits}"
        )
    return "\n".join(lines)


_KINDS = {
    "parameters": ("P", "#4e79a7"),
    "gradients": ("G", "#f28e2b"),
    "optimizer": ("O", "#e15759"),
    "activations": ("a", "#76b7b2"),
    "gathered": ("g", "#59a14f"),
    "buckets": ("b", "#edc948"),
    "stashes": ("s", "#b07aa1"),
}
_WIDTH = 40


def mfu(candidate: Candidate, cluster: GpuCluster) -> float:
    """Return the model FLOPs utilisation: of the peak in half precision, without recomputation."""
    assert candidate.step is not None
    return candidate.model_flops / (
        candidate.step.seconds * cluster.num_gpus * cluster.gpu.half * 1e12
    )


def as_text(
    considered: Sequence[Candidate],
    cluster: GpuCluster,
    *,
    tokens_per_sample: int,
    steps: int | None,
    price: float | None,
) -> str:
    """Return a table of layouts, best first, a chart of their memory, and why this order."""
    limit = considered[0].limit if considered else 0.0
    between = (
        f", {cluster.between.name} between nodes" if cluster.num_gpus > cluster.per_node else ""
    )
    lines = [
        (
            f"{cluster.num_gpus} × {cluster.gpu.name} ({limit / GIB:.1f} GiB for tensors of"
            f" {cluster.gpu.memory:g}), {cluster.per_node} a node, {cluster.inside.name}"
            f" inside{between}"
        ),
        "",
        *_table(considered, cluster, tokens_per_sample),
        "",
        *memory_bars(considered),
        "",
        *why(considered),
    ]
    best = considered[0] if considered and considered[0].fits else None
    if best is not None and best.step is not None and steps:
        lines.append(_whole_run(best.step.seconds, steps, cluster.num_gpus, price))
    return "\n".join(lines)


def _table(
    considered: Sequence[Candidate], cluster: GpuCluster, tokens_per_sample: int
) -> list[str]:
    """Return a line for each layout; a narrow terminal has the most important columns."""
    speed = "tokens/s" if tokens_per_sample > 1 else "samples/s"
    rows = [
        ["layout", "GiB a GPU", "fits", "step s", "exposed", "bubble", "sent/step", "MFU", speed]
    ]
    for candidate in considered:
        fits = "yes"
        if not candidate.fits:
            fits = f"no: {(candidate.needed_bytes - candidate.limit) / GIB:+.1f}"
        if candidate.memory is None:
            least = f"≥ {_gib(candidate.needed_bytes)}"
            rows.append([candidate.name(), least, fits, *[""] * 6])
            continue
        step = candidate.step
        assert step is not None
        rows.append(
            [
                candidate.name(),
                _gib(candidate.needed_bytes),
                fits,
                f"{step.seconds:.3g}",
                f"{step.exposed / step.seconds:.0%}",
                f"{step.bubble / step.seconds:.0%}",
                _bytes(step.inside + step.between),
                f"{mfu(candidate, cluster):.0%}",
                f"{candidate.samples_per_second * tokens_per_sample:,.0f}",
            ]
        )
    columns = _NARROW if _terminal() < _WIDE else range(len(rows[0]))
    widths = {column: max(len(row[column]) for row in rows) for column in columns}
    lines = []
    for row in rows:  # the first column to the left, numbers to the right
        cells = (
            row[column].rjust(width) if column else row[column].ljust(width)
            for column, width in widths.items()
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def _whole_run(seconds_of_step: float, steps: int, gpus: int, price: float | None) -> str:
    """Return the line of what all steps take and cost; `price`: of a GPU for an hour."""
    seconds = seconds_of_step * steps
    hours = seconds / 3600 * gpus
    cost = f", {price * hours:,.2f} at {price:g} a GPU-hour" if price else ""
    units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    fitting = [(unit, length) for unit, length in units if seconds >= length]
    unit, length = fitting[0] if fitting else units[-1]
    return f"{steps:,} steps: {seconds / length:.3g} {unit}, {hours:,.3g} GPU-hours{cost}"


_WIDE = 116  # columns of a terminal that the whole table needs
_NARROW = (0, 1, 2, 3, 8)  # columns of the table that a terminal of 80 shows


def _terminal() -> int:
    """Return the terminal's width; a file takes all."""
    return shutil.get_terminal_size(fallback=(10**6, 0)).columns


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= 0.1 * GIB else f"{size / GIB:.2g}"


def _bytes(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def memory_bars(considered: Sequence[Candidate]) -> list[str]:
    """Return bars of memory by kind, with `|` at the GPU's memory."""
    shown = [c for c in considered if c.memory is not None]
    if not shown:
        return []
    limit = shown[0].limit
    bar = _WIDTH if _terminal() >= _WIDE else _WIDTH * 3 // 4
    scale = max(limit, *(min(c.needed_bytes, 2 * limit) for c in shown)) / bar
    edge = min(bar, round(limit / scale))
    width = max(len(c.name()) for c in shown)
    legend = "memory: " + ", ".join(f"{letter} {kind}" for kind, (letter, _) in _KINDS.items())
    lines = textwrap.wrap(legend, _terminal(), subsequent_indent="  ")
    for c in shown:
        letters = [_KINDS[kind][0] * round(size / scale) for kind, size in (c.memory or {}).items()]
        text = "".join(letters)[: bar + 1]
        lines.append(f"{c.name():<{width}}  {text[:edge]:<{edge}}|{text[edge:].rstrip()}")
    return lines


def why(considered: Sequence[Candidate]) -> list[str]:
    """Return the reason why the first layout is first."""
    if not considered:
        return ["there is no layout of this model on these GPUs"]
    best = considered[0]
    if not best.fits:
        return [
            f"nothing fits: {best.name()} comes nearest and needs"
            f" {(best.needed_bytes - best.limit) / GIB:.1f} GiB more a GPU; use more GPUs, a"
            " smaller training.batch_size, or shorter samples"
        ]
    assert best.step is not None
    lines = [f"{best.name()}: the fastest that fits"]
    closest = next(
        (c for c in considered[1:] if c.step is not None and c.layout != best.layout and c.fits),
        None,
    )
    if closest is not None and closest.step is not None:
        slower = best.samples_per_second / closest.samples_per_second - 1
        waits = closest.step.exposed + closest.step.bubble
        lines.append(
            f"  {closest.name()} is {slower:.0%} slower: {closest.step.compute:.3g} s of computing"
            f" and {waits:.3g} s of waiting a step, against {best.step.compute:.3g} and"
            f" {best.step.exposed + best.step.bubble:.3g}"
        )
    c = max(
        (c for c in considered if not c.fits),
        key=lambda candidate: candidate.samples_per_second,
        default=best,
    )
    if c.samples_per_second > best.samples_per_second:
        lines.append(
            f"  {c.name()} would be faster, but lacks {(c.needed_bytes - c.limit) / GIB:.1f} GiB"
        )
    if best.checkpointing == "full":
        lines.append(
            "  it recomputes activations: with fewer samples in a micro-batch or more GPUs it may"
            " not have to"
        )
    lines += [f"  {note}" for c in (best, closest) if c is not None for note in c.notes]
    return lines


def as_dict(candidate: Candidate, cluster: GpuCluster) -> dict[str, Any]:
    """Return a candidate as JSON data, in bytes and seconds."""
    return {
        "layout": str(candidate.layout),
        "name": candidate.name(),
        "config": candidate.changes,
        "fits": candidate.fits,
        "memory": candidate.memory,
        "needed": candidate.needed_bytes,
        "limit": candidate.limit,
        "samples": candidate.samples,
        "step": asdict(candidate.step) if candidate.step is not None else None,
        "mfu": mfu(candidate, cluster) if candidate.step is not None else None,
        "samples_per_second": candidate.samples_per_second,
        "notes": candidate.notes,
    }


def as_svg(considered: Sequence[Candidate]) -> str:
    """Return a chart of each layout's memory by kind, with a line at the GPU's memory."""
    shown = [c for c in considered if c.memory is not None]
    height = 26
    width = 560
    margin = 20 + max(7 * len(c.name()) for c in shown) if shown else 20
    limit = shown[0].limit if shown else 1.0
    scale = width / max(limit * 1.15, *(min(c.needed_bytes, 2 * limit) for c in shown), 1.0)
    bottom = height * len(shown) + 30
    across = margin + width + 90
    down = bottom + 40
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" viewBox="0 0'
            f' {across} {down}" font-family="sans-serif" font-size="12">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, c in enumerate(shown):
        x = float(margin)
        y = 20 + row * height
        parts.append(
            f'<text x="{margin - 8}" y="{y + 14}" text-anchor="end">{escape(c.name())}</text>'
        )
        for kind, held in (c.memory or {}).items():
            w = min(held * scale, margin + width - x)
            if w > 0:
                box = f'x="{x:.1f}" y="{y}" width="{w:.1f}" height="18" fill="{_KINDS[kind][1]}"'
                parts.append(f"<rect {box}><title>{kind}: {held / GIB:.2f} GiB</title></rect>")
                x += w
        parts.append(f'<text x="{x + 5:.1f}" y="{y + 14}">{c.needed_bytes / GIB:.1f} GiB</text>')
    x = margin + limit * scale
    parts.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{bottom - 8}" stroke="black"'
        ' stroke-dasharray="4 3"/>'
    )
    parts.append(
        f'<text x="{x:.1f}" y="{bottom + 6}" text-anchor="middle">{limit / GIB:.1f} GiB</text>'
    )
    for position, (kind, (_, colour)) in enumerate(_KINDS.items()):
        x = 10 + position * 120
        parts.append(f'<rect x="{x}" y="{bottom + 18}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{bottom + 28}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


_COMFORTABLE = 0.6  # fraction of a device's memory: replicas that need less are fastest
_LOOPBACK = Link("loopback", 1.0, 1.5e-3, "this machine's own network")


@dataclass(frozen=True)
class Choice:
    """A config with a named strategy, and one line with the reason."""

    config: Config
    reason: str


def resolve_auto(config: Config) -> Config:
    """Return the config with a strategy; rank 0 prints it with the reason."""
    facts = rank_facts()
    choice = choose(config, facts.world_size, facts.local_world_size)
    if facts.rank == 0:
        print(f"lockstep: strategy auto: {choice.reason}", flush=True)
    return choice.config


def choose(
    config: Config, world_size: int, local_world_size: int, cluster: GpuCluster | None = None
) -> Choice:
    """Choose a strategy for `world_size` ranks. Raises UsageError: no layout fits."""
    if world_size == 1:
        return Choice(
            config.replaced({"distributed.strategy": SINGLE}), "single, there is one rank"
        )
    cluster = cluster or _cluster_here(config, world_size, local_world_size)
    work = workload_of(config)
    facts = model_size_of(work, config)
    before = chosen.recall(config, cluster, facts)
    changes, reason = before or _chosen(config, cluster, work, facts)
    if before is None:
        chosen.remember(config, cluster, facts, (changes, reason))
    return Choice(config.replaced(changes), reason)


def _chosen(config: Config, cluster: GpuCluster, work: Workload, facts: ModelSize) -> chosen.Chosen:
    """Return the changes that name the strategy for these ranks, and the reason."""
    asked = {"training.gradient_checkpointing": config.training.gradient_checkpointing}
    shows = rank_facts().is_main
    replicated = {"distributed.strategy": REPLICAS}
    layout = layout_of(config, cluster, replicated)
    # numbers that contradict each other are no reason for another layout
    micro_batches(config.replaced(replicated), layout)
    try:
        replicas = evaluate_layout(work, config, cluster, {**replicated, **asked}, facts)
    except ValuesNeededError as error:
        return replicated, f"{REPLICAS}, unless you name another; {error.what}"
    needs = f"{_size(replicas)} of {replicas.limit / GIB:.1f} GiB"
    if replicas.fits and replicas.needed_bytes <= _COMFORTABLE * replicas.limit:
        return replicated, f"{replicas.layout}: {needs} a rank, nothing need be sharded"
    fitting = [
        c
        for c in candidates(work, config, cluster, low=False, pipelines=False, shows=shows)
        if c.fits
    ]
    fitting = fitting or [
        c for c in candidates(work, config, cluster, low=False, shows=shows) if c.fits
    ]
    if not fitting:
        raise UsageError(
            f"no layout of this model fits {cluster.num_gpus} ranks of {cluster.gpu.name}",
            where="distributed.strategy: auto",
            why=f"ddp: {replicas.refused}" if replicas.refused else None,
            fix="`lockstep plan` says by how much; use more ranks or a smaller training.batch_size",
        )
    # The user's mode of checkpointing stays, if a layout fits with it.
    best = next(
        (c for c in fitting if c.checkpointing == asked["training.gradient_checkpointing"]),
        fitting[0],
    )
    lacking = "" if replicas.fits else f"ddp needs {needs}; "
    lacking = f"ddp: {replicas.refused}; " if replicas.refused else lacking
    changes = {key: value for key, value in best.changes.items() if value is not None}
    return changes, f"{best.name()}: {lacking}{_size(best)} a rank, the fastest that fits"


def _size(candidate: Candidate) -> str:
    needed = candidate.needed_bytes
    return f"{needed / 2**20:.0f} MiB" if needed < GIB else f"{needed / GIB:.1f} GiB"


def _cluster_here(config: Config, world_size: int, local_world_size: int) -> GpuCluster:
    """Return this machine's devices as a cluster, with guessed speeds where they are not known."""
    per_node = max(1, local_world_size)
    kind = accelerator.found()
    if kind is not None and config.distributed.device != "cpu":
        device = torch.device(kind, 0)
        name = accelerator.name_of(device)
        total = accelerator.memory_of(device)[3]
        guessed = Gpu(name, total / GIB, 100, 20, 1000, "PCIe 4", "this device; speeds are guessed")
        gpu = known_gpu(name) or guessed
        return GpuCluster(gpu, world_size, per_node, LINKS[gpu.inside], LINKS["InfiniBand HDR"])
    memory = psutil.virtual_memory().total / GIB / per_node
    cpu = Gpu(
        "CPU",
        memory,
        0.1,
        0.1,
        20,
        "loopback",
        "a rank's share of this machine's memory; speeds are guessed",
    )
    return GpuCluster(cpu, world_size, per_node, _LOOPBACK, LINKS["Ethernet 1G"])
