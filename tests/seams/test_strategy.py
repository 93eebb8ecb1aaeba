"""A strategy from a package outside of the repository, with no edit within it: CONTRIBUTING.md, "A
strategy".
"""

from pathlib import Path

import pytest

from tests.seams.outside import Outside

STRATEGY = '''
"""Replicas that exchange gradients by one plain all-reduce for each parameter, after the last backward pass."""

import torch
import torch.distributed as dist

from lockstep.data.batches import assign_contiguous
from lockstep.parallel.placement import AppliedStrategy, placed_in_order
from lockstep.parallel.reproducible.tree import assign_tree
from lockstep.parallel.reproducible.gradient_trees import ExchangedTree
from lockstep.strategy import Strategy


class PlainAllReduce(Strategy):
    def place(self, placement):
        placement.materialise()
        group = placement.mesh["replicate"].get_group()
        parameters = [p for p in placement.model.parameters() if p.requires_grad]

        def all_reduce():
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)

        exact = placement.reproducible
        applied = AppliedStrategy(
            assign_tree if exact else assign_contiguous,
            tree=ExchangedTree(parameters, placement.dp_group) if exact else None,
            finish_gradients=all_reduce,
        )
        return placed_in_order(placement, applied)


class NotOne:
    pass


class NoPlace(Strategy):
    pass


class OtherPlace(Strategy):
    def place(self, model, mesh):
        pass
'''
CONFIG = """
model: {name: transformer, args: {n_layer: 2, n_embd: 16, n_head: 2, vocab_size: 17, block_size: 8, dropout: 0.1}}
data: {name: "their.data:Tokens"}
training: {max_steps: 3, batch_size: 2, global_batch_size: 8, eval_steps: null}
distributed: {device: cpu, strategy: "their.replicas:PlainAllReduce"}
monitor: {sinks: [jsonl]}
"""
NAME = "their.replicas:PlainAllReduce"


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    found = Outside(tmp_path)
    found.write("their/replicas.py", STRATEGY)
    found.write("their/__init__.py", "")
    found.write("config.yaml", CONFIG)
    found.write("their/data.py", DATA)
    return found


DATA = """
import torch
from torch.utils.data import Dataset


class Tokens(Dataset):
    deterministic = True

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 9) % 17
        return {"input_ids": ids[:-1], "targets": ids[1:]}
"""


@pytest.mark.parametrize(
    "beside", [[], pytest.param(["ddp:2"], marks=pytest.mark.full)], ids=["alone", "beside ddp"]
)
def test_it_takes_the_same_steps_as_one_process(outside: Outside, beside: list[str]) -> None:
    """Up to the order of summation, alone and beside a strategy that ships."""
    against = ",".join([f"{NAME}:2", *beside])
    plain = outside.lockstep("verify", "config.yaml", "--against", against, "--steps", 2)
    assert f"{NAME}:2" in plain


@pytest.mark.full
def test_it_takes_the_same_steps_in_every_bit(outside: Outside) -> None:
    reproducible = "distributed.reproducible=true"
    exact = outside.lockstep(
        "verify", "config.yaml", "--against", f"{NAME}:3", "--steps", 2, reproducible
    )
    assert "every bit" in exact


def test_a_run_under_it_ends_in_the_digest_of_one_process(outside: Outside) -> None:
    digests = set()
    for name, more in (("theirs", []), ("single", ["--strategy", "single"])):
        ranks = [] if more else ["--nproc-per-node", 2]
        same = "distributed.reproducible=true"
        said = outside.lockstep("train", "config.yaml", *more, *ranks, "--output-dir", name, same)
        assert more or f"strategy {NAME}, 2 processes" in said
        digests.add(
            outside.lockstep("checkpoint", "digest", f"{name}/checkpoints/step-00000003").split()[0]
        )
    assert len(digests) == 1


def test_plans_and_help_know_its_name(outside: Outside) -> None:
    rows = outside.lockstep(
        "plan", "config.yaml", "--gpus", 2, "--gpu-type", "A100-80GB"
    ).splitlines()
    assert any(f"{NAME}:2" in row for row in rows)
    assert "package.module:Name" in outside.lockstep("train", "--help")


def test_what_is_no_strategy_is_refused_before_ranks_start(outside: Outside) -> None:
    said = outside.lockstep("train", "config.yaml", "--strategy", "their.replicas:NotOne", code=2)
    assert "their.replicas:NotOne is not a subclass of lockstep.strategy.Strategy" in said
    said = outside.lockstep("train", "config.yaml", "--strategy", "their.replicas:NoPlace", code=2)
    assert "their.replicas:NoPlace has no method place" in said
    said = outside.lockstep(
        "train", "config.yaml", "--strategy", "their.replicas:OtherPlace", code=2
    )
    assert "write def place(self, placement)" in said
    said = outside.lockstep(
        "train", "config.yaml", "--strategy", "their.replicas:PlainAllReduc", code=2
    )
    assert "write PlainAllReduce" in said
    said = outside.lockstep("train", "config.yaml", "--strategy", "fdsp", code=2)
    assert "write fsdp" in said
