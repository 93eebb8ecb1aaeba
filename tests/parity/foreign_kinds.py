"""Foreign models, one for each kind of mistake that was once made with such a model; and all
foreign models.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity import foreign
from tests.parity.foreign import (
    SIZES,
    WITHOUT_CONTEXT,
    WITHOUT_PLANS,
    Foreign,
    Sample,
    as_it_is,
    image,
    library,
    padded_text,
    seeded,
    text,
)


def adapted() -> nn.Module:
    """A model of PEFT, whose adapters are in the layers of another."""
    import peft

    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(library("AutoModelForCausalLM", "mistral", **SIZES)(), config)


# ---- parameters and buffers that do not lie row by row in memory ----


class Frames(nn.Module):
    """A convolution over time, for one frame: [B, 3, H, W] → [B, 6, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv3d(3, 6, 3, padding=1)
        self.over_time.to(memory_format=torch.channels_last_3d)

    def forward(self, input: Tensor) -> Tensor:
        return self.over_time(input.unsqueeze(2)).squeeze(2)


class Projection(nn.Module):
    """Its weight is transposed, its gains are every second of a row, its bias begins within other
    numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(5, 10).t())
        self.gains = nn.Parameter((torch.rand(20) + 0.5)[::2])
        self.shift = nn.Parameter(torch.randn(16)[3:8])
        self.register_buffer("mixing", torch.randn(10, 10).t() / 3)
        self.register_buffer("levels", torch.rand(1, 10).expand(3, 10))

    def forward(self, features: Tensor) -> Tensor:
        mixed = torch.tanh(features * self.gains @ self.mixing + self.levels[0])
        return mixed @ self.kernel + self.shift


def strided() -> nn.Module:
    convolutions = nn.Sequential(
        nn.Conv2d(6, 10, 3, stride=2),
        nn.GELU(),
        nn.Conv2d(10, 10, 3, groups=10),
        nn.Conv2d(10, 10, 1),
        nn.GELU(),
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return nn.Sequential(
        Frames(), *convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), Projection()
    )


# ---- buffers that forward passes write ----


class Whitening(nn.Module):
    """Takes off a mean that follows its inputs, as DINO's centre does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_centre", torch.zeros(12))

    def forward(self, features: Tensor) -> Tensor:
        centred = features - self.running_centre
        if self.training:
            self.running_centre = torch.lerp(self.running_centre, features.detach().mean(0), 0.3)
        return centred


class Negatives(nn.Module):
    """Compares with the samples of earlier steps, in the manner of MoCo; rows of a ring, and where
    it goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.to_key = nn.Linear(12, 6)
        self.register_buffer("memory", F.normalize(torch.randn(32, 6), dim=1))
        self.register_buffer("memory_at", torch.zeros((), dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        query = F.normalize(self.to_key(features), dim=1)
        key = F.normalize(query.detach() + 0.2 * features.detach()[:, :6], dim=1)
        scores = (
            torch.cat([(query * key).sum(1, keepdim=True), query @ self.memory.clone().T], 1) / 0.2
        )
        if self.training:
            begin = int(self.memory_at)
            self.memory[begin : begin + len(key)] = key
            self.memory_at.fill_((begin + len(key)) % len(self.memory))
        return scores


def remembering() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 16 * 16, 12), Whitening(), nn.Tanh(), Negatives()
    )


def unlabelled(index: int) -> Sample:
    return {"input": image(index), "label": torch.tensor(0)}


def photo(index: int) -> Sample:
    return {"input": image(index), "label": torch.tensor(index % 5)}


KINDS: dict[str, Foreign] = {
    # Numbers of the config that the library uses outside of the layers.
    "granite": Foreign(
        "Granite, all its multipliers set",
        library(
            "AutoModelForCausalLM",
            "granite",
            **SIZES,
            embedding_multiplier=12.0,
            logits_scaling=0.5,
            residual_multiplier=0.3,
            attention_multiplier=0.2,
            initializer_range=0.1,
        ),
        padded_text,
        piped=as_it_is,
        refused_by=WITHOUT_CONTEXT,
    ),
    # A wrapper that hands attributes on to the model within, under other names of parameters.
    "peft": Foreign(
        "Mistral with LoRA of peft",
        seeded(adapted),
        text,
        piped=as_it_is,
        refused_by={**WITHOUT_PLANS, **WITHOUT_CONTEXT},
    ),
    # Memory formats, and what else does not lie row by row in memory.
    "strided": Foreign(
        "convolutions in `channels_last`, transposed and strided parameters",
        seeded(strided),
        photo,
        lambda model, batch: F.cross_entropy(model(batch["input"]), batch["label"]),
        nn.CrossEntropyLoss(),
        piped=as_it_is,
    ),
    # State that a forward pass leaves to the next one.
    "remembering": Foreign(
        "queue and running centre in buffers, with `distributed.buffers`",
        seeded(remembering),
        unlabelled,
        lambda model, batch: F.cross_entropy(model(batch["input"]), batch["label"]),
        nn.CrossEntropyLoss(),
        piped=as_it_is,
        refused_by=dict.fromkeys(("tensor", "context"), "leave buffers out"),
        settings={"distributed.buffers": {"*.memory*": "gather", "*.running_centre": "mean"}},
    ),
}

MODELS: dict[str, Foreign] = {**foreign.MODELS, **KINDS}
