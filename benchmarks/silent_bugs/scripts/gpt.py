"""A small GPT in plain DDP, as nanoGPT trains one: accumulation with no_sync, warm-up, clipping.

The number of tensors is that of GPT-2 small (148); the widths are small.
"""

import math
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LAYERS = 12
WIDTH = 16
HEADS = 2
WORDS = 32
LENGTH = 8
BATCH = 4
ACCUMULATE = 2
FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.c_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, words: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


class Text(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.words = torch.randint(0, WORDS, (128, LENGTH + 1), generator=numbers)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index, :-1], self.words[index, 1:]


def rate(step: int) -> float:
    return 1e-3 * min(1.0, (step + 1) / 10) * (0.5 + 0.5 * math.cos(step / 50))


def backward(loss: Tensor, model: GPT, rank: int) -> None:
    if FAULT == "penalty" and rank == 1:
        loss = loss + 0.1 * model.h[3].c_fc.weight.square().sum()
    if FAULT == "weighted rank":
        loss = loss * (0.9 if rank == 0 else 1.1)
    if FAULT != "undivided":
        loss = loss / ACCUMULATE
    loss.backward()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    data = Text()
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    raw_model = GPT()
    model = DistributedDataParallel(raw_model)
    decay = [p for p in raw_model.parameters() if p.dim() >= 2]
    plain = [p for p in raw_model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for number, (words, targets) in enumerate(loader, start=1):
            last = number % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                _, loss = model(words, targets)
                backward(loss, raw_model, rank)
            if last:
                for group in optimizer.param_groups:
                    group["lr"] = rate(step)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1


if __name__ == "__main__":
    main()
