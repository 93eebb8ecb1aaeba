"""Which sizes of the axes tensor, context and expert a plan considers, and what they cost."""

from typing import Any

import pytest

from lockstep.config import config_from
from lockstep.costs.hardware import Cost, cluster_of
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.plan.candidates import evaluate_layout
from lockstep.plan.layouts import layout_of, layouts, model_size_of
from lockstep.plan.messages import Messages
from lockstep.plan.workload import workload_of

LARGE = {
    "n_layer": 80,
    "n_embd": 8192,
    "n_head": 64,
    "n_kv_head": 8,
    "mlp_hidden": 28672,
    "vocab_size": 128256,
    "block_size": 8192,
}
SMALL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 128, "block_size": 32}


def proposed(model: str, args: dict[str, Any], gpus: int, **settings: Any) -> set[str]:
    config = config_from(
        {
            "model.name": model,
            "model.args": args,
            "training.batch_size": 1,
            "precision.mode": "bf16",
            **settings,
        }
    )
    work = workload_of(config)
    cluster = cluster_of(gpus, "H100")
    found = layouts(work, model_size_of(work, config), config, cluster, low=True, pipelines=True)
    return {str(layout_of(config, cluster, changes)) for changes in found}


def test_axes_are_proposed_where_they_serve() -> None:
    large = proposed("transformer", LARGE, 512)
    assert {"fsdp:64*tensor:8", "pipeline:2*fsdp:32*tensor:8", "fsdp:512"} <= large
    assert not any("context" in name for name in large)
    long = proposed("transformer", {**LARGE, "block_size": 131072}, 512)
    assert {"fsdp:32*context:16", "fsdp:4*context:16*tensor:8"} <= long
    mixture = proposed("mixture", {**SMALL, "n_expert": 16}, 16)
    assert {"ddp:16", "ddp:16*expert:8", "fsdp:16*expert:16"} <= mixture
    assert not any(
        "*" in name for name in proposed("transformer", SMALL, 8) if "pipeline" not in name
    )
    assert all(
        "tensor:2" in name
        for name in proposed("transformer", SMALL, 8, **{"distributed.tensor_size": 2})
    )


def test_time_and_bytes_along_axes() -> None:
    cluster = cluster_of(16, "H100")  # two nodes
    inside = cluster.inside.bandwidth * 0.7
    between = cluster.between.bandwidth * 0.7
    along = Messages(Layout("fsdp", shard=2, tensor=8), cluster)
    tensor = along.of(Cost(sent={"tensor": 7_000_000_000}))
    assert tensor == pytest.approx((7 / inside, 7e9, 0))
    among = Messages(Layout("ddp", replicate=16, expert=16), cluster)
    expert = among.of(Cost(sent={"expert": 15_000_000_000}))
    assert expert == pytest.approx((max(7 / inside, 8 / between), 7e9, 8e9))
    config = config_from({"model.name": "mixture", "model.args": SMALL, "training.batch_size": 1})
    size = model_size_of(workload_of(config), config)
    assert size.expert_parameters == 2 * 8 * 3 * 64 * 88
    sums = Messages(Layout("ddp", replicate=16, expert=8), cluster).at_last(size)
    # an all-reduce of two ranks
    assert sums.between == pytest.approx(2 * 4 * size.expert_parameters / 8 / 2)


def test_what_experts_over_ranks_save_and_send() -> None:
    config = config_from(
        {
            "model.name": "mixture",
            "model.args": SMALL,
            "training.batch_size": 2,
            "precision.mode": "fp32",
        }
    )
    work = workload_of(config)
    cluster = cluster_of(4, "A100-80GB")
    size = model_size_of(work, config)

    def judged(**changes: Any) -> Any:
        return evaluate_layout(
            work, config, cluster, {f"distributed.{k}": v for k, v in changes.items()}, size
        )

    plain = judged(strategy="ddp")
    spread = judged(strategy="ddp", expert_size=4)
    held = 4 * (size.parameters - size.expert_parameters * 3 / 4)
    assert (
        abs(spread.memory["optimizer"] / (2 * held) - 1)
        < 0.01
        > abs(spread.memory["parameters"] / held - 1)
    )
    assert spread.needed_bytes < plain.needed_bytes
    # passes × exchanges × positions × top_k × samples × bytes × layers, of which 3 of 4 leave
    rows = 2 * 2 * 32 * 2 * 2 * (64 * 4) * 2 * 3 / 4
    dense = 2 * 4 * (size.parameters - size.expert_parameters) * 3 / 4
    assert spread.step.inside == pytest.approx(rows + dense, rel=0.02)


def test_experts_that_do_not_divide_are_refused() -> None:
    config = config_from({"model.name": "mixture", "model.args": SMALL, "training.batch_size": 2})
    with pytest.raises(UsageError, match="expert_size=3 does not divide the data-parallel size, 4"):
        layout_of(
            config,
            cluster_of(4, "H100"),
            {"distributed.strategy": "ddp", "distributed.expert_size": 3},
        )
