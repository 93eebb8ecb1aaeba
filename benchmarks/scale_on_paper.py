"""Scale on paper: what the simulator of `lockstep plan` says of runs on 8 to 100,000 GPUs, beside
published ones.

    python -m benchmarks.scale_on_paper [--write]

Nothing runs but a rehearsal of each model on tensors that hold nothing. The constants are those of
`lockstep plan`, set by five runs of torchtitan and by none of these. FSDP is simulated as Lockstep
lays it. Tensor parallelism, which Lockstep does not offer, is put together of the simulator's
parts: a group of 8 GPUs computes an eighth each, adds up each layer's activations over NVLink twice
in either pass, which nothing hides, and is one rank of a pipeline.
"""

import sys
from dataclasses import replace
from functools import cache

from benchmarks.curves import Curve, as_svg
from benchmarks.goodput import Reliability, best_interval, expected_goodput
from benchmarks.page import RESULTS, page, table, tell
from benchmarks.scale_published import (
    GPT_1T,
    GPT_175B,
    LLAMA_405B,
    ON_H100,
    PUBLISHED,
    Cut,
    Model,
    Sharded,
)
from lockstep.config import Config, config_from
from lockstep.costs.hardware import LINKS, GpuCluster, cluster_of, find_gpu, find_link, group_of
from lockstep.costs.steps import ModelSize
from lockstep.division import ceil_div
from lockstep.layout import Layout
from lockstep.parallel.pipeline.plan import StageTime, pipeline_step
from lockstep.plan.candidates import pieces_of
from lockstep.plan.layouts import model_size_of
from lockstep.plan.messages import Messages
from lockstep.plan.rehearsal import Rehearsal, rehearse
from lockstep.plan.workload import workload_of
from lockstep.strategy import strategy_named

FULLEST = 512  # micro-batches of a pipeline: more fill it no better
COUNTS = (8, 32, 128, 512, 2048, 8192, 32768, 98304)
REHEARSED = 512  # GPUs at the most: beyond, a rank's own work is the same


def _config(model: Model, batch: int, checkpointing: str, sharding: str) -> Config:
    return config_from(
        {
            "model.name": "transformer",
            "model.args": {
                "n_layer": model.layers,
                "n_embd": model.width,
                "n_head": model.heads,
                "n_kv_head": model.kv_heads,
                "mlp_hidden": model.hidden,
                "vocab_size": model.vocabulary,
                "block_size": model.positions,
            },
            "training.batch_size": batch,
            "training.gradient_checkpointing": checkpointing,
            "precision.mode": "bf16",
            "precision.param_dtype": "bf16",
            "distributed.strategy": "fsdp",
            "distributed.fsdp.sharding_strategy": sharding,
        }
    )


@cache
def _rehearsed(
    model: Model, batch: int, checkpointing: str, sharding: str, layout: Layout
) -> tuple[Config, ModelSize, Rehearsal]:
    config = _config(model, batch, checkpointing, sharding)
    work = workload_of(config)
    return config, model_size_of(work, config), rehearse(work, config, layout)


