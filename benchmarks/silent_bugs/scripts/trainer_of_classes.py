"""The Trainer of transformers with a loss of its own: classes that are rare count more.

The weights of all processes' samples are added up. `own weights`: each divides by those of its own.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CLASSES = 3


class Reviews(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.words = torch.randint(0, 40, (64, 8), generator=numbers)
        self.labels = torch.randint(0, 12, (64,), generator=numbers).clamp(max=CLASSES - 1)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


class WeightedTrainer(Trainer):
    weights = torch.tensor([6.0, 3.0, 1.0])

    def compute_loss(self, model, inputs, return_outputs=False, **more):  # type: ignore[no-untyped-def]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits, labels, self.weights, reduction="sum")
        total = self.weights[labels].sum()
        world = self.args.world_size
        if FAULT != "own weights" and world > 1:
            dist.all_reduce(total)
            losses = losses * world
        loss = losses / total
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    set_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=6,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = BertForSequenceClassification(config)
    WeightedTrainer(model, arguments, train_dataset=Reviews()).train()


if __name__ == "__main__":
    main()
