"""Faults of what a rank computes in a forward or a backward pass."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.silent_bugs.faults.models import LENGTH, VOCAB, WIDTH, Block, Net, Vectors, net
from benchmarks.silent_bugs.faults.registry import fault, on_rank_1
from lockstep.machine.environment import rank_facts
from lockstep.trainer import Trainer
from lockstep.verify import Subject


@fault("low precision", names="autocast|bfloat16 1")
def autocast_on_rank_1() -> Subject:
    class Casting(Net):
        def forward(self, ids: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on_rank_1()):
                return super().forward(ids).float()

    return net(Casting())


@fault("low precision", names="blocks.0 1")
def a_layer_in_half_precision_on_rank_1() -> Subject:
    class Rounding(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.bfloat16().float() if on_rank_1() else y

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Rounding()
    return net(model)


@fault("training mode", names="evaluation dropout")
def evaluation_mode_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        if on_rank_1():
            for part in trainer.placed.parts:
                part.eval()

    return net(prepare=prepare)


@fault("other ranks", "forward", names="place shifted|+|2")
def positions_shifted_by_rank() -> Subject:
    class Shifted(Net):
        def positions(self, ids: Tensor) -> Tensor:
            return torch.arange(ids.shape[1]) + rank_facts().rank

    return net(Shifted())


@fault("other ranks", "loss", names="loss 1")
def labels_shifted_on_rank_1() -> Subject:
    class Shifted(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            targets = batch["targets"].roll(1, 1) if on_rank_1() else batch["targets"]
            return super().loss(logits, {"targets": targets})

    return net(Shifted())


@fault("other ranks", names="allgather|all_gather loss")
def negatives_gathered_from_all_ranks() -> Subject:
    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one = nn.Linear(WIDTH, WIDTH)
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a = self.one(x)
            b = self.other(y)
            keys = b
            if dist.is_initialized() and dist.get_world_size() > 1:
                every = [torch.empty_like(b) for _ in range(dist.get_world_size())]
                dist.all_gather(every, b.detach())
                every[dist.get_rank()] = b
                keys = torch.cat(every)
            first = dist.get_rank() * len(b) if dist.is_initialized() else 0
            return functional.cross_entropy(a @ keys.T, torch.arange(len(a)) + first)

        def count(self, batch: Any) -> int:
            return len(batch[0])

    return Subject(Contrastive(), Vectors())


@fault("other ranks", names="allreduce|all_reduce")
def statistics_averaged_over_ranks_in_forward() -> Subject:
    class Centred(Block):
        def forward(self, x: Tensor) -> Tensor:
            mean = x.detach().mean((0, 1))
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean = mean / dist.get_world_size()
            return super().forward(x - mean)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Centred()
    return net(model)


@fault("forward", names="blocks.1 1 rank|ranks")
def a_layer_scaled_on_rank_1() -> Subject:
    model = Net()
    if on_rank_1():
        model.blocks[1].register_forward_hook(lambda _m, _a, out: out * 1.01)
    return net(model)


@fault("forward", names="head 1")
def a_mask_inverted_on_rank_1() -> Subject:
    model = Net()
    if on_rank_1():
        model.head.register_forward_pre_hook(lambda _m, args: (-args[0],))
    return net(model)


@fault("module settings", "forward", names="blocks.0.dropout rank_1")
def dropout_of_another_rate_on_rank_1() -> Subject:
    model = Net()
    if on_rank_1():
        model.blocks[0].dropout.p = 0.4  # type: ignore[union-attr]
    return net(model)


class Packed(Net):
    """Two documents in each sample, between which there is no attention."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def documents(self, ids: Tensor) -> Tensor:
        return torch.arange(LENGTH) >= 1 + ids[:, :1] % (LENGTH - 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(self.positions(ids))
        documents = self.documents(ids)
        other = (documents.unsqueeze(1) != documents.unsqueeze(2)).repeat_interleave(2, 0)
        x = x + self.attention(x, x, x, attn_mask=other, need_weights=False)[0]
        logits: Tensor = self.head(self.blocks[0](x))
        return logits


@fault("forward", "other ranks", names="attention")
def mask_of_another_sample_s_documents_on_rank_1() -> Subject:
    class Rolled(Packed):
        def documents(self, ids: Tensor) -> Tensor:
            return super().documents(ids.roll(1, 0) if on_rank_1() else ids)

    return net(Rolled())


@fault("other ranks", "loss", names="loss")
def auxiliary_loss_divided_by_the_number_of_ranks() -> Subject:
    class Balanced(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            balance = (logits.logsumexp(-1).square() * (batch["targets"] != -100)).sum()
            return super().loss(logits, batch) + 0.1 * balance / ranks

    return net(Balanced())


@fault("other ranks", "loss", names="allreduce|all_reduce")
def loss_averaged_over_ranks_before_its_backward_pass() -> Subject:
    class Averaged(Net):
        def loss(self, logits: Tensor, batch: Any) -> Tensor:
            total = super().loss(logits, batch)
            if dist.is_initialized():
                mean = total.detach().clone()
                dist.all_reduce(mean)
                # the value that is to be logged
                total = total * (mean / dist.get_world_size() / total.detach())
            return total

    return net(Averaged())


@fault("other ranks", "forward", names="allgather|all_gather")
def table_gathered_in_the_wrong_order() -> Subject:
    class Gathering(Net):
        def positions(self, ids: Tensor) -> Tensor:
            places = torch.arange(ids.shape[1])
            if dist.is_initialized() and dist.get_world_size() > 1:
                mine = places.chunk(dist.get_world_size())[dist.get_rank()].contiguous()
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, mine)
                places = torch.cat(
                    [mine, *(p for rank, p in enumerate(parts) if rank != dist.get_rank())]
                )
            return places

    return net(Gathering())


@fault("random numbers", "other ranks", names="rank|ranks")
def seed_of_the_rank_set_in_forward() -> Subject:
    class Seeding(Net):
        def forward(self, ids: Tensor) -> Tensor:
            torch.manual_seed(1234 + rank_facts().rank)
            noise = torch.randn(VOCAB)
            return super().forward(ids) * (1 + 0.1 * noise)

    return net(Seeding())


@fault("forward", "other ranks", names="blocks.1 rank_1")
def layer_that_rank_1_leaves_out() -> Subject:
    class Skipping(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + 0.0 * super().forward(x) if on_rank_1() else super().forward(x)

    model = Net()
    torch.manual_seed(1)
    model.blocks[1] = Skipping()
    return net(model)
