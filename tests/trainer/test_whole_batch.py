"""Losses over the whole global batch: the gradient of a plain loop over it, however it is cut and
placed.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Trainer, WholeBatch
from lockstep.errors import RunError, UsageError
from tests.ranks import run_ranks

BATCH = 12
STEPS = 3


class Towers(nn.Module):
    """CLIP in small: two towers and a temperature, of which each micro-batch returns
    the same one.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 6)
        )
        self.text = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            F.normalize(self.image(image), dim=-1),
            F.normalize(self.text(text), dim=-1),
            self.scale.exp(),
        )


def clip(outputs: tuple[Tensor, Tensor, Tensor], targets: Any) -> Tensor:
    image, text, scale = outputs
    similar = scale * image @ text.T
    own = torch.arange(len(image), device=image.device)
    return (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2


def contrast(outputs: Tensor, targets: Any) -> Tensor:
    """SimCLR's NT-Xent of two views, [N, 2, D]."""
    both = F.normalize(outputs.transpose(0, 1).flatten(0, 1), dim=-1)
    similar = (both @ both.T / 0.5).fill_diagonal_(-torch.inf)
    half = len(outputs)
    return F.cross_entropy(similar, torch.arange(2 * half).roll(half))


def pairs() -> TensorDataset:
    # the last step is short
    x = torch.randn(BATCH * STEPS - 4, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.roll(1, 1).sin(), torch.zeros(len(x)))


def views() -> TensorDataset:
    x = torch.randn(BATCH * STEPS - 4, 2, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, torch.zeros(len(x)))


def chain(dropout: float) -> nn.Module:
    layers = (
        nn.Linear(4, 8),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 6),
    )
    return nn.Sequential(*layers)


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "clip": (Towers, clip, pairs),
    "contrast": (chain, contrast, views),
}
Steps = list[tuple[float, float]]


def trained(
    kind: str, dropout: float = 0.2, batch_size: int = 3, **settings: Any
) -> tuple[Steps, list[float]]:
    """(loss, norm) of each step, and the weights at the end (on rank 0)."""
    make, loss_fn, data = KINDS[kind]
    torch.manual_seed(0)
    trainer = Trainer(
        make(dropout),
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        WholeBatch(loss_fn),
        shuffle=False,
        batch_size=batch_size,
        global_batch_size=BATCH,
        min_num_params=1,
        **settings,
    )
    steps = [(float(record.loss), float(record.grad_norm)) for record in trainer.steps(data())]
    return steps, numbers(trainer.state_dict())


def numbers(state: dict[str, Tensor]) -> list[float]:
    return [
        number for _, value in sorted(state.items()) for number in value.double().flatten().tolist()
    ]


def by_hand(kind: str) -> tuple[Steps, list[float]]:
    make, loss_fn, data = KINDS[kind]
    torch.manual_seed(0)
    model = make(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for *inputs, _ in DataLoader(data(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = loss_fn(model(*inputs), None)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        found.append((loss.item(), norm.item()))
        optimizer.step()
    return found, numbers(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_is_the_plain_loop_over_whole_batches(kind: str) -> None:
    steps, weights = trained(kind, dropout=0.0, batch_size=BATCH)
    expected, expected_weights = by_hand(kind)
    assert [list(step) for step in steps] == [
        pytest.approx(list(step), rel=1e-5) for step in expected
    ]
    assert weights == pytest.approx(expected_weights, rel=1e-4, abs=1e-6)
    # without BatchNorm, whose statistics are of micro-batches, no cut matters
    if kind == "contrast":
        cut, _ = trained(kind, dropout=0.0, batch_size=2)
        assert [list(step) for step in cut] == [
            pytest.approx(list(step), rel=1e-5) for step in expected
        ]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("clip", {"strategy": "ddp"}),
    ("clip", {"strategy": "fsdp", "gradient_checkpointing": "none"}),
    ("contrast", {"strategy": "ddp", "reproducible": True}),
    ("contrast", {"strategy": "fsdp"}),
    ("contrast", {"strategy": "pipeline"}),
]


def trained_case(number: int) -> tuple[Steps, list[float]]:
    kind, settings = CASES[number]
    return trained(kind, **settings)


def all_cases() -> list[tuple[Steps, list[float]]]:
    return list(map(trained_case, range(len(CASES))))


def test_every_topology_is_one_process() -> None:
    """With dropout, and BatchNorm in the towers, whose statistics count once."""
    alone = [
        trained(kind, reproducible=settings.get("reproducible", False)) for kind, settings in CASES
    ]
    for rank, results in enumerate(run_ranks(all_cases, 2)):
        for case, (steps, weights), (expected, expected_weights) in zip(
            CASES, results, alone, strict=True
        ):
            if "reproducible" in case[1]:
                assert steps == expected, case
            assert [list(s) for s in steps] == [
                pytest.approx(list(e), rel=1e-5) for e in expected
            ], case
            if rank == 0:
                assert weights == pytest.approx(expected_weights, rel=1e-4, abs=1e-6), case


def test_workers_that_train_alone_have_no_whole_batch() -> None:
    with pytest.raises(
        UsageError,
        match="a loss over the whole batch is not supported where workers train their own",
    ):
        list(
            Trainer(
                chain(0.0), loss_fn=WholeBatch(contrast), batch_size=4, strategy="diloco"
            ).steps(views())
        )


def test_what_is_not_supported_is_refused() -> None:
    trainer = Trainer(chain(0.0), loss_fn=WholeBatch(contrast), batch_size=4)
    with pytest.raises(
        UsageError, match="for a loss over the whole batch micro-batches can't be run one at a time"
    ):
        trainer.training_step(next(iter(DataLoader(views(), batch_size=4))))

    def broken(outputs: Tensor, targets: Any) -> Tensor:
        raise ValueError("shapes differ")

    with pytest.raises(
        RunError, match=r"the loss over the whole batch could not be computed(.|\n)*shapes differ"
    ):
        list(Trainer(chain(0.0), loss_fn=WholeBatch(broken), batch_size=4).steps(views()))
