"""An axis from a package outside of the repository, with no edit within it: CONTRIBUTING.md, "An
axis".
"""

import re
from pathlib import Path
from typing import Any

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

from lockstep.data.batches import assign_strided
from lockstep.errors import Contradiction
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.execution.passes import AroundMicroBatch
from lockstep.strategy import Strategy


class EverySecond(AroundMicroBatch):
    def __init__(self, group, on_send):
        self.group, self.waiting, self.parameters, self.sums = group, 0, [], {}
        self.on_send = on_send  # None but in a plan

    def add(self, part):
        known = {*map(id, self.parameters)}
        self.parameters += [p for p in part.parameters() if p.requires_grad and id(p) not in known]

    def after(self, passing):
        self.waiting += 1
        if self.waiting == 2:
            self.exchange()

    def exchange(self):
        self.waiting = 0
        for parameter in self.parameters:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(grad, group=self.group)
            if self.on_send is not None:
                self.on_send(grad.numel() * grad.element_size())
            self.sums[parameter] = grad + self.sums[parameter] if parameter in self.sums else grad
            parameter.grad = None

    def after_step(self, micro_batches_per_step):
        if self.waiting:
            self.exchange()
        for parameter, total in self.sums.items():
            parameter.grad = total
        self.sums = {}


class Toy(Axis):
    name = "toy"
    goes_with = frozenset({"pipeline", "tensor"})

    def __init__(self, step):
        self.step = step

    @classmethod
    def contradictions(cls, config, layout):
        if config.training.compile:
            what = "the toy does not go with compiled blocks"
            yield Contradiction(("training.compile",), what, "write compile: false")

    @classmethod
    def apply(cls, site):
        if site.reproducible or site.layout.replicate == 1:
            return None  # the tree sums, or there is nothing to sum
        on_send = site.on_send(cls.name)
        return cls(EverySecond(site.mesh["replicate"].get_group(), on_send))

    def around_passes(self, part):
        self.step.add(part.module)
        return [self.step]


class Replicas(Strategy):
    axes = ("their.axes:Toy",)
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


@pytest.mark.parametrize(
    ("alone", "settings", "says"),
    [
        ((), (), f"{NAME}:2*tensor:2"),
        pytest.param((f"{NAME}:2",), (), f"{NAME}:2*tensor:2", marks=pytest.mark.full),
        pytest.param(
            (f"{NAME}:2",),
            ("distributed.reproducible=true", "distributed.open_axes=[tensor]"),
            "every bit",
            marks=pytest.mark.full,
        ),
    ],
    ids=["up to the order of summation", "alone, too", "every bit"],
)
def test_it_takes_the_same_steps_as_one_process_alone_with_cut_layers_and_in_stages(
    outside: Outside, alone: tuple[str, ...], settings: tuple[str, ...], says: str
) -> None:
    """And beside a pipeline, whose stages it stands around: up to the order of summation, and in
    every bit where the tree sums.
    """
    all_of_them = ",".join([*alone, f"{NAME}:2*tensor:2", f"pipeline:2*{NAME}:2"])
    found = outside.lockstep(
        "verify", "config.yaml", "--against", all_of_them, "--steps", 2, *settings
    )
    assert says in found
    assert f"pipeline:2*{NAME}:2" in found


@pytest.mark.full
def test_a_plan_counts_the_bytes_that_it_names(outside: Outside) -> None:
    """Two all-reduces of four micro-batches a rank, where ddp has one; under a pipeline, too."""
    batch = "training.global_batch_size=16"
    plain = _sent(outside.lockstep("plan", "config.yaml", "--gpus", 2, *GPU, batch))
    assert plain[f"{NAME}:2"] == pytest.approx(2 * plain["ddp:2"], rel=0.01)
    in_stages = f"distributed.strategy=pipeline*{NAME}"
    staged = _sent(outside.lockstep("plan", "config.yaml", "--gpus", 4, *GPU, batch, in_stages))
    # micro-batches × passes × (samples × positions × width) × bytes, to the other stage
    activations = 4 * 2 * (2 * 8 * 16) * 4
    exchanged = staged[f"pipeline:2*{NAME}:2"] - activations
    assert exchanged == pytest.approx(2 * (staged["pipeline:2*fsdp:2"] - activations), rel=0.02)


GPU = ("--gpu-type", "A100-80GB")


def _sent(table: str) -> dict[str, float]:
    """Return layout → bytes that a rank sends in a step, of a plan's table."""
    units = {"B": 1.0, "kB": 1e3, "MB": 1e6}
    rows = re.findall(r"^(\S+) .*?([\d.]+) (B|kB|MB) +\d+% +[\d,]+$", table, re.MULTILINE)
    return {name: float(size) * units[unit] for name, size, unit in reversed(rows)}


def test_its_contradictions_are_told_before_ranks_start(outside: Outside) -> None:
    said = outside.lockstep("train", "config.yaml", "training.compile=true", code=2)
    assert "the toy does not go with compiled blocks" in said
    assert "write compile: false" in said


def test_a_pipeline_takes_no_replicas_whose_axes_do_not_go_with_it() -> None:
    with pytest.raises(UsageError, match=r"can't be the replicas of pipeline:2"):
        parse_topology("pipeline:2*lockstep.parallel.replicas.accelerate:Accelerate:2")
    with pytest.raises(UsageError, match=r"can't be the replicas of ddp:2"):
        parse_topology("ddp:2*lockstep.parallel.replicas.ddp:DDP:2")


class NoApply(Axis):
    name = "no_apply"


class OfAnObject(Axis):
    name = "of_an_object"

    def apply(self, site: Any) -> None:  # type: ignore[override]
        pass


class NoName(Axis):
    @classmethod
    def apply(cls, site: Any) -> None:
        pass


class TakenName(NoName):
    name = "tensor"


def test_what_is_no_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="has no method apply"):
        list(axes_named(["tests.seams.test_axis:NoApply"]))
    for mistake, told in (
        (
            "OfAnObject",
            r"apply is not a classmethod(.|\n)*write @classmethod def apply\(cls, site\)",
        ),
        ("NoName", r"has no name(.|\n)*write name ="),
        ("TakenName", "is called tensor, as the axis that ships"),
    ):
        with pytest.raises(UsageError, match=told):
            list(axes_named([f"tests.seams.test_axis:{mistake}"]))
    with pytest.raises(UsageError, match=r"is not a subclass of lockstep\.parallel\.axes"):
        list(axes_named(["lockstep.layout:Layout"]))
