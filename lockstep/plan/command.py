"""`lockstep plan`: from a config, or from a model's size alone, to a table of layouts."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.costs.hardware import GPUS, GpuCluster, cluster_of, known_gpu
from lockstep.errors import UsageError
from lockstep.plan import report
from lockstep.plan.candidates import Candidate, candidates, largest_batch
from lockstep.plan.resources import GIB, calculate_resources
from lockstep.plan.workload import workload_of
from lockstep.strategy import REPLICAS, SINGLE


@dataclass(frozen=True)
class Asked:
    """The command's options; None: not said."""

    gpus: int | None = None
    gpu_type: str | None = None
    interconnect: str | None = None
    per_node: int = 8
    find_batch_size: bool = False
    as_json: bool = False
    write: Path | None = None
    chart: Path | None = None
    price: float | None = None


def plan(config: Config, asked: Asked) -> str:
    """The plan of a config, as text."""
    cluster, said = cluster_for(asked)
    if config.precision.mode == "auto":
        mode = "bf16" if cluster.gpu.has_bf16 else "fp16"
        config = config.replaced({"precision.mode": mode})
        said.append(f"precision.mode auto is {mode} on {cluster.gpu.name}")
    if config.precision.fp8 != "none":
        said.append(f"precision.fp8 {config.precision.fp8} is not counted: memory and time are those of fp8: none")
    work = workload_of(config)
    found = candidates(work, config, cluster, first=tell_first)
    best = found[0] if found else None
    batch = None
    if asked.find_batch_size and best is not None:
        batch = largest_batch(work, config, cluster, best.changes)
        said.append(f"the largest training.batch_size that fits under {best.name()}: {batch}")
    if asked.chart is not None:
        asked.chart.write_text(report.as_svg(found))
        said.append(f"chart: {asked.chart}")
    if asked.write is not None:
        said.append(write(config, best, asked.write, batch))
    if asked.as_json:
        where = {"gpu": asdict(cluster.gpu), "num_gpus": cluster.num_gpus, "between": asdict(cluster.between)}
        return json.dumps(
            {
                "cluster": where,
                "layouts": [report.as_dict(c, cluster) for c in found], "largest_batch_size": batch, "notices": said,
            },
            indent=2,
        )  # fmt: skip
    tokens = work.tokens_per_sample()
    text = report.as_text(found, cluster, tokens_per_sample=tokens, steps=config.training.max_steps, price=asked.price)
    return "\n".join([text, *said])


def tell_first(candidate: Candidate) -> None:
    """Print the memory of the first layout on stderr, while the others are still to be rehearsed."""
    needs = f"{candidate.needed / GIB:.1f} of {candidate.limit / GIB:.1f} GiB a GPU"
    print(f"lockstep: first answer: {candidate.name()} needs {needs}", file=sys.stderr, flush=True)


def cluster_for(asked: Asked) -> tuple[GpuCluster, list[str]]:
    """The cluster that was asked for, or what is here."""
    said = []
    gpu, number = asked.gpu_type, asked.gpus
    if gpu is None or number is None:
        import torch

        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gpu is None:
            gpu = "A100-80GB"
            known = known_gpu(torch.cuda.get_device_name(0)) if here else None
            if known is not None:
                gpu = known.name
                said.append(f"GPU: {gpu}, as here")
            else:
                said.append(f"GPU: {gpu}; --gpu-type names another")
        number = max(1, here) if number is None else number
    return cluster_of(number, gpu, asked.interconnect, per_node=asked.per_node), said


def write(config: Config, best: Candidate | None, path: Path, batch: int | None) -> str:
    """Write the config of the best layout.

    Raises:
        UsageError: nothing fits.
    """
    if best is None or not best.fits:
        raise UsageError("no layout fits, so there is no config to write", fix="use more GPUs or a smaller batch")
    changes: dict[str, Any] = dict(best.changes)
    if batch and config.training.global_batch_size is None:
        changes["training.batch_size"] = batch
    path.write_text(config.replaced(changes).to_yaml())
    return f"wrote {path}: {best.name()}"


def plan_by_size(params: float, sequence_length: int, batch_size: int, headroom: float, asked: Asked) -> str:
    """The plan of a transformer of which only the size is known.

    Raises:
        UsageError: a size or a number below 1.
    """
    number = 1 if asked.gpus is None else asked.gpus
    rows = []
    for sharding in ("none", "gradients", "full") if number > 1 else ("none",):
        for checkpointing in (False, True):
            needs = calculate_resources(
                params, sequence_length, batch_size, gpus=number, sharding=sharding,
                checkpointing=checkpointing, headroom=headroom,
            )  # fmt: skip
            rows.append((sharding, checkpointing, needs))
    if asked.as_json:
        return json.dumps(
            [{"sharding": s, "checkpointing": c, **asdict(n), "total": n.total} for s, c, n in rows], indent=2
        )
    shape = rows[0][2].shape
    columns = ("params", "grads", "optim.", "activ.", "working", "total")
    lines = [
        f"{params:.3g} parameters (as {shape.layers} layers of width {shape.width}), {sequence_length} positions, "
        f"{batch_size} a micro-batch, {number} GPU{'s' * (number > 1)}; GiB a GPU"
        + (f", with {headroom:.0%} headroom" if headroom else ""),
        f"{'strategy':<24}{'recompute':>10}" + "".join(f"{column:>9}" for column in columns) + "  fits",
    ]
    names = {"none": REPLICAS if number > 1 else SINGLE, "gradients": "fsdp shard_grad_op", "full": "fsdp full_shard"}
    for sharding, checkpointing, n in rows:
        parts = (n.parameters, n.gradients, n.optimizer, n.activations, n.working)
        cells = "".join(f"{part / GIB:9.1f}" for part in parts)
        fits = ", ".join(name for name, gpu in GPUS.items() if n.fits(gpu.memory)) or "none of the table"
        lines.append(f"{names[sharding]:<24}{'yes' if checkpointing else 'no':>10}{cells}{n.gib:9.1f}  {fits}")
    return "\n".join(lines)
