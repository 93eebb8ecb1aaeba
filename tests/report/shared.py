"""Run directories as training writes them, with known content."""

import json
import math
import random
from pathlib import Path
from typing import Any

from lockstep.config import config_from
from lockstep.run_directory.records import RunDirectory, append_line

BEGUN = 1_790_000_000.0
GIB = 2**30


def spread(values: list[float]) -> list[float]:
    ordered = sorted(values)
    most = max(range(len(values)), key=values.__getitem__)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1], most]


def step_row(
    step: int, now: float, ranks: int, *, data: float, slow: int | None, noise: random.Random
) -> dict[str, Any]:
    """A logged step; `data`: seconds of waiting for it; `slow`: a rank whose compute takes 1.6 × as
    long.
    """
    compute = [
        0.040 * (1.6 if rank == slow else noise.uniform(0.97, 1.05)) for rank in range(ranks)
    ]
    wait = [max(compute) - own + 0.004 for own in compute] if ranks > 1 else [0.0]
    seconds = max(compute) + 0.004 * (ranks > 1) + data + 0.0035
    loss = 1.6 + 2.6 * math.exp(-step / 130) + noise.gauss(0, 0.04)
    memory = [(5.1 + 0.05 * rank) * GIB for rank in range(ranks)]
    return {
        "step": step,
        "loss": loss,
        "grad_norm": 0.6 + 1.5 * math.exp(-step / 80) * noise.uniform(0.8, 1.2),
        "lr": 1e-3 * min(1, step / 40) * (0.55 + 0.45 * math.cos(math.pi * step / 600)),
        "samples": 64,
        "tokens": 16384.0,
        "clipped": 1.0 if noise.random() < 0.4 else 0.0,
        "skipped": False,
        "step_seconds": seconds,
        "tokens_per_second": 16384 / seconds,
        "memory_bytes": memory[0],
        "time": now,
        "flops_per_second": 2e13,
        "mfu": 0.41 * 0.0475 / seconds,
        "phases": {
            "data": spread([data * noise.uniform(0.9, 1.1) for _ in range(ranks)]),
            "forward_backward": spread(compute),
            "optimizer": spread([0.003] * ranks),
            "other": spread([0.0005] * ranks),
            **({"communication": spread(wait)} if ranks > 1 else {}),
            **(
                {"evaluation": spread([1.2] * ranks), "checkpoint": spread([0.6] * ranks)}
                if step % 100 == 1
                else {}
            ),
        },
        "memory": {
            "peak": spread(memory),
            "host": spread([1.9 * GIB] * ranks),
            "total": [80 * GIB] * 3 + [0],
            "allocated": spread([m * 0.8 for m in memory]),
            "reserved": spread([m * 1.1 for m in memory]),
        },
        **({"own_seconds": [own + data + 0.0035 for own in compute]} if ranks > 1 else {}),
        "gradient_norms": {
            f"layers.{n}": 0.3 / (n + 1) * math.exp(-step / 300) * noise.uniform(0.8, 1.2)
            for n in range(4)
        },
    }


def write_run(
    path: Path,
    *,
    steps: int = 600,
    ranks: int = 4,
    data: float = 0.012,
    slow_from: int | None = 360,
    killed_at: int | None = None,
    ends: bool = True,
    seed: int = 0,
    log_steps: int = 2,
    data_workers: int | None = None,
    **config: Any,
) -> RunDirectory:
    """A run of `ranks` ranks, logged every `log_steps` steps, saved and evaluated every 100.

    Args:
        slow_from: rank 2 is a straggler from this step on.
        killed_at: it is killed there and goes on from the checkpoint before.
        ends: False: it stops without a word.
        data_workers: of the loader that it read from; None: it does not tell.
    """
    run = RunDirectory(path)
    noise = random.Random(seed)
    now = BEGUN
    run.create()
    run.config.write_text(
        config_from({"model.name": "transformer", "training.max_steps": steps, **config}).to_yaml()
    )

    def event(kind: str, **fields: Any) -> None:
        append_line(run.events, {"kind": kind, "time": now, **fields})

    about = {
        "layout": f"fsdp:{ranks}" if ranks > 1 else "single",
        "world_size": ranks,
        "total_steps": steps,
        "parameters": 124_439_808,
        "versions": {"lockstep": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "peak_source": "A100, data sheet, bf16",
        "ranks": [
            {"rank": r, "host": f"node{r // 2}", "device": "NVIDIA A100-SXM4-80GB"}
            for r in range(ranks)
        ],
        "lines": ["strategy", "global batch 64 = 8 micro-batches × 8, over 4 data-parallel ranks"],
    }
    about |= {} if data_workers is None else {"data_workers": data_workers}
    event("start", step=0, **about)
    now = now + 9
    step = 0
    while step < steps:
        step += log_steps
        slow = 2 if slow_from is not None and step >= slow_from and ranks > 2 else None
        row = step_row(step - 1, now, ranks, data=data, slow=slow, noise=noise)
        now += log_steps * row["step_seconds"]
        append_line(run.metrics, row)
        if step == slow_from and ranks > 2:
            text = "rank 2 on node1 is slow: its own work takes 1.60 × as long as the other ranks'"
            event(
                "straggler",
                step=step,
                rank=2,
                host="node1",
                phase="forward_backward",
                ratio=1.6,
                text=text,
            )
        if step % 100 == 0:
            now += 1.8
            append_line(
                run.metrics,
                {"step": step, "eval_loss": 1.72 + 2.5 * math.exp(-step / 130), "time": now},
            )
            event("save", step=step, checkpoint=f"step-{step:08}")
        if step == killed_at:
            now += 6
            event("restart", reason="rank 3 of 4 failed: killed by SIGKILL", left=2)
            step = step // 100 * 100
            event("lost_steps", step=step, come_to=killed_at, seconds=run.drop_after(step))
            now += 8
            event("resume", step=step, checkpoint=f"checkpoints/step-{step:08}")
            event("start", step=step, **about)
            killed_at = None
    if ends:
        event("stop", step=steps, reason="done")
    return run


def write_profile(run: RunDirectory, ranks: int = 4) -> None:
    shares = {
        "compute": 0.62,
        "overlapped communication": 0.17,
        "exposed communication": 0.12,
        "idle": 0.09,
    }
    operators = [
        ("aten::mm", 0.41, 960),
        ("aten::_scaled_dot_product_flash_attention", 0.16, 96),
        ("aten::add_", 0.05, 9),
    ]
    summary = {
        "about": "Steps 40 to 42 on 4 ranks.",
        "ranks": [{"rank": rank, "shares": shares, "seconds": 0.18} for rank in range(ranks)],
        "operators": [
            {"name": n, "share": s, "seconds": s * 0.18, "calls": c} for n, s, c in operators
        ],
    }
    folder = run.path / "profile"
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary))
