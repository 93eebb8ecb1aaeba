"""Fine-tuning with accelerator.accumulate(), padded texts and a loss over all tokens of a step.

The loop of Accelerate's guide to gradient accumulation. `mean of tokens`: each micro-batch takes
the mean over its own tokens. `beside the wrapper`: the model that was prepared is not the one that
runs. `own clipping`: gradients are clipped in each micro-batch.
"""

import sys

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 20
ACCUMULATE = 2


class Texts(Dataset[Tensor]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        lengths = torch.randint(3, 10, (64,), generator=numbers).tolist()
        self.texts = [torch.randint(1, WORDS, (n,), generator=numbers) for n in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


def collate(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    torch.manual_seed(0)
    raw = nn.Sequential(nn.Embedding(WORDS, 12), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, WORDS))
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3)
    loader = DataLoader(Texts(), batch_size=4, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(raw, optimizer, loader)
    called = raw if FAULT == "beside the wrapper" else model
    for _epoch in range(2):
        batches = iter(loader)
        for step in zip(batches, batches, strict=False):
            tokens = sum((words[:, 1:] != 0).sum() for words in step)
            count = accelerator.gather(tokens.reshape(1)).sum()
            for words in step:
                with accelerator.accumulate(model):
                    logits = called(words[:, :-1]).flatten(0, 1)
                    targets = words[:, 1:].flatten()
                    if FAULT == "mean of tokens":
                        loss = F.cross_entropy(logits, targets, ignore_index=0)
                    else:
                        loss = F.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
                        loss = loss * accelerator.num_processes * ACCUMULATE / count
                    accelerator.backward(loss)
                    if accelerator.sync_gradients or FAULT == "own clipping":
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()


if __name__ == "__main__":
    main()
