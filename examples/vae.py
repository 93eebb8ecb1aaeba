"""A VAE of handwritten digits, with pictures: python examples/vae.py [KEY=VALUE …]

Trains the config that ships on two ranks, exports the weights as safetensors, loads them with plain
torch, and draws what the model makes of digits that it never saw (above: the digits, below: their
reconstructions), and of noise.
"""

import subprocess
import sys
from pathlib import Path

import torch
from pictures import write_png
from safetensors.torch import load_file

from lockstep.config import load_config
from lockstep.data import build_data
from lockstep.models import build_model

RUN = Path("runs/vae")


def draw(run: Path, weights: Path) -> list[Path]:
    """Pictures of a model that was trained in `run`, with weights from a safetensors file; their
    paths.
    """
    config = load_config(run / "config.yaml")
    data = build_data(config.data, seed=config.training.seed)
    model = build_model(config.model, data.facts)
    model.load_state_dict(load_file(weights))
    model.eval()
    assert data.validation is not None
    unseen = torch.stack([data.validation[i]["image"] for i in range(8)])
    with torch.no_grad():
        made = model(unseen)["reconstruction"]
        noise = torch.randn(
            32, model.latent.mu.out_features, generator=torch.Generator().manual_seed(0)
        )
        image = model.latent.expand(noise)
        for stage in model.decoder:
            image = stage(image)
    pictures = [run / "reconstructions.png", run / "samples.png"]
    write_png(pictures[0], torch.cat([unseen, made])[:, 0], columns=8)
    write_png(pictures[1], image[:, 0], columns=8)
    return pictures


def main(overrides: list[str]) -> int:
    lockstep = [sys.executable, "-m", "lockstep"]
    for command in (
        ["train", "ready/vae.yaml", "--nproc-per-node", "2", "--output-dir", str(RUN), *overrides],
        ["checkpoint", "export", str(RUN), "--output", str(RUN / "vae.safetensors")],
    ):
        code = subprocess.call([*lockstep, *command])
        if code:
            return code
    print("pictures:", *draw(RUN, RUN / "vae.safetensors"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
