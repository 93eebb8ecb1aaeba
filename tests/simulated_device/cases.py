"""What one process does on the simulated device: the step, and what copies, saves, evaluates and
counts around it.
"""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from lockstep import checkpoint
from lockstep.monitor import figures
from tests.simulated_device import device, mistakes
from tests.simulated_device.device import NAME
from tests.simulated_device.runs import SETTLED, Tokens, check_same, plain, run, trainer_on

# than those of a plain run
OTHER_NUMBERS = ("clipped by value", "clipped adaptively", "bf16", "scaled losses")
MARK = "# host waits"
CLIP = "training.gradient_clip"
ALIKE: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({}, 1e-4),
    "fused": ({"training.optimizer_args": {"fused": True}}, 1e-4),
    "clipped by value": ({f"{CLIP}.strategy": "value", f"{CLIP}.value": 0.01}, 1e-4),
    "clipped adaptively": ({f"{CLIP}.strategy": "adaptive", f"{CLIP}.value": 0.01}, 1e-4),
    "bf16": ({"precision.mode": "bf16"}, 2e-2),
    "scaled losses": ({"precision.mode": "fp16"}, 2e-2),
    "recomputed": ({"training.gradient_checkpointing": "full"}, 1e-4),
    "recomputed in runs": ({"training.gradient_checkpointing": "sequential"}, 1e-4),
    "equal bits": ({"distributed.reproducible": True}, 1e-4),
    "pinned batches": ({"data.pin_memory": True}, 1e-4),
    "skipping bad numbers": ({"training.bad_numbers.action": "skip"}, 1e-4),
    "dp": ({"distributed.strategy": "dp"}, 1e-4),
}
WAITS_ONCE = {
    "plain",
    "fused",
    "clipped by value",
    "clipped adaptively",
    "bf16",
    "recomputed",
    "recomputed in runs",
    "equal bits",
    "pinned batches",
    "dp",
}


def like_on_the_cpu(name: str) -> None:
    """The same numbers, no race, and no wait of the host but the marked ones; one in a
    plain step.
    """
    settings, within = ALIKE[name]
    there = run(**settings)
    check_same(plain("cpu", **(settings if name in OTHER_NUMBERS else {})), there, within)
    assert not there.races, there.races
    check_marked([wait for step in there.waits for wait in step])
    if name in WAITS_ONCE:
        for step in there.waits[SETTLED:]:
            assert [wait.kind for wait in step] == ["event"], step  # of the step before


def check_marked(waits: list[device.Wait]) -> None:
    unmarked = [
        wait for wait in waits if MARK not in wait.text and not wait.where.startswith("tests")
    ]
    assert not unmarked, "\n".join(map(str, sorted(set(unmarked))))


def a_whole_run(folder: Path) -> None:
    """Evaluations, checkpoints in the background, phases, logs: the same files as on the CPU, and
    no race.
    """
    saved = {}
    for kind in ("cpu", NAME):
        device.forget()
        trainer = trainer_on(
            kind,
            4,
            folder / kind,
            **{"checkpoint.save_steps": 2, "training.eval_steps": 3, "monitor.log_steps": 2},
        )
        trainer.train(Tokens(), Subset(Tokens(), range(8)))
        assert not device.races, device.races
        saved[kind] = {
            step: checkpoint.weights(folder / kind / "checkpoints" / f"step-{step:08d}")
            for step in (2, 4)
        }
    check_marked(device.waits)
    for step, weights in saved["cpu"].items():
        for name, value in weights.items():
            torch.testing.assert_close(value, saved[NAME][step][name], rtol=0, atol=1e-3)
    losses = [(folder / kind / "metrics.jsonl").read_text().count("eval_loss") for kind in saved]
    assert losses[0] == losses[1] > 0


def resumed(folder: Path) -> None:
    """A run that continues from a checkpoint on the device ends as the one that was not
    interrupted.
    """
    settings = {"checkpoint.save_steps": 2}
    trainer_on(NAME, 4, folder / "whole", **settings).train(Tokens())
    trainer_on(NAME, 2, folder / "cut", **settings).train(Tokens())
    trainer_on(NAME, 4, folder / "cut", **settings).train(Tokens())
    one, other = (
        checkpoint.weights(folder / each / "checkpoints" / "step-00000004")
        for each in ("whole", "cut")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def main(folder: str, names: list[str]) -> dict[str, str]:
    """Run cases; return (name → traceback) of those that failed, and "" of the others."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    device.install()
    figures._SIZE = 16  # of the matrices by which a device without a data sheet is measured
    cases: dict[str, Callable[[], None]] = {
        f"as on the CPU: {n}": lambda n=n: like_on_the_cpu(n) for n in ALIKE
    }  # type: ignore[misc]
    cases["a whole run"] = lambda: a_whole_run(Path(folder))
    cases["resumed"] = lambda: resumed(Path(folder))
    cases |= {f"found: {mistake.__doc__}": mistake for mistake in mistakes.ALONE}
    return {name: outcome(cases[name]) for name in names}


def outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except BaseException:
        return traceback.format_exc()
    return ""
