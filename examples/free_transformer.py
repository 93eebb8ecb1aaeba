"""The Free Transformer beside its baseline, on the same data for the same steps: python
examples/free_transformer.py

Trains both on two ranks, the baseline with the same layers and without the latent, and prints their
losses on text that they never saw, and what the latent says: its divergence from fair coins (KL),
in bits a token. `kappa` nats of it cost nothing; more is added to the loss.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lockstep import checkpoint
from lockstep.config import load_config
from lockstep.data import build_data
from lockstep.models import build_model

SIZES = [
    "model.args.n_layer=4",
    "model.args.n_embd=96",
    "model.args.n_head=4",
    "data.args.block_size=128",
]
LENGTH = ["training.max_steps=300", "training.warmup_steps=20", "training.global_batch_size=16"]
MODELS = {
    "baseline": ["ready/transformer.yaml"],
    "free": ["ready/free_transformer.yaml", "model.args.latent_bits=8"],
}


def terms(run: Path, samples: int = 256) -> dict[str, float]:
    """Means over the valid targets of validation samples, in nats: cross_entropy, and of the latent
    penalty and kl.
    """
    config = load_config(run / "config.yaml")
    data = build_data(config.data, seed=config.training.seed)
    model = build_model(config.model, data.facts).eval()
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    assert data.validation is not None
    model.load_state_dict(checkpoint.weights(newest))
    torch.manual_seed(0)
    count = 0
    sums = dict[str, float]()
    for first in range(0, min(samples, len(data.validation)), 8):
        batch = torch.utils.data.default_collate(
            [data.validation[i] for i in range(first, first + 8)]
        )
        with torch.no_grad():
            outputs: Any = model(*model.inputs(batch))
            found = (
                model.loss_terms(outputs, batch)
                if config.model.name == "free_transformer"
                else {"cross_entropy": model.loss(outputs, batch)}
            )
        count += int(model.count(batch))
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in found.items()}
    return {name: value / count for name, value in sums.items()}


def table(runs: dict[str, Path]) -> str:
    lines = [f"{'':10} {'loss':>8} {'cross-entropy':>14} {'KL, bits a token':>17}"]
    for name, run in runs.items():
        found = terms(run)
        loss = found["cross_entropy"] + found.get("penalty", 0.0)
        kl = f"{found['kl'] / math.log(2):.3f}" if "kl" in found else "–"
        lines.append(f"{name:10} {loss:8.3f} {found['cross_entropy']:14.3f} {kl:>17}")
    return "\n".join(lines)


def main(overrides: list[str]) -> int:
    runs = {name: Path("runs", name) for name in MODELS}
    for name, (config, *args) in MODELS.items():
        command = [
            "train",
            config,
            *args,
            *SIZES,
            *LENGTH,
            *overrides,
            "--output-dir",
            str(runs[name]),
        ]
        code = subprocess.call(
            [sys.executable, "-m", "lockstep", *command, "--nproc-per-node", "2"]
        )
        if code:
            return code
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
