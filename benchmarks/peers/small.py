"""Small data and models for the peers' examples."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

WORDS = 64
IGNORED = -100


def images(number: int = 128) -> TensorDataset:
    """Return images of 8 × 8, and classes that can be learned from them."""
    numbers = torch.Generator().manual_seed(1)
    pixels = torch.randn(number, 1, 8, 8, generator=numbers)
    return TensorDataset(pixels, (pixels.mean((1, 2, 3)) > 0).long())


def texts(number: int = 128, length: int = 12) -> list[dict[str, Tensor]]:
    """Return sequences of unequal lengths, with a label each."""
    numbers = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, length + 1, (number,), generator=numbers).tolist()
    ids = torch.randint(1, WORDS, (number, length), generator=numbers)
    return [
        {"input_ids": row[:n], "labels": (row[0] % 2).long()}
        for row, n in zip(ids, lengths, strict=True)
    ]


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put texts of unequal lengths into one batch."""
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.stack([sample["labels"] for sample in samples]),
    }


def classifier() -> nn.Module:
    """Return a convolutional classifier with dropout, as MNIST examples have it."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(72, 2),
    )


class LanguageModel(nn.Module):
    """Ids [B, T] → logits [B, T, WORDS], with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        past = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits: Tensor = self.head(self.block(self.embed(ids), past, is_causal=True))
        return logits


def next_words(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Put texts of unequal lengths into one batch of (ids, the words that follow, IGNORED where
    there is none).
    """
    ids = [sample["input_ids"] for sample in samples]
    targets = nn.utils.rnn.pad_sequence(
        [row[1:] for row in ids], batch_first=True, padding_value=IGNORED
    )
    return nn.utils.rnn.pad_sequence([row[:-1] for row in ids], batch_first=True), targets
