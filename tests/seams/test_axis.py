"""An axis from a package outside of the repository, with no edit within it: CONTRIBUTING.md, "An
axis".
"""

from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.parallel.axes.axis import Axis, axes_named
from lockstep.strategy import parse_topology
from tests.seams.outside import Outside
from tests.seams.test_strategy import CONFIG, DATA

AXIS = '''
"""Replicas that exchange gradients after every second micro-batch, in one file."""

import torch
import torch.distributed as dist

from lockstep.errors import Contradiction
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.parallel_model import assign_strided
from lockstep.parallel.passes import AroundMicroBatch
from lockstep.parallel.placement import AppliedStrategy, placed_in_order, shared_out
from lockstep.parallel.reproducible.gradient_trees import ExchangedTree
from lockstep.parallel.reproducible.tree import assign_tree
from lockstep.strategy import Strategy


class EverySecond(AroundMicroBatch):
    def __init__(self, model, group):
        self.model, self.group, self.waiting, self.sums = model, group, 0, {}

    def after(self, run):
        self.waiting += 1
        if self.waiting < 2 and not run.last:
            return
        self.waiting = 0
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad, group=self.group)
            self.sums[name] = grad if name not in self.sums else self.sums[name] + grad
            parameter.grad = None
        if run.last:
            for name, parameter in self.model.named_parameters():
                parameter.grad = self.sums.pop(name, None)


class Toy(Axis):
    name = "toy"

    def __init__(self, step):
        self.step = step

    @classmethod
    def contradictions(cls, config, layout):
        if config.training.compile:
            what = "the toy does not go with compiled blocks"
            yield Contradiction(("training.compile",), what, "write compile: false")

    @classmethod
    def on(cls, site):
        if site.exact or site.layout.replicate == 1:
            return None  # the strategy's tree exchanges
        return cls(EverySecond(site.facts.model, site.mesh["replicate"].get_group()))

    def around(self, assign, scale):
        return [self.step]


class Replicas(Strategy):
    axes = ("their.axes:Toy",)
    shares_batches = True

    def place(self, placement):
        placement.materialise()
        exact = placement.reproducible
        parameters = [p for p in placement.model.parameters() if p.requires_grad]
        applied = AppliedStrategy(
            shared_out(assign_tree if exact else assign_strided, placement),
            tree=ExchangedTree(parameters, placement.dp_group) if exact else None,
        )
        return placed_in_order(placement, applied)
'''
NAME = "their.axes:Replicas"
AXIS_NAME = "their.axes:Toy"


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    found = Outside(tmp_path)
    found.write("their/axes.py", AXIS)
    found.write("their/__init__.py", "")
    found.write("their/data.py", DATA)
    config = CONFIG.replace("their.replicas:PlainAllReduce", NAME)
    found.write("config.yaml", config.replace("vocab_size: 17", "vocab_size: 24"))
    return found


def test_it_takes_the_same_steps_as_one_process_alone_and_with_cut_layers(outside: Outside) -> None:
    """Up to the order of summation, and in every bit where the strategy's tree exchanges."""
    both = f"{NAME}:2,{NAME}:2*tensor:2"
    plain = outside.lockstep("verify", "config.yaml", "--against", both, "--steps", 2)
    assert f"{NAME}:2*tensor:2" in plain
    exact = outside.lockstep(
        "verify",
        "config.yaml",
        "--against",
        f"{NAME}:2*tensor:2",
        "--steps",
        2,
        "distributed.reproducible=true",
        "distributed.open_axes=[tensor]",
    )
    assert "every bit" in exact


def test_its_contradictions_are_told_before_ranks_start(outside: Outside) -> None:
    said = outside.lockstep("train", "config.yaml", "training.compile=true", code=2)
    assert "the toy does not go with compiled blocks" in said
    assert "write compile: false" in said


def test_a_pipeline_takes_no_replicas_of_another_package() -> None:
    with pytest.raises(UsageError, match=r"can't be the replicas of pipeline:2"):
        parse_topology(f"pipeline:2*{NAME}:2")


class NoOn(Axis):
    name = "no_on"


def test_what_is_no_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="has no method on"):
        list(axes_named(["tests.seams.test_axis:NoOn"]))
    with pytest.raises(UsageError, match=r"is not a subclass of lockstep\.parallel\.axes"):
        list(axes_named(["lockstep.layout:Layout"]))
