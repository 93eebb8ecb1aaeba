"""A model that recomputes parts of its forward pass itself trains like the same model that does
not.

It draws random numbers (dropout, stochastic depth), and a repeated forward pass has to draw those
of the first one.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import UsageError
from tests.parity.own_recomputation import (
    WAYS,
    Net,
    Numbers,
    chain,
    chain_of_recomputed,
    each,
    in_row,
    train,
)
from tests.ranks import run_ranks
from tests.sampled import quick_and_full, sampled

REPRODUCIBLE = {"distributed.reproducible": True}
# DDP and FSDP2 refuse the others
ONE_USE = [name for name in WAYS if name not in ("reversible", "shared, reentrant")]
PIPED = ("each", "each, reentrant", "each, selective", "lambda", "nested", "parts")
ZERO_BUBBLE = {
    "distributed.pipeline.schedule": "ZBVZeroBubble",
    "distributed.pipeline.stages_per_rank": 2,
}

Case = tuple[str, str, dict[str, Any]]  # (topology, way, settings)


def of_nets(cases: list[Case]) -> list[Numbers]:
    return [train(Net(WAYS[way][0]), topology, settings) for topology, way, settings in cases]


def of_chains(cases: list[Case]) -> list[Numbers]:
    return [train(chain(WAYS[way][0]), topology, settings) for topology, way, settings in cases]


def of_segments(topologies: list[str], settings: dict[str, Any]) -> list[Numbers]:
    """Train chains whose segments recompute themselves, with the generator restored or not."""
    options: list[tuple[bool | None, dict[str, Any]]] = [
        (False, {}),
        (True, {}),
        (False, {"preserve_rng_state": False}),
    ]
    return [
        train(chain_of_recomputed(reentrant, **more), topology, settings)
        for topology in topologies
        for reentrant, more in options
    ]


_plain: dict[Any, Numbers] = {}


def without(way: str | None, *, piped: bool = False) -> Numbers:
    """Return the numbers of one process that recomputes nothing; `way` None: of a chain of
    segments.
    """
    key = "segments" if way is None else (WAYS[way][1], piped)
    if key not in _plain:
        if way is None:
            model: nn.Module = chain_of_recomputed(None)
        else:
            model = chain(WAYS[way][1]) if piped else Net(WAYS[way][1])
        _plain[key] = train(model, "single", {})
    return _plain[key]


def assert_equal(found: Numbers, expected: Numbers, name: str) -> None:
    rows = zip(found[0], expected[0], strict=True)
    values = [
        (float.fromhex(a), float.fromhex(b))
        for one, other in rows
        for a, b in zip(one, other, strict=True)
    ]
    for mine, right in [*values, (float.fromhex(found[1]), float.fromhex(expected[1]))]:
        assert mine == pytest.approx(right, rel=1e-5, abs=1e-6), name


SOME = ("each, reentrant", "each, selective", "nested", "parts", "reversible", "shared")


@pytest.mark.parametrize("way", quick_and_full(WAYS, SOME))
def test_one_process_draws_again_what_it_drew(way: str) -> None:
    assert_equal(*of_nets([("single", way, {})]), without(way), way)


ON_RANKS: list[Case] = [
    ("fsdp:2", "shared", {"training.gradient_checkpointing": "full"}),
    ("ddp:2", "each", {"training.gradient_checkpointing": "sequential", **REPRODUCIBLE}),
    *(("ddp:2", way, {}) for way in ("each", "each, reentrant", "reversible", "nested")),
    *(("fsdp:2", way, {}) for way in WAYS if way != "reversible"),
]


@sampled("cases", ON_RANKS, len(ON_RANKS))
def test_ranks_draw_again_what_they_drew(cases: list[Case]) -> None:
    for case, numbers in zip(cases, run_ranks(of_nets, 2, cases)[0], strict=True):
        assert_equal(numbers, without(case[1]), f"{case}")


def refused(topology: str, way: str) -> str:
    with pytest.raises(UsageError) as error:
        train(Net(WAYS[way][0]), topology, {})
    dist.barrier()  # rank 0 hosts the store, which the other one may still ask
    return str(error.value)


def test_what_a_strategy_can_not_repeat_is_one_error() -> None:
    for text in run_ranks(refused, 2, "ddp:2", "shared, reentrant"):
        assert "use_reentrant=False" in text
        assert "layers.3" in text
    for text in run_ranks(refused, 2, "fsdp:2", "reversible"):
        assert "outside of the module that it belongs to" in text


IN_STAGES: list[Case] = [
    ("pipeline:2", "each", ZERO_BUBBLE),
    *(("pipeline:2", way, {}) for way in PIPED),
]


@sampled("cases", IN_STAGES, len(IN_STAGES))
def test_stages_draw_again_what_they_drew(cases: list[Case]) -> None:
    for case, numbers in zip(cases, run_ranks(of_chains, 2, cases)[0], strict=True):
        assert_equal(numbers, without(case[1], piped=True), f"{case}")


@pytest.mark.full
def test_segments_that_recompute_themselves_draw_again_what_they_drew() -> None:
    for numbers in run_ranks(of_segments, 2, ["pipeline:2", "fsdp:2"], {})[0]:
        assert_equal(numbers, without(None), "segments")


@pytest.mark.full
def test_each_way_under_each_strategy() -> None:
    reproducible: list[Case] = [
        (top, way, REPRODUCIBLE) for top in ("ddp:2", "fsdp:2") for way in ONE_USE
    ]
    own = [
        {"training.gradient_checkpointing": mode}
        for mode in ("full", "selective", "sequential", "every_n")
    ]
    both: list[Case] = [("fsdp:2", way, mode) for mode in own for way in ONE_USE]
    unsharded: list[Case] = [
        ("fsdp:2", "shared, reentrant", {"distributed.fsdp.accumulate": "unsharded"})
    ]
    cases = [*reproducible, *both, *unsharded]
    for case, numbers in zip(cases, run_ranks(of_nets, 2, cases, timeout=900)[0], strict=True):
        assert_equal(numbers, without(case[1]), f"{case}")
    piped: list[Case] = [("pipeline:2*fsdp:2", way, {}) for way in PIPED]
    piped += [("hybrid:2x2", way, {}) for way in PIPED]
    for case, numbers in zip(piped, run_ranks(of_chains, 4, piped, timeout=900)[0], strict=True):
        assert_equal(numbers, without(case[1], piped=True), f"{case}")


@pytest.mark.full
def test_the_bits_are_those_of_one_process() -> None:
    cases: list[Case] = [
        ("fsdp:2", way, REPRODUCIBLE)
        for way in ("each", "each, reentrant", "nested", "repeated at once")
    ]
    for case, numbers in zip(cases, run_ranks(of_nets, 2, cases)[0], strict=True):
        assert numbers[0] == of_nets([("single", *case[1:])])[0][0], f"{case}"


def compiled(way: Any) -> nn.Module:
    net = Net(way)
    for layer in net.layers:
        layer.depth_by_python = False
    return net


@pytest.mark.full
def test_compiled_blocks_draw_again_what_they_drew() -> None:
    settings = {"training.compile": True, "training.max_steps": 2}
    right = train(compiled(in_row), "single", settings)
    for way in ("each", "each, reentrant", "parts", "nested"):
        assert_equal(train(compiled(WAYS[way][0]), "single", settings), right, way)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def test_a_hugging_face_model_that_checkpoints_trains_like_one_that_does_not() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 31,
        "n_positions": 8,
        "use_cache": False,
    }

    def trained(options: dict[str, Any] | None) -> Numbers:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, resid_pdrop=0.3))
        if options is not None:
            model.gradient_checkpointing_enable(options)
        ids = torch.randint(0, 31, (32, 8), generator=torch.Generator().manual_seed(3))
        return train(model, "single", {}, Texts(ids))

    right = trained(None)
    for reentrant in (False, True):
        assert_equal(trained({"use_reentrant": reentrant}), right, f"use_reentrant={reentrant}")


def test_a_backward_pass_within_a_forward_pass_changes_no_draw() -> None:
    """A gradient penalty recomputes blocks in the middle of the forward pass, which
    then goes on.
    """

    class Penalised(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.stem(x).detach().requires_grad_()
            first = self.way(self.layers, hidden)
            (pull,) = torch.autograd.grad(first.sum(), hidden)
            return self.head(self.way(self.layers, self.stem(x))) + pull.square().sum(
                1, keepdim=True
            )

    assert_equal(
        train(Penalised(each), "single", {}), train(Penalised(in_row), "single", {}), "penalty"
    )
