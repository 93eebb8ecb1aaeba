"""Running statistics are those of one process that sees the micro-batches in order, whatever the
number of ranks.
"""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.config import config_from
from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError
from lockstep.parallel.execution.passes import MicroBatchPass
from lockstep.parallel.forward_effects.buffers import RunningBuffers, refuse_synchronised
from lockstep.parallel.initial import broadcast_values
from lockstep.trainer import Trainer
from tests.ranks import run_ranks
from tests.sampled import sampled

# 5 full steps of 4 micro-batches and a short one of 2
SAMPLES = 88
FEATURES = 5


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        scale = 1.0 + index % 7  # micro-batches differ much, so that their order shows
        return torch.randn(FEATURES, generator=generator) * scale + index / 10, torch.tensor(
            index % 3
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)))


class Normalised(nn.Module):
    """A norm in a repeated block, one that runs twice in a pass, one with a cumulative average, and
    a frozen one.

    With `recomputes` it recomputes its blocks by itself.
    """

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.twice = nn.BatchNorm1d(FEATURES)
        self.cumulative = nn.BatchNorm1d(FEATURES, momentum=None)
        self.frozen = nn.BatchNorm1d(FEATURES)
        self.head = nn.Linear(FEATURES, 3)

    def train(self, mode: bool = True) -> "Normalised":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(self.frozen(self.cumulative(self.twice(2 * self.twice(x)))))


class Counting(nn.Module):
    """A buffer of its own that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("constant", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.sum().detach()
        return self.linear(x) * self.constant


def train(model: nn.Module, settings: dict[str, Any], *, whole: bool = False) -> dict[str, Tensor]:
    common = {
        "training.batch_size": 4,
        "training.global_batch_size": 16,
        # Adam would blow up what rounding leaves of a gradient of zero
        "training.optimizer": "sgd",
        "training.num_train_epochs": 1,
        "training.learning_rate": 1e-2,
        "training.weight_decay": 0.1,
        "training.gradient_clip": 1.0,
        "precision.mode": "fp32",
    }
    trainer = Trainer(
        model.train(), loss_fn=nn.CrossEntropyLoss(), config=config_from({**common, **settings})
    )
    for _ in trainer.steps(Points()):
        pass
    return (
        trainer.state_dict()
        if whole
        else {name: buffer.clone() for name, buffer in model.named_buffers()}
    )


def normalised(settings: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    own = {key: value for key, value in settings.items() if key != "recomputes"}
    return train(Normalised(settings.get("recomputes", False)), own)


def normalised_in_all(cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [normalised(case) for case in cases]


def plain_process(recomputes: bool = False) -> dict[str, Tensor]:
    """The same training in plain PyTorch, micro-batches one after the other."""
    from lockstep.data import SampleOrder

    torch.manual_seed(0)
    model = Normalised(recomputes).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)
    order = SampleOrder(SAMPLES, 4, 16, seed=1337)
    for step in range(order.steps_per_epoch):
        window = order.samples_of(step)
        total = sum(len(indices) for indices in window.micro_batches)
        for indices in window.micro_batches:
            items = [Points()[i] for i in indices]
            x = torch.stack([a for a, _ in items])
            y = torch.stack([b for _, b in items])
            (nn.functional.cross_entropy(model(x), y, reduction="sum") / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)])
def test_running_statistics_do_not_depend_on_ranks_and_count_each_micro_batch_once(
    whole: bool,
) -> None:
    """1 rank × 4 micro-batches, 2 × 2 under ddp and 4 × 1 (with dummies in the short step) under
    fsdp; recomputation too.

    Left to themselves, 1×4 and 4×1 give other variances, and activation checkpointing counts each
    micro-batch twice. So does PyTorch where a model recomputes by itself, and its statistics are
    then those of PyTorch.
    """
    plain = plain_process()
    alone = normalised({})
    assert alone["layers.0.norm.num_batches_tracked"] == 22  # 5 steps of 4 micro-batches, and 2
    assert alone["twice.num_batches_tracked"] == 44
    assert_same(alone, plain)
    recomputed = {"training.gradient_checkpointing": "full"}
    assert_same(normalised(recomputed), plain)
    cases = [
        more | {"distributed.strategy": strategy}
        for more in ({}, recomputed)
        for strategy in ("ddp", "fsdp")
    ]
    twice = plain_process(recomputes=True)
    assert twice["layers.0.norm.num_batches_tracked"] == 44
    assert_same(normalised({"recomputes": True}), twice)
    cases += [
        {"distributed.strategy": strategy, "recomputes": True} for strategy in ("ddp", "fsdp")
    ]
    # by turns: each case is on two ranks or on four, in two micro-batches or in one
    on_two = cases[::2] if whole else cases[::4]
    on_four = cases[1::2] if whole else cases[3:4]
    for ranks, some in ((2, on_two), (4, on_four)):
        for buffers_of_cases in run_ranks(normalised_in_all, ranks, some):
            for case, buffers in zip(some, buffers_of_cases, strict=True):
                assert_same(buffers, twice if "recomputes" in case else plain)


class Recomputing(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def piped(topology: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    stages = [
        Recomputing(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES, momentum=m))
        for m in (0.3, None)
    ]
    model = nn.Sequential(*stages, *stages[:0], nn.Linear(FEATURES, 3))
    return train(model, {"distributed.strategy": topology, **settings}, whole=True)


def piped_in_all(cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [piped("pipeline", case) for case in cases]


def test_stages_record_what_their_modules_recompute_as_one_process_does() -> None:
    plain = piped("single", {})
    zero_bubble = {
        "distributed.pipeline.schedule": "InterleavedZeroBubble",
        "distributed.pipeline.stages_per_rank": 1,
    }
    assert plain["0.1.num_batches_tracked"] == 44
    for ours in run_ranks(piped_in_all, 2, [{}, zero_bubble])[0]:
        for name, value in plain.items():
            torch.testing.assert_close(
                ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, at=name: f"{at}: {m}"
            )


class Pictured(Normalised):
    """Also channels of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, (1, 3), padding=(0, 1))
        self.channels = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.channels(self.convolution(x[:, None, None])).sum((1, 2)))


