"""bf16 and fp16 under every strategy; overflows that all ranks agree on; parameters gathered in
bf16.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.precision import switch_tf32
from lockstep.trainer import Trainer
from tests.parity.matrix import Case, difference, reference, run, run_all
from tests.parity.parts import outcome, parts_of_make_test
from tests.parity.toy import Tokens, language_model
from tests.ranks import run_ranks

*_, HALF = parts_of_make_test()
CASES = HALF.cases


def in_one_launch() -> dict[str, Any]:
    strategies = {"ddp": {}, "fsdp": {"distributed.fsdp.accumulate": "unsharded"}}
    return {
        "modes": run_all(CASES),
        "overflow": {
            name: overflow({"distributed.strategy": name, **more})
            for name, more in strategies.items()
        },
    }


def overflow(settings: dict[str, Any]) -> dict[str, Any]:
    """fp16, accumulation; in step 2 the gradient of an activation has an inf on rank 1."""
    common = {
        "training.batch_size": 2,
        "training.global_batch_size": 8,
        "training.max_steps": 50,
        "training.warmup_steps": 10,
        "precision.mode": "fp16",
        "precision.loss_scale.growth_interval": 2,
        "precision.loss_scale.initial_scale": 1024.0,
    }
    trainer = Trainer(language_model("transformer"), config=config_from({**common, **settings}))
    [(_, block), *_] = trainer.placed.parts[0].blocks()  # type: ignore[operator]

    def plant(gradient: Tensor) -> Tensor:
        here = dist.is_initialized() and dist.get_rank() == 1
        return (
            torch.full_like(gradient, torch.inf)
            if trainer.step.progress.step == 2 and here
            else gradient
        )

    block.register_forward_hook(lambda _m, _a, output: output.register_hook(plant) and None)
    records = []
    for record in trainer.steps(Tokens()):
        records.append(
            (record.loss_scale, record.skipped, trainer.step.progress.updates, record.lr)
        )
        if len(records) == 6:
            break
    local = [
        p.to_local() if hasattr(p, "to_local") else p for p in trainer.placed.parameters.values()
    ]
    return {
        "records": records,
        "skipped": trainer.step.progress.skipped,
        "finite": all(bool(p.isfinite().all()) for p in local),
        "values": (
            torch.cat([p.detach().flatten() for p in local])
            if settings["distributed.strategy"] == "ddp"
            else 0
        ),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(in_one_launch, 2)


def test_half_precision_is_the_same_under_every_strategy(found: list[dict[str, Any]]) -> None:
    for case, *results in zip(CASES, *(rank["modes"] for rank in found), strict=True):
        assert not outcome(case, 2, results).problem
    fp32 = run(Case("transformer", "single", 1, "none"), 6)
    bf16 = reference(Case("transformer", "single", 1, "none", (("precision.mode", "bf16"),)), 6)
    assert difference(bf16, fp32) > 1e-4, "autocast has no effect"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_trap_08_an_overflow_on_one_rank_is_skipped_by_all(
    found: list[dict[str, Any]], strategy: str
) -> None:
    """Replicas of which one skips a step differ for ever."""
    results = [rank["overflow"][strategy] for rank in found]
    for result in results:
        assert result["skipped"] == [2]
        assert [skipped for _, skipped, _, _ in result["records"]] == [
            False,
            False,
            True,
            False,
            False,
            False,
        ]
        scales = [scale for scale, *_ in result["records"]]
        # grows after two quiet steps, then falls
        assert scales == [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
        assert result["finite"]
    if strategy == "ddp":
        assert torch.equal(results[0]["values"], results[1]["values"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_trap_59_the_schedule_stands_still_on_a_step_that_is_skipped(
    found: list[dict[str, Any]], strategy: str
) -> None:
    records = found[0]["overflow"][strategy]["records"]
    assert [updates for _, _, updates, _ in records] == [1, 2, 2, 3, 4, 5]
    rates = [rate for *_, rate in records]
    assert rates[2] == rates[3]
    assert rates[3] < rates[4]


def gathered_in_bf16() -> list[Any]:
    more = (("precision.param_dtype", "bf16"),)
    strategies = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
    return run_all([Case("transformer", s, 1, "none", more, steps=3) for s in strategies])


@pytest.mark.full
def test_parameters_gathered_in_bf16_train_the_same_on_any_mesh() -> None:
    """Runs of this setting are compared with each other, not with runs with fp32 parameters.

    Gradients are still summed in fp32, so the parts of the sum are the same numbers, added in
    another order.
    """
    for results in run_ranks(gathered_in_bf16, 4):
        first, *others = results
        fp32 = run(Case("transformer", "single", 1, "none", steps=3), 4)
        assert 1e-4 < difference(first, fp32) < 0.1
        for other in others:
            assert difference(other, first) < 2e-3, other


@pytest.mark.parametrize("strategy", ["single", "ddp", "full_shard"])
def test_parameters_in_bf16_are_refused_where_nothing_is_gathered(strategy: str) -> None:
    with pytest.raises(UsageError, match="needs strategy fsdp on two ranks"):
        run(Case("transformer", strategy, 1, "none", (("precision.param_dtype", "bf16"),)), 1)


def test_cpu_offload_on_the_cpu_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to offload"):
        run(
            Case("transformer", "full_shard", 1, "none", (("distributed.fsdp.cpu_offload", True),)),
            1,
        )


def test_tf32_is_switched_for_products_and_convolutions() -> None:
    for allowed in (True, False):
        switch_tf32(allowed)
        assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert torch.backends.cudnn.allow_tf32 is allowed
