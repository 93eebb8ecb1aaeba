"""The worked examples of docstrings are what the code does.

What one process can show is a doctest. What ranks do together is run here on two ranks: each line
of the example is made from what the code returns, and has to stand in the docstring.
"""

import doctest
import importlib
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import DiLoCoConfig, config_from
from lockstep.data.batches import MicroBatch
from lockstep.layout import Layout
from lockstep.models.attention import Attend
from lockstep.models.batch_parts import IGNORED_TARGET
from lockstep.parallel import loss_accumulator, strides
from lockstep.parallel.comm.compression import PowerSGD, half_precision_hook
from lockstep.parallel.comm.gloo import AllToAll
from lockstep.parallel.context import attention as context_attention
from lockstep.parallel.context import sequences as context
from lockstep.parallel.context.attention import SequenceCut
from lockstep.parallel.diloco import workers as local_workers
from lockstep.parallel.diloco.workers import FlatParameters, OuterStep, QuantizedAllReduce, Worker
from lockstep.parallel.facts import facts_of
from lockstep.parallel.forward_effects.batch_norm_rows import BatchNormRows
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.reproducible.exact_norm import exact_norm
from lockstep.parallel.reproducible.tree import TreeReduceScatter
from lockstep.parallel.tensor import cuts as tensor_cuts
from lockstep.parallel.tensor import loss_parallel, products
from lockstep.parallel.tensor.cuts import apply_tensor
from lockstep.parallel.tensor.layer_cut import LayerCut
from lockstep.process_group.mesh import device_mesh
from tests.ranks import run_ranks

DOCTESTS = (
    "lockstep.clipping",
    "lockstep.models.attention",
    "lockstep.optim",
    "lockstep.parallel.comm.compression",
    "lockstep.parallel.fsdp.order",
    "lockstep.parallel.forward_effects.gathered_rows",
    "lockstep.parallel.diloco.workers",
    "lockstep.parallel.pipeline.plan",
    "lockstep.parallel.pipeline.schedules",
    "lockstep.parallel.reproducible.tree",
    "lockstep.parallel.strides",
    "lockstep.randomness",
    "lockstep.step",
    "lockstep.verify.script.causes.reduction",
)


@pytest.mark.parametrize("name", DOCTESTS)
def test_an_example_of_one_process_prints_what_it_says(name: str) -> None:
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted, f"{name} has no example left"
    assert not found.failed


def test_an_outer_step_of_two_workers() -> None:
    def one(value: float) -> FlatParameters:
        flat = FlatParameters({"theta": nn.Parameter(torch.zeros(1))})
        flat.views["theta"].fill_(value)
        return flat

    config = DiLoCoConfig(inner_steps=1, outer_learning_rate=0.7, outer_momentum=0.9, nesterov=True)
    common = one(1.0)
    momentum = one(0.0)
    workers = [Worker(number, one(value), {}, None) for number, value in enumerate((0.8, 0.6))]
    OuterStep(common, momentum, {}, config, QuantizedAllReduce("fp32", None)).after(
        1, workers, last=False
    )
    assert momentum.views["theta"].item() == pytest.approx(0.3)
    for each in (common, *(worker.values for worker in workers)):
        assert each.views["theta"].item() == pytest.approx(0.601)
    assert "1 − 0.7 · 0.57 = 0.601" in (local_workers.__doc__ or "")


def test_strides_of_a_weight() -> None:
    names = [["w00", "w01", "w02"], ["w10", "w11", "w12"]]
    rows = re.findall(r"\((\d), (\d)\) +(w.*)", strides.__doc__ or "")
    assert len(rows) == 3
    for down, across, listed in rows:
        memory = listed.partition(",")[0].split()
        places = {int(down) * i + int(across) * j: (i, j) for i in (1, 0) for j in range(3)}
        assert memory == [names[i][j] for _, (i, j) in sorted(places.items())]


def shown(tensor: Tensor, digits: int = 4) -> str:
    """A tensor as the docstrings write it: whole numbers without a point."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(each) for each in value]
        return int(value) if float(value).is_integer() else round(value, digits)

    return str(of(tensor.detach().tolist()))


def cut_layers() -> dict[str, Any]:
    group = dist.group.WORLD
    rank = dist.get_rank()
    x = torch.tensor([[[1.0, 0, 2], [0, 1, 1]]], requires_grad=True)
    up = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])
    down = torch.tensor([[1.0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]])
    cut = LayerCut(group, None, sequence=False)
    hidden = products.column_linear(x, cut.part(up, 0), None, cut)
    part = hidden.detach() @ cut.part(down, 1).t()
    y = products.row_linear(hidden, cut.part(down, 1), cut)
    y.sum().backward()
    assert torch.equal(y, x @ up.t() @ down.t())

    parted = LayerCut(group, None, sequence=True)
    mine = products.row_linear(hidden.detach(), cut.part(down, 1), parted)
    assert x.grad is not None
    looked_up = products.vocabulary_lookup(
        torch.tensor([[0, 3]]), cut.part(torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]]), 0), cut
    )
    return {
        "rank": rank,
        "hidden": shown(hidden[0]),
        "part": shown(part[0]),
        "y": shown(y[0]),
        "mine": shown(mine[0]),
        "gradient": shown(x.grad[0]),
        "looked up": shown(looked_up[0]),
    }


class Block(nn.Module):
    """The layers of the example of `tensor_cuts`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6)
        self.attention = nn.Module()
        self.attention.head_width = 3  # type: ignore[assignment]
        self.attention.query = nn.Linear(6, 6, bias=False)
        self.attention.out = nn.Linear(6, 6, bias=False)
        self.mlp = nn.Module()
        self.mlp.up = nn.Linear(6, 4)
        self.mlp.down = nn.Linear(4, 6, bias=False)

    def tensor_plan(self) -> dict[str, str]:
        return {
            "attention.query": "heads",
            "attention.out": "row",
            "mlp.up": "column",
            "mlp.down": "row",
            "norm": "sequence",
        }