def in_rows(settings: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return train(Pictured(), settings, whole=True)


def in_rows_in_all(cases: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [in_rows(case) for case in cases]


_HYBRID = {"distributed.shard_size": 2, "distributed.replicate_size": 2}
IN_ROWS: list[dict[str, Any]] = [
    {"distributed.strategy": "ddp", "training.batch_norm_samples": 8},
    {"distributed.strategy": "ddp", "training.batch_norm_samples": 16},
    {
        "distributed.strategy": "fsdp",
        "training.batch_norm_samples": 16,
        "training.gradient_checkpointing": "full",
    },
    {"distributed.strategy": "fsdp", "training.batch_norm_samples": 8, **_HYBRID},
]


@sampled("cases", IN_ROWS, 2)
def test_statistics_over_rows_of_ranks_are_those_of_one_process_with_that_micro_batch(
    cases: list[dict[str, Any]],
) -> None:
    """Rows of 2 and of 4 of four ranks; the short step leaves dummies in a row. Weights and running
    statistics.
    """
    alone = {samples: in_rows({"training.batch_size": samples}) for samples in (4, 8, 16)}
    assert max((alone[16][name] - alone[4][name]).abs().max() for name in alone[4]) > 1e-2, (
        "it matters"
    )
    first, *_ = run_ranks(in_rows_in_all, 4, cases)
    for case, ours in zip(cases, first, strict=True):
        plain = alone[case["training.batch_norm_samples"]]
        assert ours.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(
                ours[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, at=(case, name): f"{at}: {m}"
            )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            (
                "takes 2 ranks that run micro-batches of 4 at the same time, which strategy single"
                " does not offer"
            ),
        ),
        ({"distributed.strategy": "pipeline"}, "which strategy pipeline does not offer"),
        (
            {"distributed.strategy": "ddp"},
            "takes rows of 2 ranks, and there are 1.*write batch_size: 8, or",
        ),
        (
            {"training.batch_norm_samples": 6},
            "micro-batches of 4 don't make the 6 samples.*divides 6: 2, 3, 6",
        ),
        (
            {"distributed.strategy": "ddp", "distributed.reproducible": True},
            "is not offered with reproducible",
        ),
    ],
)
def test_rows_that_can_not_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        train(
            Pictured(),
            {"training.batch_norm_samples": 8, "training.global_batch_size": None, **settings},
        )
    assert re.search(message, str(error.value), re.DOTALL), str(error.value)


def assert_same(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    torch.testing.assert_close(ours["frozen.running_var"], torch.ones(FEATURES))


def counting_ranks() -> tuple[dict[str, Tensor], tuple[bool, int, bool]]:
    torch.manual_seed(0)
    buffers = train(Counting(), {"distributed.strategy": "ddp", "distributed.reproducible": False})
    norm = nn.BatchNorm1d(FEATURES)
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.fill_(dist.get_rank())
    return buffers, (broadcast_values(norm), int(norm.num_batches_tracked), broadcast_values(norm))


@pytest.fixture(scope="module")
def counting() -> list[Any]:
    return run_ranks(counting_ranks, 2)


def test_a_buffer_of_whole_numbers_that_differs_between_ranks_is_rank_0s_on_all(
    counting: list[Any],
) -> None:
    assert [agreed for _, agreed in counting] == [(False, 0, True)] * 2


def test_another_buffer_that_changes_is_named_and_equal_on_all_ranks(
    counting: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """There is no law by which to replay it: the replicas at least stay replicas, and
    it is said.
    """
    (first, _), (second, _) = counting
    assert first == second
    torch.manual_seed(0)
    train(Counting(), {})
    assert "changes the buffer seen" in caplog.text
    assert "constant" not in caplog.text
    recorder = RunningBuffers(model := Counting(), reproducible=True)
    passing = MicroBatchPass(MicroBatch(0, None), micro_batches_per_step=1, factor=1.0, last=True)
    recorder.before(passing)
    model(torch.ones(2, FEATURES))
    recorder.after_forward(passing)
    with pytest.raises(UsageError, match="changes the buffer seen"):
        recorder.after_step(1)


def test_statistics_over_all_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="SyncBatchNorm"):
        refuse_synchronised(nn.SyncBatchNorm.convert_sync_batchnorm(Normalised()))