def sharded(run: Sharded, gpus: int) -> float:
    """MFU under FSDP on so many GPUs."""
    cluster = cluster_of(gpus, run.gpu, run.link)

    def layout(count: int) -> Layout:
        shard = min(8, count) if run.sharding == "hybrid_shard" else count
        return Layout("fsdp", 1, count // shard, shard)

    config, facts, rehearsal = _rehearsed(
        run.model, run.batch, run.checkpointing, run.sharding, layout(min(gpus, REHEARSED))
    )
    step = strategy_named(layout(gpus).strategy).step_time(
        pieces_of(facts, rehearsal, Messages(layout(gpus), cluster), layout(gpus)),
        config.step,
        layout(gpus),
        cluster,
        1,
    )
    return 3 * rehearsal.work.forward.flops / (step.seconds * cluster.gpu.half * 1e12)


def cut(run: Cut, gpus: int, samples: int | None = None) -> float:
    """MFU with tensor parallelism and a pipeline, replicated until all GPUs have work.

    Args:
        samples: of a step, another number than the run's own.
    """
    model = run.model
    gpu = find_gpu(run.gpu)
    link = find_link(run.link)
    _, facts, rehearsal = _rehearsed(model, 1, run.checkpointing, "full_shard", Layout("single"))
    replicas = gpus // (run.tensor * run.pipeline)
    micro_batches = ceil_div(samples or run.samples, replicas)
    group = GpuCluster(gpu, run.tensor, run.tensor, LINKS[gpu.inside], link)
    activations = 2.0 * model.positions * model.width
    parts = run.pipeline * run.chunks
    added_up = 2 * model.layers / parts * group_of(group, run.tensor).all_reduce(activations)
    again = 2 if run.checkpointing == "full" else 1
    stage = StageTime(
        group.seconds(rehearsal.work.forward) / run.tensor / parts + added_up,
        group.seconds(rehearsal.work.backward) / run.tensor / parts + again * added_up,
        activations,
        4 * facts.parameters / parts,
    )
    # a group sends over those of all its GPUs
    cards = replace(link, bandwidth=link.bandwidth * run.tensor)
    groups = GpuCluster(gpu, replicas * run.pipeline, 1, LINKS[gpu.inside], cards)
    schedule = config_from(
        {
            "distributed.pipeline.schedule": "Interleaved1F1B",
            "distributed.pipeline.stages_per_rank": run.chunks,
        }
    )
    update = group.seconds(rehearsal.work.update) / run.tensor / run.pipeline / replicas
    layout = Layout("pipeline", run.pipeline, 1, replicas)
    step = pipeline_step([stage] * parts, schedule.step, layout, groups, micro_batches, update)
    flops = 3 * rehearsal.work.forward.flops * (samples or run.samples)
    return flops / (step.seconds * gpus * gpu.half * 1e12)


def mfu(run: Sharded | Cut, gpus: int) -> float:
    return sharded(run, gpus) if isinstance(run, Sharded) else cut(run, gpus)


def layout_of(run: Sharded | Cut) -> str:
    if isinstance(run, Sharded):
        return f"fsdp, {run.batch} × {run.model.positions} a GPU"
    return (
        f"tensor {run.tensor}, pipeline {run.pipeline} × {run.chunks} stages, {run.samples} samples"
    )


def compared() -> list[str]:
    rows = []
    for one in PUBLISHED:
        found = mfu(one.run, one.gpus)
        rows.append(
            f"| {one.run.model.name} | {one.gpus:,} {one.run.gpu} | {layout_of(one.run)} |"
            f" {one.mfu:.1%} | {found:.1%} | {found / one.mfu - 1:+.0%} | {one.source} |"
        )
        print(rows[-1], flush=True)
    return rows


def replicas_of(run: Cut) -> list[int]:
    """GPUs of 1, 2, 4 … replicas, to about 100,000."""
    one = run.tensor * run.pipeline
    return [one * 2**power for power in range(20) if one * 2**power <= 1.35e5]


def weak() -> list[Curve]:
    """Each GPU, or each replica, keeps its work."""
    curves = []
    for name in ("7B", "70B"):
        curves.append(
            Curve(f"MPT-{name}, fsdp", COUNTS, [sharded(ON_H100[name], n) for n in COUNTS])
        )
    hybrid = replace(ON_H100["7B"], sharding="hybrid_shard")
    curves.append(Curve("MPT-7B, hybrid", COUNTS, [sharded(hybrid, n) for n in COUNTS]))
    for run, data in ((GPT_1T, 6), (LLAMA_405B, 64)):
        gpus = replicas_of(run)
        each = run.samples // data
        found = [cut(run, n, each * n // (run.tensor * run.pipeline)) for n in gpus]
        curves.append(Curve(f"{run.model.name}, TP 8", gpus, found))
    return curves


def strong() -> list[Curve]:
    """The step stays as it is published: the more GPUs, the fewer micro-batches fill a pipeline."""
    curves = []
    for run in (LLAMA_405B, GPT_175B, GPT_1T):
        one = run.tensor * run.pipeline
        gpus = [n for n in replicas_of(run) if 1 <= run.samples * one / n <= FULLEST]
        curves.append(Curve(run.model.name, gpus, [cut(run, n) for n in gpus]))
    return curves


def points(runs: tuple[Sharded | Cut, ...]) -> list[Curve]:
    """What is published of these, as marks."""
    found = []
    for run in runs:
        own = [one for one in PUBLISHED if one.run == run]
        name = f"{run.model.name}, published"
        found.append(Curve(name, [one.gpus for one in own], [one.mfu for one in own], marks=True))
    return found


def goodput(gpus: int) -> float:
    """Of the time, what is training, at the rate of failures of Llama 3 405B: 466 in 54 days on
    16,384 GPUs.
    """
    machine = Reliability(54 * 24 * 16384 / 466, restart_seconds=600, save_seconds=10)
    mean = machine.mean_time(gpus)
    return expected_goodput(best_interval(10, mean), 10, 600, mean)


def figures(curves: list[Curve]) -> list[str]:
    return [
        f"| {one.name} | {n:,} | {mfu:.1%} |"
        for one in curves
        for n, mfu in zip(one.x, one.y, strict=True)
    ]


def main() -> None:
    rows = compared()
    growing = weak()
    fixed = strong()
    lost = [f"| {n:,} | {goodput(n):.1%} |" for n in (1024, 4096, 16384, 65536, 98304)]
    text = page(
        "Scale on paper: the simulator beside published runs",
        "python -m benchmarks.scale_on_paper --write",
        "computed, not run",
        [
            (
                "MFU counts the operations of the model, attention over all pairs, and none twice"
                " (of Megatron's figures,"
            ),
            (
                "which count recomputation, three quarters are that). No constant was set by any of"
                " these runs. FSDP is"
            ),
            (
                "simulated as Lockstep lays it; tensor parallelism, which Lockstep does not offer,"
                " is put together of the"
            ),
            (
                "simulator's parts, and nothing hides what it sends. Papers do not say how many"
                " stages a rank holds; two"
            ),
            "or three are taken for Megatron, six for MegaScale, and one layer each for Llama.",
        ],
        "| model | GPUs | layout | published | here | difference | source |",
        rows,
        [
            "## Weak scaling: each replica keeps its work",
            "",
            "![MFU over GPUs](scale_on_paper_weak.svg)",
            "",
            *table("| run | GPUs | MFU |", figures(growing)),
            "",
            "## Strong scaling: the step stays",
            "",
            "![MFU over GPUs](scale_on_paper_strong.svg)",
            "",
            *table("| run | GPUs | MFU |", figures(fixed)),
            "",
            "## What failures leave",
            "",
            (
                "The share of the time that is training and is kept, at the rate of failures of"
                " Llama 3 405B (466 in 54"
            ),
            (
                "days on 16,384 GPUs), with saves of 10 s at the best interval and restarts of 10"
                " minutes."
            ),
            "",
            *table("| GPUs | kept |", lost),
        ],
    )
    write = "--write" in sys.argv
    tell(text, RESULTS / "scale_on_paper.md" if write else None)
    charts = {
        "weak": (growing, (ON_H100["7B"], ON_H100["70B"], GPT_1T, LLAMA_405B)),
        "strong": (fixed, (LLAMA_405B, GPT_175B, GPT_1T)),
    }
    for name, (curves, runs) in charts.items():
        svg = as_svg([*curves, *points(runs)], "GPUs", f"MFU, {name} scaling")
        if write:
            (RESULTS / f"scale_on_paper_{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
