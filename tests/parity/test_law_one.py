"""A step is a function of (config, seed, step): not of the number of ranks, nor of how the global
batch is cut.
"""

import pytest
import torch

from tests.parity.toy import language_model, losses, many, worst
from tests.ranks import run_ranks

TOLERANCE = 1e-5  # of fp32 sums in another order, over 8 or 20 steps of AdamW


def test_trap_01_the_loss_is_the_sum_over_all_valid_targets_however_the_batch_is_cut() -> None:
    """A mean of micro-batch means gives more weight to samples with few valid targets.

    Dropout is off: otherwise the cut changes the random numbers, which belong to micro-batches.
    """
    whole = losses({"training.batch_size": 8, "training.global_batch_size": 8}, dropout=0.0)
    pieces = losses({"training.batch_size": 2, "training.global_batch_size": 8}, dropout=0.0)
    assert worst(pieces, whole) < TOLERANCE
    accumulated = losses(
        {
            "training.batch_size": 2,
            "training.global_batch_size": None,
            "training.gradient_accumulation_steps": 4,
        },
        dropout=0.0,
    )
    assert accumulated == pieces


PAIRS = [(strategy, model) for strategy in ("ddp", "fsdp") for model in ("transformer", "bdh")]


@pytest.mark.parametrize(
    ("ranks", "pairs", "steps"),
    [
        pytest.param(3, PAIRS[::3], 5, id="3, some"),
        *(pytest.param(n, PAIRS, 8, id=f"{n}", marks=pytest.mark.full) for n in (2, 3, 4)),
    ],
)
def test_the_number_of_ranks_changes_nothing(
    ranks: int, pairs: list[tuple[str, str]], steps: int
) -> None:
    """1 rank × 12 micro-batches, 2 × 6, 3 × 4, 4 × 3, dropout on, uneven masks, short
    last batches.
    """
    cases = [({"distributed.strategy": s}, m, {"steps": steps}) for s, m in pairs]
    reference = {model: losses({}, model, steps=steps) for _, model in pairs}
    for results in run_ranks(many, ranks, cases):
        for (settings, model, _), result in zip(cases, results, strict=True):
            expected = reference[model]
            assert worst(losses_of(result), losses_of(expected)) < TOLERANCE, (settings, model)
            # A norm jumps where a rounding error carries a ReLU over its kink, so it is held to its
            # first steps.
            assert worst(result[:5], expected[:5]) < TOLERANCE, (settings, model)


def losses_of(records: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    return [record[:1] for record in records]


def test_trap_03_a_step_is_one_update_whatever_the_accumulation() -> None:
    """`max_steps`, warm-up and schedules count updates, not micro-batches."""
    few = losses({"training.global_batch_size": 4}, steps=6)
    many_micro_batches = losses({"training.global_batch_size": 24}, steps=6)
    assert [lr for _, _, lr, _ in few] == [lr for _, _, lr, _ in many_micro_batches]
    assert len(few) == len(many_micro_batches) == 6


def test_trap_04_the_last_window_of_an_epoch_is_trained_on_and_weighted_by_what_it_holds() -> None:
    """83 samples in steps of 24: the fourth step holds 11 of them, and is neither dropped nor
    weighed as 24.
    """
    records = losses({}, steps=8)
    tokens = [count for *_, count in records]
    assert tokens[3] < tokens[0] / 2
    assert sum(tokens[:4]) == sum(tokens[4:]) == sum(16 - i % 7 for i in range(83))


def test_trap_04_an_incomplete_window_of_training_step_is_flushed() -> None:
    from lockstep.trainer import Trainer
    from tests.parity.toy import Tokens

    def batch(start: int) -> dict[str, torch.Tensor]:
        items = [Tokens()[i] for i in range(start, start + 2)]
        return {key: torch.stack([item[key] for item in items]) for key in items[0]}

    def trainer(accumulation: int) -> Trainer:
        model = language_model("transformer", dropout=0.0)
        return Trainer(
            model, gradient_accumulation_steps=accumulation, batch_size=2, warmup_steps=0
        )

    flushed = trainer(4)
    exact = trainer(2)
    for one in (flushed, exact):
        for start in (0, 2):
            one.training_step(batch(start))
    assert flushed.step.progress.updates == 0
    assert exact.step.progress.updates == 1
    flushed.flush()
    assert flushed.step.progress.updates == 1
    for a, b in zip(
        flushed.placed.parameters.values(), exact.placed.parameters.values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_trap_47_first_values_depend_on_seed_and_name_only() -> None:
    """FSDP2's usual recipe, `reset_parameters` on shards, gives other weights on another number of
    ranks.
    """
    reference = first_values("single")
    for values in run_ranks(first_values_of_all, 3):
        for strategy, theirs in values.items():
            assert theirs.keys() == reference.keys()
            assert all(torch.equal(theirs[name], reference[name]) for name in reference), strategy
    other_seed = first_values("single", seed=2)
    assert not torch.equal(
        other_seed["layers.0.attention.query.weight"], reference["layers.0.attention.query.weight"]
    )


def first_values(strategy: str, seed: int = 1) -> dict[str, torch.Tensor]:
    from lockstep.trainer import Trainer

    trainer = Trainer(language_model("transformer"), strategy=strategy, seed=seed)
    parameters = trainer.placed.parameters.items()
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in parameters
    }


def first_values_of_all() -> dict[str, dict[str, torch.Tensor]]:
    return {strategy: first_values(strategy) for strategy in ("ddp", "fsdp")}
