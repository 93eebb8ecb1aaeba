"""`digits`: 1797 handwritten digits that are part of scikit-learn, 8 × 8 pixels, enlarged. No download.

Source: E. Alpaydin, C. Kaynak, *Optical Recognition of Handwritten Digits*, UCI Machine Learning Repository, 1998.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.dataset import CollatingDataset, Data
from lockstep.data.language import check_fraction
from lockstep.errors import UsageError

SIZES = (8, 16, 32)
INTERPOLATIONS = ("bilinear", "nearest")


class Images(CollatingDataset):
    """Samples `{"image": float32 [1, S, S] in [0, 1], "label": int64 []}`."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}

    def collated(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return the samples as one batch."""
        which = torch.tensor(indices)
        return {"image": self.images[which], "label": self.labels[which]}


def digits(*, image_size: int = 32, interpolation: str = "bilinear", validation_fraction: float = 0.1) -> Data:
    """Return the data set; its last `validation_fraction`, mostly of other writers, is the validation data.

    Raises:
        UsageError: scikit-learn is missing, or a size is not offered.
    """
    check_fraction(validation_fraction)
    for name, value, offered in (
        ("image_size", image_size, SIZES),
        ("interpolation", interpolation, INTERPOLATIONS),
    ):
        if value not in offered:
            raise UsageError(
                f"digits has no {name} {value!r}",
                where=f"data.args.{name}",
                fix=f"choose {', '.join(map(str, offered))}",
            )
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "the data set digits needs scikit-learn",
            where="data.name: digits",
            fix="pip install 'lockstep-train[digits]'",
        ) from None
    loaded = load_digits()
    small = torch.from_numpy(loaded.images).float().div(16)[:, None]  # pixels are 0 … 16
    images = small if image_size == 8 else F.interpolate(small, size=(image_size, image_size), mode=interpolation)
    labels = torch.from_numpy(loaded.target).long()
    border = len(labels) - int(len(labels) * validation_fraction)
    validation = Images(images[border:], labels[border:]) if border < len(labels) else None
    facts = {"image_size": image_size, "channels": 1, "source": "scikit-learn's handwritten digits"}
    return Data(Images(images[:border], labels[:border]), validation, facts)
