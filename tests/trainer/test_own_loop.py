"""`lockstep.place`: a loop of one's own, whose gradients are those of one process under every
strategy.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.errors import RunError, UsageError
from lockstep.heartbeat import writer
from tests.ranks import run_ranks

VOCAB = 11
WIDTH = 8
STEPS = 3
Batch = tuple[Tensor, Tensor]
LOSS = nn.CrossEntropyLoss(ignore_index=-100)

ON_TWO: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "sharding_strategy": "shard_grad_op"},
    {"strategy": "fsdp", "sharding_strategy": "no_shard"},
    {"strategy": "pipeline"},
    {"strategy": "accelerate"},
]
ON_FOUR: list[dict[str, Any]] = [
    {"strategy": "fsdp", "replicate_size": 2, "shard_size": 2},
    {"strategy": "pipeline", "pipeline_size": 2, "replicate_size": 2},
    {"strategy": "pipeline", "pipeline_size": 2, "shard_size": 2},
]


def tied(dropout: float = 0.0) -> nn.Sequential:
    """A tiny language model whose first and last layers share a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCAB, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(dropout),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, VOCAB),
    )
    model[5].weight = model[0].weight
    return model


def micro_batches(step: int) -> list[Batch]:
    """Of one step: their numbers of samples and of valid targets differ, and the last step is one
    short.
    """
    generator = torch.Generator().manual_seed(step)
    found = []
    for index in range(4 if step < STEPS - 1 else 3):
        ids = torch.randint(0, VOCAB, (2 + index % 2, 6), generator=generator)
        targets = ids.roll(-1, 1)
        targets[:, : (3 * index + step) % 6] = -100
        found.append((ids, targets))
    return found


def loss_of(model: nn.Module, batches: list[Batch]) -> Tensor:
    """The mean over the valid targets of all of them, in plain torch."""
    sums = [
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        for x, y in batches
    ]
    return torch.stack(sums).sum() / sum((y != -100).sum() for _, y in batches)


