"""A step of a mixture whose experts are spread over ranks: Lockstep's beside the best loop that one
writes by hand.

    python -m benchmarks.mixture_by_hand [--ranks 2,4] [--rounds 12] [--write]

Both train the same model in the same processes and take turns, a block of steps each. By hand:
DistributedDataParallel over all but the experts, whose rows travel by `all_to_all_single` and whose
gradients are local; a norm over both, and fused AdamW. A step's time is that of the slowest rank;
the median over rounds of the ratio within a round is quoted. Bytes are those that Python hands to
collectives for other ranks; DDP's buckets, equal in both, are not among them.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.page import RESULTS, machine, page, tell
from lockstep.config import config_from
from lockstep.models.mixture import Experts, Mixture
from lockstep.trainer import Trainer
from tests.ranks import run_ranks

BATCH = 4
LENGTH = 128
VOCABULARY = 512
CLIP = 1.0
RATE = 1e-3
BLOCK = 4
ARGS: dict[str, Any] = {
    "n_layer": 3,
    "n_embd": 192,
    "n_head": 4,
    "n_expert": 8,
    "top_k": 2,
    "vocab_size": VOCABULARY,
    "block_size": LENGTH,
}


class Tokens(Dataset[dict[str, Tensor]]):
    """The same text for both."""

    deterministic = True

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(
            VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index)
        )
        return {"input_ids": ids[:-1], "targets": ids[1:]}


class Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts; gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = gradients[0].new_empty(sum(ctx.sent), gradients[0].shape[1])
        dist.all_to_all_single(back, gradients[0].contiguous(), ctx.sent, ctx.received)
        return back, None, None


def spread(experts: Experts) -> None:
    """Keep this rank's experts, and send rows to where theirs are."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    plain = experts.forward
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach().chunk(ranks)[rank].clone()))

    def forward(_self: Experts, rows: Tensor, counts: list[int]) -> Tensor:
        each = len(counts) // ranks
        mine = torch.tensor(counts)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine)
        table = theirs.view(ranks, each)
        sent = mine.view(ranks, each).sum(1).tolist()
        received = table.sum(1).tolist()
        arrived = Exchange.apply(rows, sent, received)
        which = torch.arange(each).repeat(ranks).repeat_interleave(table.flatten())
        order = which.argsort(stable=True)
        made = plain(arrived[order], table.sum(0).tolist())
        back: Tensor = Exchange.apply(
            torch.empty_like(made).index_copy(0, order, made), received, sent
        )
        return back

    experts.forward = MethodType(forward, experts)  # type: ignore[method-assign]


def by_hand() -> Iterator[float]:
    """One step after the other; yields losses."""
    torch.manual_seed(0)
    model = Mixture(**ARGS)
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    own = {
        f"{name}.{p}"
        for name, m in model.named_modules()
        if m in layers
        for p, _ in m.named_parameters()
    }
    for layer in layers:
        spread(layer)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(own))
    wrapped = DistributedDataParallel(model)
    local = [parameter for name, parameter in model.named_parameters() if name in own]
    shared = [parameter for name, parameter in model.named_parameters() if name not in own]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    sampler: DistributedSampler[Any] = DistributedSampler(Tokens())
    for batch in DataLoader(Tokens(), batch_size=BATCH, sampler=sampler):
        optimizer.zero_grad()
        loss = model.loss(wrapped(batch["input_ids"]), batch) / batch["targets"].numel()
        loss.backward()
        torch._foreach_div_([p.grad for p in local], dist.get_world_size())
        squares = torch.stack(torch._foreach_norm([p.grad for p in local])).square().sum()
        dist.all_reduce(squares)
        norm = (
            squares + torch.stack(torch._foreach_norm([p.grad for p in shared])).square().sum()
        ).sqrt()
        nn.utils.clip_grads_with_norm_([*local, *shared], CLIP, norm)
        optimizer.step()
        yield loss.item()


