"""A loop of one's own with two models and two optimizers: a small GAN of handwritten digits.

    python examples/gan.py                                  one process
    lockstep launch --nproc-per-node 2 examples/gan.py      on two ranks: the same losses

Each model has a `Trainer`, whose `steps` is a generator: one `next` is one step. Both go through
the same images in the same order. Each draws its noise in its own forward pass, where random
numbers depend on the seed, the step and the micro-batch, never on the number of ranks. A model that
calls the other's layers needs them whole on every rank: strategies single and ddp.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from pictures import write_png
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader

from lockstep import Trainer, is_main_process

NOISE = 16
REAL = 1.0
FAKE = 0.0


class Generator(nn.Module):
    """images [B, 64], of which only B is read → images made of noise [B, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
        )
        # a list, so that the judge's parameters are not the generator's
        self.scoring: list[nn.Module] = []

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(noise_for(images))

    def loss(self, made: Tensor, _images: Tensor) -> Tensor:
        (scoring,) = self.scoring
        # the judge learns nothing
        fixed = {name: parameter.detach() for name, parameter in scoring.named_parameters()}
        return against(REAL, functional_call(scoring, fixed, made))

    def count(self, images: Tensor) -> int:
        return len(images)


class Judge(nn.Module):
    """images [B, 64] → (scores of them, scores of as many that the generator makes),
    each [B, 1].
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
        self.making: list[nn.Module] = []

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        (making,) = self.making
        with torch.no_grad():
            made = making(noise_for(images))
        return self.layers(images), self.layers(made)

    def loss(self, scores: tuple[Tensor, Tensor], _images: Tensor) -> Tensor:
        return against(REAL, scores[0]) + against(FAKE, scores[1])

    def count(self, images: Tensor) -> int:
        return len(images)


def noise_for(images: Tensor) -> Tensor:
    return torch.randn(len(images), NOISE, device=images.device)


def against(target: float, scores: Tensor) -> Tensor:
    """Cross-entropy, summed over the images."""
    return F.binary_cross_entropy_with_logits(
        scores, torch.full_like(scores, target), reduction="sum"
    )


def train(steps: int = 400) -> tuple[list[tuple[float, float]], Tensor]:
    """Train both; every rank calls it.

    Returns:
        (loss of the judge, loss of the generator) by step; 8 images [8, 64] that the generator
        makes.
    """
    torch.manual_seed(0)
    images = torch.from_numpy(load_digits().data).float().div(16)
    data = DataLoader(images, batch_size=32, shuffle=True)  # type: ignore[arg-type]
    judge = Judge()
    generator = Generator()
    judge.making.append(generator.layers)
    generator.scoring.append(judge.layers)
    settings = {
        "batch_size": 32,
        "global_batch_size": 64,
        "max_steps": steps,
    }
    judging = Trainer(judge, SGD(judge.parameters(), lr=0.1), **settings)
    making = Trainer(
        generator, Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99)), **settings
    )
    losses = []
    for judged, made in zip(judging.steps(data), making.steps(data), strict=True):
        losses.append((float(judged.loss), float(made.loss)))
        if making.is_main_process and judged.step % 50 == 0:
            print(
                f"step {judged.step}  judge {judged.loss:.3f}  generator {made.loss:.3f}",
                flush=True,
            )
    return losses, making.forward(images[:8])


def main() -> int:
    _, made = train()
    if is_main_process():
        write_png(Path("gan.png"), made.view(-1, 8, 8), columns=4)
        print("what it makes: gan.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