def optimizers_over(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    weights, biases = ([p for n, p in named if n.endswith(end)] for end in ("weight", "bias"))
    return [torch.optim.AdamW(weights, lr=1e-2), torch.optim.SGD(biases, lr=0.1, momentum=0.9)]


def by_hand() -> tuple[list[tuple[float, float, float]], dict[str, Tensor], Tensor]:
    """(loss, gradient norm, loss on the first step's data) of each step, the weights and outputs:
    torch alone.
    """
    model = tied()
    seen = []
    optimizers = optimizers_over(list(model.named_parameters()))
    for step in range(STEPS):
        loss = loss_of(model, micro_batches(step))
        loss.backward()
        with torch.no_grad():
            held_out = loss_of(model, micro_batches(0))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append((loss.item(), norm.item(), held_out.item()))
    return seen, model.state_dict(), model(micro_batches(0)[0][0]).detach()


def placed_run(
    settings: dict[str, Any], folder: Path
) -> tuple[list[tuple[float, float, float]], dict[str, Tensor], Tensor]:
    """The same on the ranks that there are; after the first step it goes on from a checkpoint."""
    placed = lockstep.place(tied(), loss_fn=LOSS, **settings)
    seen = []
    optimizers = optimizers_over(list(placed.named_parameters()))
    mine = slice(placed.data_parallel_rank, None, placed.data_parallel_size)
    for step in range(STEPS):
        loss = placed.backward(*micro_batches(step)[mine])
        # Between the gradient and the update: a forward pass must not keep what the update
        # outdates.
        held_out = placed.evaluate(micro_batches(0)[mine])
        norm = placed.clip_grad_norm_(0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append((float(loss), float(norm), held_out))
        if step == 0:
            placed.save_checkpoint(
                folder, dict(zip(("one", "two"), optimizers, strict=True)), {"note": "half-way"}
            )
            placed = lockstep.place(tied(), loss_fn=LOSS, **settings)
            optimizers = optimizers_over(list(placed.named_parameters()))
            assert (
                placed.load_checkpoint(folder, dict(zip(("one", "two"), optimizers, strict=True)))[
                    "note"
                ]
                == "half-way"
            )
            assert placed.step == 1
    outputs = placed(micro_batches(0)[0][0])
    state = placed.state_dict()
    _require_round_trip(placed, state, outputs)
    return seen, state, outputs


def _require_round_trip(placed: Any, state: dict[str, Tensor], outputs: Tensor) -> None:
    """Weights that were taken out and put back are the same; those of another model are refused on
    all ranks.
    """
    with torch.no_grad():
        for parameter in placed.parameters():
            parameter.zero_()
    placed.load_state_dict(state)
    torch.testing.assert_close(placed(micro_batches(0)[0][0]), outputs, rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"another model's(.|\n)*it lacks 0\.weight, 1\.bias"):
        placed.load_state_dict({})


def dropout_run(settings: dict[str, Any]) -> list[float]:
    placed = lockstep.place(tied(dropout=0.5), loss_fn=LOSS, **settings)
    # the same step again, but for what it draws
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.0)
    mine = slice(placed.data_parallel_rank, None, placed.data_parallel_size)
    losses = []
    for _ in range(2):
        losses.append(float(placed.backward(*micro_batches(0)[mine])))
        optimizer.step()
        placed.zero_grad()
    return losses


def _on_each_rank(cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    found = [(placed_run(case, folder / str(i)), dropout_run(case)) for i, case in enumerate(cases)]
    if dist.get_world_size() == 2:
        _misuse()
    return found


def _misuse() -> None:
    """What ranks do wrong together is one error on all of them, and nobody waits."""
    rank = dist.get_rank()
    # as ranks of two machines: those of one are told by the calls that they compare
    writer.stop_sharing_calls()
    placed = lockstep.place(tied(), "fsdp", LOSS)
    with pytest.raises(UsageError, match="rank 1 brings no micro-batch, and has had none before"):
        placed.backward(*micro_batches(0)[: 1 - rank])
    with pytest.raises(
        RunError, match="rank 0 is in backward after step 0, rank 1 in evaluate after step 0"
    ):
        (placed.backward if rank == 0 else lambda *batches: placed.evaluate(batches))(
            *micro_batches(0)
        )
    placed = lockstep.place(tied(), "pipeline", LOSS)
    with pytest.raises(
        UsageError, match="ranks 0 and 1 are one pipeline, and bring 1 and 2 micro-batches"
    ):
        placed.backward(*micro_batches(0)[: 1 + rank])


def _compare(cases: list[dict[str, Any]], ranks: int, folder: Path) -> None:
    steps, weights, outputs = by_hand()
    drawn = dropout_run({"strategy": "single"})
    assert drawn[0] != drawn[1], "two steps drew the same"
    for rank, results in enumerate(run_ranks(_on_each_rank, ranks, cases, folder)):
        for settings, ((seen, state, sampled), losses) in zip(cases, results, strict=True):
            message = f"{settings} on rank {rank}"
            torch.testing.assert_close(
                torch.tensor(seen), torch.tensor(steps), rtol=2e-6, atol=0, msg=message
            )
            torch.testing.assert_close(sampled, outputs, rtol=1e-5, atol=1e-6)
            assert losses == pytest.approx(drawn, rel=1e-6), message
            assert bool(state) == (rank == 0), message
            if rank == 0:
                plain = tied()
                plain.load_state_dict(state)  # strict: the same names, tied ones too
                for name, tensor in plain.state_dict().items():
                    torch.testing.assert_close(
                        tensor, weights[name], rtol=1e-4, atol=1e-6, msg=f"{message}: {name}"
                    )


@pytest.mark.parametrize(
    "cases",
    [[*ON_TWO[:2], ON_TWO[4]], pytest.param(ON_TWO, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_two_ranks_make_the_gradients_of_one_process_under_every_strategy(
    cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    _compare(cases, 2, tmp_path)


@pytest.mark.full
def test_four_ranks_make_the_gradients_of_one_process_under_every_strategy(tmp_path: Path) -> None:
    _compare(ON_FOUR, 4, tmp_path)


@pytest.mark.parametrize("strategy", ["single", "dp", "fsdp"])
def test_one_process_makes_the_gradients_of_torch(strategy: str, tmp_path: Path) -> None:
    steps, weights, outputs = by_hand()
    seen, state, sampled = placed_run({"strategy": strategy}, tmp_path)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(steps), rtol=2e-6, atol=0)
    torch.testing.assert_close(sampled, outputs, rtol=1e-5, atol=1e-6)
    assert state.keys() == weights.keys()


def test_a_second_backward_before_the_gradients_are_gone_is_refused() -> None:
    placed = lockstep.place(tied(), loss_fn=LOSS)
    placed.backward(*micro_batches(0))
    with pytest.raises(
        UsageError,
        match=r"gradients of the last backward are still there(.|\n)*pass all micro-batches",
    ):
        placed.backward(*micro_batches(1))


def test_no_data_at_all_is_one_clear_message() -> None:
    placed = lockstep.place(tied(), loss_fn=LOSS)
    with pytest.raises(UsageError, match="no rank brings a micro-batch"):
        placed.backward()
    with pytest.raises(UsageError, match="there is nothing to evaluate on"):
        placed.evaluate([])


def test_a_checkpoint_that_is_not_there_or_lacks_an_optimizer_is_refused(tmp_path: Path) -> None:
    placed = lockstep.place(tied(), loss_fn=LOSS)
    with pytest.raises(
        UsageError, match=r"there is no checkpoint in .*(.|\n)*the folder that was saved to"
    ):
        placed.load_checkpoint(tmp_path)
    placed.save_checkpoint(tmp_path)
    assert placed.load_checkpoint(tmp_path) == {}
    with pytest.raises(UsageError, match="holds no optimizer 'one'"):
        placed.load_checkpoint(tmp_path, {"one": torch.optim.SGD(placed.parameters(), lr=0.1)})


def test_a_frozen_normalisation_stays_frozen_over_an_evaluation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 1))
    placed = lockstep.place(model, loss_fn=nn.MSELoss())
    placed.evaluate([(torch.randn(3, 4), torch.randn(3, 1))])
    placed(torch.randn(3, 4))
    assert [module.training for module in model] == [True, False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "diloco"}, "strategy diloco is not supported by lockstep.place()"),
        ({"reproducible": True}, "distributed.reproducible is not supported by lockstep.place()"),
        ({"precision": "fp16"}, r"precision fp16 is not supported(.|\n)*or write bf16"),
        ({"learning_rate": 0.1}, "training.learning_rate means nothing to lockstep.place"),
        ({"stategy": "ddp"}, "unknown setting stategy(.|\n)*write strategy"),
    ],
)
def test_what_a_loop_of_ones_own_can_not_have_is_one_clear_message(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        lockstep.place(tied(), loss_fn=LOSS, **settings)


def test_a_trainer_takes_up_a_checkpoint_of_the_loop(tmp_path: Path) -> None:
    batch = (torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 3)
    loss_fn = nn.CrossEntropyLoss()
    model = nn.Linear(4, 3)
    placed = lockstep.place(model, "single", loss_fn=loss_fn)
    one = torch.optim.AdamW(placed.parameters(), lr=0.1)
    for _ in range(2):
        placed.backward(batch)
        one.step()
        placed.zero_grad()
    placed.save_checkpoint(tmp_path / "one", {"my-own": one}, {"note": "mine"})
    fresh = nn.Linear(4, 3)
    trainer = lockstep.Trainer(
        fresh, torch.optim.AdamW(fresh.parameters(), lr=0.1), loss_fn, batch_size=4, max_steps=3
    )
    assert trainer.load_checkpoint(tmp_path / "one") == (2, {"note": "mine"})
    [record] = trainer.steps(torch.utils.data.TensorDataset(*batch), epochs=3)
    placed.backward(batch)
    one.step()
    assert record.step == 3
    for mine, other in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(mine, other)

    halves = {name: torch.optim.SGD([p], lr=0.1) for name, p in placed.named_parameters()}
    placed.save_checkpoint(tmp_path / "two", halves)
    with pytest.raises(
        UsageError, match=r"optimizers bias, weight, and a Trainer has one(.|\n)*checkpoint.weights"
    ):
        trainer.load_checkpoint(tmp_path / "two")