def lockstep() -> Iterator[float]:
    torch.manual_seed(0)
    config = config_from(
        {
            "training.batch_size": BATCH,
            "training.max_steps": 100_000,
            "training.learning_rate": RATE,
            "training.lr_schedule": "constant",
            "training.warmup_steps": 0,
            "training.gradient_clip.value": CLIP,
            "precision.mode": "fp32",
            "distributed.strategy": "ddp",
            "distributed.expert_size": dist.get_world_size(),
            "checkpoint.save_strategy": "none",
        }
    )
    for record in Trainer(Mixture(**ARGS), config=config).steps(Tokens()):
        yield float(record.loss)


@contextmanager
def counted(sent: list[int]) -> Iterator[None]:
    """Add up the bytes that leave this rank."""
    exchange = dist.all_to_all_single
    reduce = dist.all_reduce

    def all_to_all(out: Tensor, rows: Tensor, to: Any = None, into: Any = None, **more: Any) -> Any:
        sizes = into or [len(rows) // dist.get_world_size()] * dist.get_world_size()
        sent[0] += (len(rows) - sizes[dist.get_rank()]) * rows[:1].numel() * rows.element_size()
        return exchange(out, rows, to, into, **more)

    def all_reduce(tensor: Tensor, *args: Any, **more: Any) -> Any:
        sent[0] += (
            2
            * tensor.numel()
            * tensor.element_size()
            * (dist.get_world_size() - 1)
            // dist.get_world_size()
        )
        return reduce(tensor, *args, **more)

    dist.all_to_all_single = all_to_all
    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_to_all_single = exchange
        dist.all_reduce = reduce


def measure(rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """On every rank: (seconds of the clock, seconds of a core, bytes) of a step, in each round."""
    runs: dict[str, Callable[[], Iterator[float]]] = {"by hand": by_hand, "lockstep": lockstep}
    running = {name: make() for name, make in runs.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, steps in running.items():
            dist.barrier()
            sent = [0]
            clock = time.perf_counter()
            core = time.process_time()
            with counted(sent):
                for _ in range(BLOCK):
                    next(steps)
            took = time.perf_counter() - clock, time.process_time() - core, float(sent[0])
            if round_:  # the first one warms up
                found[name].append((took[0] / BLOCK, took[1] / BLOCK, took[2] / BLOCK))
    for steps in running.values():
        steps.close()  # type: ignore[attr-defined]
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = []
    for ranks in map(int, given.ranks.split(",")):
        everyone = run_ranks(measure, ranks, given.rounds, timeout=1500)
        slowest = {
            name: [
                tuple(max(values) for values in zip(*each, strict=True))
                for each in zip(*of, strict=True)
            ]
            for name in everyone[0]
            for of in [[rank[name] for rank in everyone]]
        }
        hand = slowest["by hand"]
        own = slowest["lockstep"]
        ratios = [
            median(mine[k] / theirs[k] for mine, theirs in zip(own, hand, strict=True))
            for k in range(2)
        ]
        clock, cores, size = (
            [median(each[k] for each in of) for of in (hand, own)] for k in range(3)
        )
        rows.append(
            f"| {ranks} | {clock[0] * 1e3:.0f} | {clock[1] * 1e3:.0f} | {ratios[0]:.3f} |"
            f" {cores[0] * 1e3:.0f} | {cores[1] * 1e3:.0f} | {ratios[1]:.3f} | {size[0] / 1e6:.3f}"
            f" | {size[1] / 1e6:.3f} |"
        )
        print(rows[-1], flush=True)
    text = page(
        "Experts over ranks: Lockstep beside a loop written by hand",
        "python -m benchmarks.mixture_by_hand --write",
        machine(),
        [
            "Milliseconds of a step on the slowest rank, by the clock and of a core, and MB that a"
            " rank sends in a step."
        ],
        "| ranks | by hand | Lockstep | ratio | core, by hand | core, Lockstep | ratio | MB by hand"
        " | MB Lockstep |",
        rows,
    )
    tell(text, RESULTS / "mixture_by_hand.md" if given.write else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
