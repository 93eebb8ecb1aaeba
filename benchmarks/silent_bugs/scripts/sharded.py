"""A Llama-like model under FSDP2, as torchtitan shards one: each block, then the root.

`mixed precision`: its layers compute in bfloat16. `head left out`: the root is not sharded, so that
nobody reduces the gradients of what lies outside of blocks. `own tokens`: each rank's loss is a
mean over its own tokens, of texts of unequal lengths.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
LAYERS = 24
WIDTH = 16
HEADS = 2
WORDS = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embeddings(words)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


def shard(model: Llama, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy()
    if FAULT == "mixed precision":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if FAULT != "head left out":
        fully_shard(model, mesh=mesh, mp_policy=policy)


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = Llama()
    shard(model, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=FAULT != "head left out")
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(0, WORDS, (64, 9), generator=numbers))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (words,) in DataLoader(data, batch_size=4, sampler=sampler):
            targets = words[:, 1:]
            if FAULT == "own tokens":
                ends = words[:, :1] % 8 + 1
                targets = targets.masked_fill(torch.arange(8) >= ends, -100)
            logits = model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            if FAULT == "scaled":  # as for gradients that are summed
                loss = loss / world
            loss.backward()
            if FAULT != "head left out":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
