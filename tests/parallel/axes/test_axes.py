"""Each axis is one class with one protocol, and `place` asks all of them alike."""

import ast
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import config_from
from lockstep.config.checks import step_contradictions
from lockstep.data.batches import assign_contiguous
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.models.protocol import objective_of
from lockstep.models.transformer import Transformer
from lockstep.parallel.axes.axis import Axis, PartOfModel, require_axis
from lockstep.parallel.axes.context import ContextAxis
from lockstep.parallel.axes.tensor import TensorAxis
from lockstep.parallel.facts import facts_of
from lockstep.parallel.place import ask_axes, place_on_ranks
from lockstep.parallel.site import Site
from lockstep.precision import Precision
from lockstep.randomness import RandomState
from lockstep.registry import AXES, BY_SIZE
from lockstep.strategy import strategy_named
from tests import house

_SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 8, "block_size": 8}
_EXACT = {"distributed.reproducible": True, "distributed.open_axes": ["tensor", "context"]}


def site_of(model: nn.Module, settings: dict[str, Any]) -> Site:
    step = config_from(settings).step
    cpu = torch.device("cpu")
    return Site(facts_of(model), Layout(), step, Precision("fp32", "cpu"), RandomState(0, cpu))


def axes_of(model: nn.Module, settings: dict[str, Any]) -> dict[str, Axis]:
    site = site_of(model, settings)
    ask_axes(site)
    return site.axes


def test_each_name_of_the_registry_is_the_name_of_its_class() -> None:
    for name in AXES.shipped:
        kind = AXES.load(name)
        assert issubclass(kind, Axis)
        assert kind.name == name


# axis → files of the package whose code names it: its class, its size, or its name as a key. Who
# wants to know all about an axis reads these, the rest of the package asks each axis alike. Only
# ever lowered.
FILES = {
    "pipeline": 16,
    "replicate": 19,
    "shard": 18,
    "context": 17,
    "tensor": 20,
    "expert": 15,
    "batch_norm": 7,
}
# (axis, file) where the word means something else: a column of a data set, an argument of a sink,
# torch's function
OF_ANOTHER_MEANING = {
    ("context", "lockstep.files.data_files"),
    ("context", "lockstep.monitor.sinks"),
    ("tensor", "lockstep.torch_compat.script_patches"),
}


def _words(module: str) -> set[str]:
    """Return the strings and names in a module's code, and attributes: `.attr`, `owner.attr`."""
    words: set[str] = set()
    for node in house.nodes(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(repr(node.value))
        elif isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            held = getattr(node.value, "attr", getattr(node.value, "id", ""))
            words |= {f".{node.attr}", f"{held}.{node.attr}"}
    return words


def test_few_files_name_an_axis() -> None:
    words = {module: _words(module) for module in house.files()}
    for axis, most in FILES.items():
        keys = {repr(key) for key in (axis, f"{axis}_size", f"distributed.{axis}_size")}
        keys |= {f".{axis}_size", f"layout.{axis}", AXES.load(axis).__name__}
        found = sorted(
            module
            for module, said in words.items()
            if keys & said and (axis, module) not in OF_ANOTHER_MEANING
        )
        assert len(found) <= most, (axis, found)
    assert FILES.keys() == set(AXES.shipped)


_ALL = ["batch_norm", "context", "expert", "tensor"]


@pytest.mark.parametrize(
    ("strategy", "beside", "said"),
    [
        ("single", [], []),
        ("dp", [], ["in_threads"]),
        ("ddp", _ALL, ["in_buckets"]),
        ("fsdp", _ALL, []),
        ("context", ["context", "tensor"], []),
        ("tensor", ["context", "tensor"], []),
        ("pipeline", ["context", "expert", "tensor"], ["in_stages"]),
        ("accelerate", [], ["in_buckets"]),
        ("diloco", [], []),
    ],
)
def test_a_strategy_is_what_the_axes_of_its_list_say(
    strategy: str, beside: list[str], said: list[str]
) -> None:
    found = strategy_named(strategy)
    assert [axis for axis in BY_SIZE if found.goes_with(axis)] == beside
    assert [q for q in ("in_stages", "in_buckets", "in_threads") if getattr(found, q)] == said


def test_on_one_rank_no_axis_does_anything_to_a_plain_step() -> None:
    model = Transformer(**_SIZES)
    assert axes_of(model, {}) == {}
    assert not any("forward" in vars(module) for module in model.modules())


def test_where_bits_count_layers_and_sequences_are_in_blocks_on_one_rank_too() -> None:
    model = Transformer(**_SIZES)
    axes = axes_of(model, _EXACT)
    assert list(axes) == ["context", "tensor"]
    assert isinstance(axes["context"], ContextAxis)
    assert isinstance(axes["tensor"], TensorAxis)
    assert axes["tensor"].cuts.cut.within is axes["context"].cut
    value = torch.ones(2, 2)
    assert axes["tensor"].local_piece("head.weight", value) is value  # one rank keeps all of it


def test_what_an_axis_returns_in_place_of_a_placed_model_is_refused() -> None:
    class Wraps(Axis):
        name = "wraps"

        def place_model(self) -> Any:
            return self.site.model

    site = site_of(nn.Linear(2, 2), {})
    site.axes["wraps"] = Wraps(site)
    with pytest.raises(UsageError, match="returned a Linear, not a ParallelModel"):
        place_on_ranks(site)


def test_an_axis_that_writes_nothing_but_apply_changes_nothing() -> None:
    class Idle(Axis):
        name = "idle"

        @classmethod
        def apply(cls, site: Site) -> "Idle":
            return cls(site)

    model = nn.Linear(2, 2)
    axis = Idle.apply(site_of(model, {}))
    objective = objective_of(model, nn.MSELoss())
    assert axis.objective_of_parts(objective) is objective
    assert list(axis.around_passes(PartOfModel(model, False, assign_contiguous))) == []
    assert axis.spread_names == frozenset()
    assert list(Idle.contradictions(config_from({}).step, None)) == []


@pytest.mark.parametrize("name", AXES.shipped)
def test_an_axis_that_ships_is_one(name: str) -> None:
    """Runs do not ask."""
    require_axis(AXES.load(name), name)


@pytest.mark.parametrize(
    ("axis", "key", "value"),
    [("tensor", "precision.fp8", "emulated"), ("expert", "distributed.fsdp.cpu_offload", True)],
)
def test_an_axis_says_itself_what_it_does_not_go_with(axis: str, key: str, value: Any) -> None:
    alone = config_from({key: value}).step
    assert not any(f"distributed.{axis}_size" in each.keys for each in step_contradictions(alone))
    along = Layout("ddp", replicate=2, **{axis: 2})
    found = [each.keys for each in step_contradictions(alone, along)]
    assert (f"distributed.{axis}_size", key) in found
