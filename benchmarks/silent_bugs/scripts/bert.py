"""A BERT with the tensors of BERT-base and small widths, in the loop of Accelerate's examples."""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
LENGTH = 8


class Pairs(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.words = torch.randint(1, 40, (96, LENGTH), generator=numbers)
        self.labels = torch.randint(0, 2, (96,), generator=numbers)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Pairs(), batch_size=4, shuffle=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 40)
    own_loader = loader
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if FAULT == "own loader":
        loader = own_loader
    model.train()
    for _epoch in range(2):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
