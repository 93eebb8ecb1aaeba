"""Sound models of Hugging Face, with the counts that their losses are means over."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.silent_bugs.faults.models import LENGTH, VOCAB
from benchmarks.silent_bugs.faults.registry import sound
from lockstep.verify import Subject


class Labelled(Dataset[dict[str, Tensor]]):
    """Ids and labels, of which some do not count; or images."""

    deterministic = True

    def __init__(self, *, images: bool = False) -> None:
        self._images = images

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = torch.Generator().manual_seed(index)
        if self._images:
            return {
                "pixel_values": torch.randn(3, 16, 16, generator=numbers),
                "labels": torch.tensor(index % 4),
            }
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=numbers)
        labels = ids.clone()
        labels[random.Random(index).randrange(1, LENGTH) :] = -100
        return {"input_ids": ids, "labels": labels}


def counted(make: Callable[[], nn.Module], *, images: bool = False) -> Subject:
    """Return a model whose loss is a mean over the labels that count, which it does not
    say itself.
    """
    torch.manual_seed(0)
    made = make()
    made.count = lambda batch: (batch["labels"] != -100).sum()  # type: ignore
    return Subject(made.train(), Labelled(images=images))


BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


@sound()
def t5() -> Subject:
    return counted(lambda: T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **T5)))


@sound()
def bert() -> Subject:
    return counted(lambda: BertForMaskedLM(BertConfig(vocab_size=VOCAB, **BERT)))


@sound()
def vit() -> Subject:
    config = ViTConfig(image_size=16, patch_size=8, num_labels=4, **BERT)
    return counted(lambda: ViTForImageClassification(config), images=True)
