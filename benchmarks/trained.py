"""What small models of one size reach on the same text, by nanoGPT's published recipe for a CPU.

Each is an ordinary `lockstep train` of one process, with 12 × 64 characters a step: 2,000 steps as
published, and 500 (`short`) with a schedule that ends there, since BDH computes several times as
much with each parameter. The Free Transformer's own loss leaves κ nats of its latent out; beside it
stands the whole bound, CE + KL, which is comparable.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.curves import Curve, as_svg
from benchmarks.page import RESULTS, machine, page, tell
from lockstep import checkpoint
from lockstep.config import load_config
from lockstep.data import build_data
from lockstep.evaluate.sample import load_model
from lockstep.report.read import read_run

BLOCK = 64
SIZE: dict[str, Any] = {"n_layer": 4, "n_embd": 128, "n_head": 4}
RECIPE: dict[str, Any] = {
    "max_steps": 2000,
    "batch_size": 12,
    "eval_batch_size": 64,
    "learning_rate": 1e-3,
    "lr_schedule": "cosine",
    "min_lr_ratio": 0.1,
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "optimizer_args": {"betas": [0.9, 0.99]},
    "gradient_clip": 1.0,
    "eval_steps": 250,
}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "name": "hf:gpt2",
        "args": (
            SIZE
            | {
                "vocab_size": 256,
                "n_positions": BLOCK,
                "bos_token_id": 0,
                "eos_token_id": 0,
                "attn_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "resid_pdrop": 0.0,
            }
        ),
    },
    "transformer": {"name": "transformer", "args": SIZE},
    "transformer, short": {"name": "transformer", "args": SIZE},
    "Free Transformer, short": {
        "name": "free_transformer",
        "args": SIZE | {"latent_bits": 8, "mlp_hidden": 230},
    },
    "BDH, short": {
        "name": "bdh",
        "args": SIZE | {"n_layer": 3, "mlp_multiplier": 16, "dropout": 0.0},
    },
}


@dataclass
class Trained:
    """A finished run: its parameters, its evaluations, seconds, and for the Free Transformer (CE,
    KL) a character.
    """

    parameters: int
    evaluations: list[tuple[int, float]]
    step_seconds: float
    terms: tuple[float, float] | None = None


def train(name: str, text: Path, folder: Path) -> Trained:
    """Train one, or read what an earlier call has trained."""
    run = folder / name.replace(" ", "_").replace(",", "")
    steps = RECIPE["max_steps"] // (4 if name.endswith("short") else 1)
    config = {
        "model": MODELS[name],
        "training": RECIPE | {"max_steps": steps},
        "precision": {"mode": "fp32"},
        "data": {"name": "text", "args": {"path": str(text.resolve()), "block_size": BLOCK}},
        "checkpoint": {"save_steps": steps},
        "monitor": {"sinks": ["jsonl"], "log_steps": 50},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = run.with_suffix(".yaml")
    path.write_text(json.dumps(config))
    if not run.exists() or read_run(run).status != "done":
        subprocess.run(
            [sys.executable, "-m", "lockstep", "train", path, "--output-dir", run], check=True
        )
    data = read_run(run)
    return Trained(
        data.start["parameters"],
        [(row["step"], row["eval_loss"]) for row in data.evaluations],
        sorted(row["step_seconds"] for row in data.rows)[len(data.rows) // 2],
        bound(run) if name.startswith("Free") else None,
    )


@torch.no_grad()
def bound(run: Path) -> tuple[float, float]:
    """Cross entropy and divergence of a Free Transformer, in nats a character of the
    held-out text.
    """
    config = load_config(run / "config.yaml")
    data = build_data(config.data, seed=config.training.seed)
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    assert data.validation is not None
    model = load_model(config, data, newest)
    torch.manual_seed(0)
    sums = torch.zeros(2)
    count = 0
    for batch in torch.utils.data.DataLoader(data.validation, batch_size=64):
        terms = model.loss_terms(model(batch["input_ids"]), batch)
        sums += torch.stack([terms["cross_entropy"], terms["kl"]])
        count += batch["targets"].numel()
    entropy, divergence = (sums / count).tolist()
    return entropy, divergence


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True, help="tinyshakespeare.txt")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/trained"), help="where the runs are, and are kept"
    )
    parser.add_argument("--only", default=";".join(MODELS), help="names, with ; between")
    parser.add_argument(
        "--write", action="store_true", help="write results/trained.md and trained.svg"
    )
    args = parser.parse_args()
    found = {name: train(name, args.text, args.runs) for name in args.only.split(";")}
    rows = []
    for name, one in found.items():
        last = f"{one.evaluations[-1][1]:.4f}"
        if one.terms is not None:
            last += (
                f" (cross entropy {one.terms[0]:.4f}, divergence {one.terms[1]:.4f}: bound"
                f" {sum(one.terms):.4f})"
            )
        rows.append(f"| {name} | {one.parameters:,} | {last} | {1000 * one.step_seconds:.0f} ms |")
    steps = [step for step, _ in next(iter(found.values())).evaluations]
    curves = [
        [
            name,
            *(f"{loss:.3f}" for _, loss in one.evaluations),
            *[""] * (len(steps) - len(one.evaluations)),
        ]
        for name, one in found.items()
    ]
    text = page(
        "Small models on Shakespeare",
        "python -m benchmarks.trained --text tinyshakespeare.txt --write"
        + ("" if args.only == parser.get_default("only") else f" --only '{args.only}'"),
        machine() + ", one core a run, float32",
        [
            "2,000 steps of 12 × 64 characters (short: 500), AdamW (β 0.9, 0.99; weight decay 0.1),"
            " a rate of 1e-3 that warms up over 100 steps and falls to 1e-4 on a cosine, gradients"
            " clipped at 1, no dropout: nanoGPT's recipe for a CPU. Losses are in nats a character,"
            " over the last tenth of the text, which no run trained on. Other work shared the"
            " machine: the times say little."
        ],
        "| model | parameters | loss at the end | median step |",
        rows,
        [
            "## On the way",
            "",
            "| step | " + " | ".join(map(str, steps)) + " |",
            "|" + "---|" * (len(steps) + 1),
            *(f"| {' | '.join(row)} |" for row in curves),
            "",
            "![loss over steps](trained.svg)",
        ],
    )
    tell(text, RESULTS / "trained.md" if args.write else None)
    if args.write:
        drawn = [Curve(name, *zip(*one.evaluations, strict=True)) for name, one in found.items()]
        (RESULTS / "trained.svg").write_text(
            as_svg(drawn, "steps", "loss on held-out text, nats a character", 1.88)
        )


if __name__ == "__main__":
    main()
