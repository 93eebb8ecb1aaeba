"""A plan advises compression of gradients only where steps get shorter by it."""

import pytest

from lockstep.config import config_from
from lockstep.costs.hardware import cluster_of
from lockstep.costs.steps import Pieces
from lockstep.plan.candidates import compression_advice, evaluate_layout
from lockstep.plan.command import why
from lockstep.plan.layouts import model_size_of
from lockstep.plan.workload import workload_of
from lockstep.strategy import resolve

GPUS = 4
SIZES = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 8192, "block_size": 16}
# 12 blocks of 20 MB and an embedding of 50 MB; a third of a second of computing for a micro-batch.
PIECES = Pieces(12, 20e6, 50e6, 0.1, 0.2)


def said(
    kind: str, interconnect: str | None, per_node: int, micro_batches: int = 1, **more: object
) -> list[str]:
    settings = {"distributed.strategy": "ddp", "distributed.ddp.compression.kind": kind, **more}
    config = config_from(settings)
    cluster = cluster_of(GPUS, "A100-80GB", interconnect, per_node=per_node)
    return compression_advice(
        PIECES, config, resolve(config.distributed, GPUS, per_node), cluster, micro_batches
    )


@pytest.mark.parametrize(
    ("interconnect", "per_node", "pays"),
    [
        ("Ethernet 1G", 1, True),
        ("Ethernet 10G", 1, True),
        ("InfiniBand NDR", 1, False),
        (None, 8, False),
    ],
)
def test_trap_62_a_plan_advises_compression_only_where_it_pays(
    interconnect: str | None, per_node: int, pays: bool
) -> None:
    """Published studies find gains in few set-ups: within a node, and on fast links, backward hides
    what is sent.
    """
    lines = said("none", interconnect, per_node)
    assert len(lines) == pays
    assert all("compression.kind: bf16 would take" in line for line in lines)
    asked = said("fp16", interconnect, per_node)
    assert len(asked) == (not pays)
    assert all("does not pay here" in line and line.endswith("write none") for line in asked)


def test_the_more_is_computed_in_a_step_the_less_a_link_matters() -> None:
    assert said("none", "Ethernet 10G", 1)
    assert not said("none", "Ethernet 10G", 1, micro_batches=64)


def test_where_bits_are_fixed_or_nothing_is_replicated_nothing_is_advised() -> None:
    assert not said("none", "Ethernet 1G", 1, **{"distributed.reproducible": True})
    assert not said("none", "Ethernet 1G", 1, **{"distributed.strategy": "fsdp"})


def test_low_rank_is_planned_as_it_is_sent() -> None:
    sent = {}
    for kind in ("none", "powersgd"):
        settings = {
            "model.name": "transformer",
            "model.args": SIZES,
            "distributed.ddp.compression.kind": kind,
        }
        config = config_from(settings)
        cluster = cluster_of(GPUS, "A100-80GB", "Ethernet 1G", per_node=1)
        work = workload_of(config)
        step = evaluate_layout(
            work, config, cluster, {"distributed.strategy": "ddp"}, model_size_of(work, config)
        ).step
        assert step is not None
        sent[kind] = step.between
    assert 0 < sent["powersgd"] < 0.1 * sent["none"]


def test_the_advice_is_in_what_a_plan_says() -> None:
    config = config_from(
        {"model.name": "transformer", "model.args": SIZES, "training.batch_size": 1}
    )
    cluster = cluster_of(GPUS, "A100-80GB", "Ethernet 1G", per_node=1)
    work = workload_of(config)
    found = evaluate_layout(
        work, config, cluster, {"distributed.strategy": "ddp"}, model_size_of(work, config)
    )
    assert any("bf16 would take" in line for line in why([found]))
