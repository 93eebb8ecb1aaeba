"""A convolutional variational auto-encoder (Kingma & Welling 2013) for square images.

The images have values in [0, 1].

    encoder     4 × [convolution k4 s2 p1, ReLU], 32-64-128-256 channels
    latent      μ, log σ²; z = μ + ε·exp(½ log σ²), ε ~ N(0, 1);
                a linear layer back to the encoder's shape
    decoder     4 × transposed convolution k4 s2 p1, ReLU between them, sigmoid at the end

Loss = [Σ squared error + beta · (−½ Σ (1 + log σ² − μ² − σ²))] / B, in float32; μ and log σ² are
passed on through the decoder's segments. A batch is {"image": float [B, C, S, S]}; a label in it is
ignored.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.division import round_up
from lockstep.errors import UsageError
from lockstep.models.chain import run_segments
from lockstep.models.language import require_positive, with_carried

CHANNELS = (32, 64, 128, 256)
REDUCTION = 2 ** len(CHANNELS)
_KERNEL: dict[str, int] = {"kernel_size": 4, "stride": 2, "padding": 1}


class VAE(nn.Module):
    """The auto-encoder, of images whose side S is a multiple of 16.

    `beta` is the weight of the divergence.

    image [B, C, S, S] → {"reconstruction": [B, C, S, S], "mu", "log_var": [B, latent_dim], "loss":
    0-dim}.
    """

    def __init__(
        self, image_size: int = 64, channels: int = 3, latent_dim: int = 128, beta: float = 1.0
    ) -> None:
        super().__init__()
        require_positive(image_size=image_size, channels=channels, latent_dim=latent_dim)
        if image_size % REDUCTION:
            larger = round_up(image_size, REDUCTION)
            what = (
                f"image_size={image_size} is not a multiple of {REDUCTION}, and the VAE halves"
                " images four times"
            )
            fix = f"pad or resize the images to {larger}, and set image_size to that"
            raise UsageError(what, where="model.args.image_size", fix=fix)
        self.beta = beta
        widths = (channels, *CHANNELS)
        side = image_size // REDUCTION
        self.encoder = nn.ModuleList(Down(widths[i], widths[i + 1]) for i in range(4))
        self.latent = GaussianLatent(CHANNELS[-1] * side**2, latent_dim)
        self.decoder = nn.ModuleList(
            Up(widths[i + 1], widths[i], side * 2 ** (3 - i), last=i == 0)
            for i in reversed(range(4))
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise by He, with the inputs that reach an output; biases are 0."""
        for _, segment in self.segments():
            segment.init_weights()  # type: ignore[operator]

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [item for item in self.segments() if item[0] != "latent"]

    def segments(self) -> list[tuple[str, nn.Module]]:
        down: list[tuple[str, nn.Module]] = [
            (f"encoder.{i}", stage) for i, stage in enumerate(self.encoder)
        ]
        return [
            *down,
            ("latent", self.latent),
            *((f"decoder.{i}", stage) for i, stage in enumerate(self.decoder)),
        ]

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor]:
        return (batch["image"],)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Return the outputs and their loss, the mean over the images."""
        outputs = run_segments(self, self.segments(), {}, image)
        loss = self.loss(outputs, {"image": image}) / image.shape[0]
        return {
            **dict(zip(("reconstruction", "mu", "log_var"), outputs, strict=True)),
            "loss": loss,
        }

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over the images: 0-dim float32.

        `outputs` are those of `forward` or of the last segment.
        """
        if isinstance(outputs, Mapping):
            outputs = (outputs["reconstruction"], outputs["mu"], outputs["log_var"])
        reconstruction, mu, log_var = (tensor.float() for tensor in outputs)
        squared_error = F.mse_loss(reconstruction, batch["image"].float(), reduction="sum")
        divergence = -0.5 * (1 + log_var - mu.square() - log_var.exp()).sum()
        total: Tensor = squared_error + self.beta * divergence
        return total

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return batch["image"].shape[0]


class Down(nn.Module):
    """A convolution that halves the size: [B, C, S, S] → [B, C', S/2, S/2]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, **_KERNEL)  # type: ignore[arg-type]

    def init_weights(self) -> None:
        _init(self.conv, inputs=self.conv.in_channels * 16)

    def forward(self, image: Tensor) -> Tensor:
        return F.relu(self.conv(image))


class GaussianLatent(nn.Module):
    """The latent: [B, C, s, s] → (features, mu, log_var).

    Their shapes are [B, C·s·s], [B, latent_dim] and [B, latent_dim].
    """

    def __init__(self, features: int, latent_dim: int) -> None:
        super().__init__()
        self.mu = nn.Linear(features, latent_dim)
        self.log_var = nn.Linear(features, latent_dim)
        self.expand = nn.Linear(latent_dim, features)

    def init_weights(self) -> None:
        for linear in (self.mu, self.log_var, self.expand):
            _init(linear, inputs=2 * linear.in_features)  # no ReLU before it

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = features.flatten(1)
        mu = self.mu(flat).float()
        log_var = self.log_var(flat).float()
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)
        return self.expand(z.to(features.dtype)), mu, log_var


class Up(nn.Module):
    """A transposed convolution that doubles the size: [B, C, s, s], maybe flat → [B, C', 2s, 2s].

    `side` is s.
    """

    def __init__(self, inputs: int, outputs: int, side: int, *, last: bool) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(inputs, outputs, **_KERNEL)  # type: ignore[arg-type]
        self.side = side
        self.last = last

    def init_weights(self) -> None:
        # of the 16 taps 4 reach a pixel, at stride 2
        _init(self.conv, inputs=self.conv.in_channels * 4)

    def forward(self, features: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the layer; further arguments are passed on unchanged."""
        image = self.conv(features.view(-1, self.conv.in_channels, self.side, self.side))
        return with_carried(torch.sigmoid(image) if self.last else F.relu(image), carried)


def _init(module: nn.Conv2d | nn.ConvTranspose2d | nn.Linear, inputs: int) -> None:
    nn.init.normal_(module.weight, std=math.sqrt(2 / inputs))
    assert module.bias is not None
    nn.init.zeros_(module.bias)