def pieces() -> dict[str, list[int]]:
    model = Block()
    before = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    mesh = device_mesh(Layout("single", tensor=2), "cpu")
    apply_tensor(facts_of(model), mesh, config_from({}).step)
    return {
        name: [before[name], list(parameter.shape)] for name, parameter in model.named_parameters()
    }


def cut_losses() -> dict[str, Any]:
    cut = LayerCut(dist.group.WORLD, None, sequence=False, keeps_logits=True)
    whole = torch.tensor([[[1.0, 2, 3, 4], [0, 0, 0, 0]]])
    part = cut.part(whole, -1).requires_grad_()
    targets = torch.tensor([[2, IGNORED_TARGET]])
    losses = loss_parallel.cut_token_losses(part, targets, cut)
    losses.sum().backward()
    return {
        "log": round(part[0, 0].logsumexp(-1).item(), 4),
        "losses": shown(losses),
        "gradient": shown(part.grad[0, 0]),
    }


def sequences() -> dict[str, Any]:
    cut = SequenceCut(dist.group.WORLD, None, "ring")
    positions = cut.part(torch.arange(8), 0).tolist()
    pairs = sum(position + 1 for position in positions)
    attend = Attend(causal=False)
    context_attention.cut_attention(attend, cut)
    scores = torch.tensor([0.0, math.log(3), math.log(3), 0.0])
    values = torch.tensor([1.0, 6.0, 6.0, 3.0])
    k, v = (cut.part(each.view(1, 4)).view(1, 1, 2, 1) for each in (scores, values))
    attended = attend(torch.ones(1, 1, 2, 1), k, v)
    return {
        "order": cut.order(8),
        "positions": positions,
        "pairs": pairs,
        "log": k.exp().sum().item(),
        "own": ((k.exp() * v).sum() / k.exp().sum()).item(),
        "attended": round(attended.flatten()[0].item(), 4),
    }


class OneWeight(nn.Module):
    """A weight whose gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def compressed() -> dict[str, Any]:
    u = torch.tensor([1.0, 2, 2, 0])
    v = torch.tensor([1.0, 0, 0, 0, 0, 1])
    mine = (1.0 if dist.get_rank() == 0 else 3.0) * torch.outer(u, v)
    model = OneWeight()
    mesh = init_device_mesh("cpu", (2,))
    powersgd = PowerSGD(
        dict(model.named_parameters()),
        mesh,
        rank=1,
        start_step=0,
        warm_start=True,
        error_feedback=True,
        seed=1,
        undoable=False,
    )
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, powersgd.hook)
    wrapped(mine).backward()
    assert model.weight.grad is not None
    error = powersgd.state["weight//error"].to_local()[0]

    half = OneWeight()
    wrapped = DistributedDataParallel(half)
    wrapped.register_comm_hook(None, half_precision_hook(torch.float16, mesh.get_group()))
    wrapped(torch.full((4, 6), 40_000.0)).backward()
    assert half.weight.grad is not None
    return {
        "mean": (model.weight.grad - 2 * torch.outer(u, v)).abs().max().item(),
        "q": shown(powersgd.state["weight//q"].flatten().abs(), 3),
        "error": (error - (mine - 2 * torch.outer(u, v))).abs().max().item(),
        "half": half.weight.grad[0, 0].item(),
    }


def sums() -> dict[str, Any]:
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    table = LossAccumulator(3, torch.device("cpu"), shared=True)
    table.mark_step(7)
    given = {0: [(0, 6.0, 3), (2, 1.0, 1)], 1: [(1, 8.0, 4)]}[rank]
    for index, loss, targets in given:
        batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}
        table.add(MicroBatch(index, batch, tokens=4), Loss(torch.tensor(loss), 1, targets))
    if rank == 1:
        table.vote_to_stop()
    before = table._table.clone()
    loss, count = table.totals()

    norms = exact_norm([torch.tensor([3.0 + rank])], [group], torch.device("cpu"), 2)

    received = torch.empty(12)
    AllToAll(torch.full((24,), float(rank + 1)), group).add_up(received)

    nodes = {0: [torch.full((2, 12), 10.0)], 1: [torch.full((2, 12), 7.0)]}[rank]
    mine = TreeReduceScatter(nodes, received, 12, 7, group).finish()

    rows = BatchNormRows(2, group)
    rows._inside = rows._real = True
    norm = nn.BatchNorm1d(1, momentum=1.0)
    inputs = torch.tensor([[1.0], [3.0]]) + 4 * rank
    rows.forward(norm, inputs)
    return {
        "before": before.tolist(),
        "table": table._table.tolist(),
        "totals": (float(loss), float(count)),
        "norm": norms.item(),
        "all to all": received.tolist(),
        "reduced": mine.tolist(),
        "mean": norm.running_mean.item(),
        "variance": norm.running_var.item(),
    }


def on_two_ranks() -> dict[str, dict[str, Any]]:
    parts: tuple[Callable[[], dict[str, Any]], ...] = (
        cut_layers,
        pieces,
        cut_losses,
        sequences,
        compressed,
        sums,
    )
    return {part.__name__: part() for part in parts}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(on_two_ranks, 2)


def row(title: str, *cells: Any) -> str:
    """A line of a docstring's table of two ranks."""
    return f"{title:<22} " + "".join(f"{cell!s:<28}" for cell in cells).rstrip()


def test_cut_layers(ranks: list[dict[str, dict[str, Any]]]) -> None:
    here = [each["cut_layers"] for each in ranks]
    doc = products.__doc__ or ""
    for title, key in (
        ("column_linear(x, up)", "hidden"),
        ("times its part of down", "part"),
        ("row_linear", "y"),
        ("… with `sequence`", "mine"),
    ):
        assert row(title, *(each[key] for each in here)) in doc
    assert {each["gradient"] for each in here} == {"[[4, 4, 4], [4, 4, 4]]"}
    assert {each["looked up"] for each in here} == {"[[1, 2], [7, 8]]"}


def test_pieces_of_cut_layers(ranks: list[dict[str, dict[str, Any]]]) -> None:
    assert ranks[0]["pieces"] == ranks[1]["pieces"]
    doc = tensor_cuts.__doc__ or ""
    rows = {line.split()[0].strip(","): line for line in doc.splitlines() if line.count("[") == 2}
    assert len(rows) == 5
    for name, line in rows.items():
        complete, here = ranks[0]["pieces"][f"{name}.weight"]
        assert f"{complete!s:<11}{here}" in line, name


def test_losses_of_cut_logits(ranks: list[dict[str, dict[str, Any]]]) -> None:
    here = [each["cut_losses"] for each in ranks]
    doc = loss_parallel.__doc__ or ""
    assert row("their log-sum-exp", *(each["log"] for each in here)) in doc
    assert row("gradient", *(each["gradient"] for each in here)) in doc
    assert {each["losses"] for each in here} == {"[1.4402, 0]"}
    assert "(0 + 3) = 1.4402" in doc


def test_chunks_of_sequences(ranks: list[dict[str, dict[str, Any]]]) -> None:
    here = [each["sequences"] for each in ranks]
    doc = context.__doc__ or ""
    assert row("positions", *(each["positions"] for each in here)) in doc
    assert [each["pairs"] for each in here] == [18, 18]
    assert doc.count("= 18") == 2
    assert [each["order"] for each in here] == [[0, 3, 1, 2]] * 2

    doc = context_attention.__doc__ or ""
    assert row("sum of the weights", *(f"{each['log']:g}" for each in here)) in doc
    assert [each["own"] for each in here] == [2.0, 6.0]
    assert [each["attended"] for each in here] == [5.0, 5.0]
    assert "(2 · 2 + 6 · 6) / (2 + 6) = 5" in doc


def test_compressed_gradients(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for each in (rank["compressed"] for rank in ranks):
        assert each["mean"] < 1e-5
        assert each["error"] < 1e-5
        assert each["q"] == "[6.0, 0, 0, 0, 0, 6.0]"
        assert each["half"] == 40_000


def test_sums_over_ranks(ranks: list[dict[str, dict[str, Any]]]) -> None:
    here = [each["sums"] for each in ranks]
    doc = " ".join((loss_accumulator.__doc__ or "").split())
    tables = [*(each["before"] for each in here), here[0]["table"]]
    for title, (losses, counts) in zip(("rank 0", "rank 1", "all ranks"), tables, strict=True):
        assert f"{title} {losses} {counts}" in doc
    assert [each["totals"] for each in here] == [(15.0, 8.0)] * 2
    assert "= 1.875" in doc

    for each in here:
        assert each["norm"] == 5.0
        assert each["all to all"] == [3.0] * 12
        assert each["reduced"] == [17.0] * 12
        assert each["mean"] == 4.0
        assert each["variance"] == pytest.approx(20 / 3)
