"""A loss that does not add up over micro-batches is told in the first steps; one that does is left
alone.
"""

import random
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lockstep
from lockstep import Trainer
from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.models.observed import LossCalls
from lockstep.trainer.loss_check import LossCheck
from tests.ranks import run_ranks

SAMPLES = 8
LENGTH = 6
CLASSES = 5
WEIGHTS = torch.tensor([1.0, 5.0, 0.5, 2.0, 9.0])


class Samples(Dataset[dict[str, Tensor]]):
    """Texts, of which the later ones leave out more of their targets."""

    deterministic = True

    def __init__(self, ignored: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
        self.targets = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
        for row in range(SAMPLES):
            self.targets[row, LENGTH - row % LENGTH :] = ignored

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.ids[index], "targets": self.targets[index]}

    def whole(self) -> dict[str, Tensor]:
        return {"ids": self.ids, "targets": self.targets}


class Scores(nn.Module):
    """ids [B, T] → scores of classes [B, T, C]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.scores(ids)
        return scores


class NanoGPT(Scores):
    """Returns (logits, loss) in nanoGPT's way: targets of −1 are left out."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        logits = super().forward(ids)
        return {
            "logits": logits,
            "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1),
        }


class Weighted(Scores):
    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        logits = super().forward(ids).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), weight=WEIGHTS)


class ByHand(Scores):
    """A mean over targets that are not −100, written out."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        log_p = super().forward(ids).log_softmax(-1)
        valid = targets != -100
        picked = log_p.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        return {"loss": -(picked * valid).sum() / valid.sum()}


class Contrastive(Scores):
    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        made = super().forward(ids).mean(1)
        return F.cross_entropy(made @ made.T * 10, torch.arange(len(ids)))


class WithTerms(Scores):
    """Two means over different targets: no one count is right."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        logits = super().forward(ids)
        first = F.cross_entropy(logits.mean(1), ids[:, 0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + first


def class_weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), weight=WEIGHTS)


def weighted_by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    valid = (targets >= 0).float()
    each = F.cross_entropy(outputs.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
    return (each * valid.flatten()).sum() / valid.sum()


def train(
    model: nn.Module,
    loss_fn: Any = None,
    *,
    ignored: int = -100,
    batch_size: int = 2,
    **settings: Any,
) -> tuple[float, Tensor, list[str]]:
    """(loss of the first step, parameters after three, warnings)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = {"global_batch_size": SAMPLES, "max_steps": 3, **settings}
        trainer = Trainer(model, optimizer, loss_fn, batch_size=batch_size, **settings)
        losses = [float(record.loss) for record in trainer.steps(Samples(ignored), epochs=3)]
    texts = [str(w.message) for w in caught if "does not add up" in str(w.message)]
    return losses[0], nn.utils.parameters_to_vector(model.parameters()).detach(), texts


def plain(model: nn.Module, loss_fn: Any, ignored: int) -> float:
    batch = Samples(ignored).whole()
    with torch.no_grad():
        if loss_fn is not None:
            return float(loss_fn(model(batch["ids"]), batch["targets"]))
        found = model(**batch)
        return float(found["loss"] if isinstance(found, Mapping) else found)


def over_classes(loss_fn: Any) -> Any:
    """Return a loss of torch's for scores [B, T, C] and targets [B, T]; None for None."""
    return loss_fn and (lambda scores, targets: loss_fn(scores.flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize(
    ("make", "loss_fn", "ignored"),
    [
        (NanoGPT, None, -1),
        (Weighted, None, -100),
        (Scores, class_weighted, -100),
        (Scores, nn.CrossEntropyLoss(weight=WEIGHTS), -100),
        (Scores, partial(F.cross_entropy, weight=WEIGHTS), -100),
        (Scores, partial(F.cross_entropy, ignore_index=-1, label_smoothing=0.1), -1),
    ],
)
def test_what_torchs_loss_functions_divide_by_is_counted(
    make: Callable[[], nn.Module], loss_fn: Any, ignored: int
) -> None:
    expected = plain(
        make(), loss_fn if isinstance(loss_fn, FunctionType) else over_classes(loss_fn), ignored
    )
    first, after, texts = train(make(), loss_fn, ignored=ignored, batch_size=SAMPLES)
    assert first == pytest.approx(expected, abs=1e-6)
    for size in (1, 2, 4):
        loss, parameters, more = train(make(), loss_fn, ignored=ignored, batch_size=size)
        assert loss == pytest.approx(expected, abs=1e-5), size
        torch.testing.assert_close(parameters, after, rtol=1e-5, atol=1e-6)
        assert not texts + more


@pytest.mark.parametrize(
    ("make", "loss_fn", "says"),
    [
        (ByHand, None, '(batch["targets"] != -100).sum()'),
        (Scores, weighted_by_hand, '(batch["targets"] != -100).sum()'),
        (WithTerms, None, "what its loss is divided by"),
        (Contrastive, None, "depends on the others"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_does_not_add_up_is_told_with_the_line_to_write(
    make: Callable[[], nn.Module], loss_fn: Any, says: str, size: int
) -> None:
    _, _, texts = train(make(), loss_fn, batch_size=size)
    assert len(texts) == 1
    assert says in texts[0]


def test_the_line_that_is_named_makes_it_right() -> None:
    class Told(ByHand):
        def count(self, batch: Any) -> Tensor:
            return (batch["targets"] != -100).sum()

    loss, _, texts = train(Told())
    assert loss == pytest.approx(plain(ByHand(), None, -100), abs=1e-6)
    assert not texts


def test_a_step_of_one_micro_batch_is_right_as_it_is() -> None:
    assert not train(ByHand(), batch_size=SAMPLES)[2]


class Restless(Scores):
    """Draws, counts its calls, keeps running statistics, and uses Python's random numbers; its loss
    adds up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)
        self.drop = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        self.calls += 1
        scores = self.drop(self.norm(super().forward(ids).mean(1))) * (
            1 + self.calls / 8 + random.random() / 8
        )
        return F.cross_entropy(scores, targets[:, 0].clamp(min=0))


class Noisy(Scores):
    """Draws in evaluation mode, too, as a variational autoencoder may."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        scores = super().forward(ids).mean(1)
        return F.cross_entropy(scores + torch.randn_like(scores), targets[:, 0].clamp(min=0))


class Faint(Scores):
    """Draws little: a repetition may happen to come close."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        scores = super().forward(ids).mean(1)
        return F.cross_entropy(scores + 2e-3 * torch.randn_like(scores), targets[:, 0].clamp(min=0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, 8)
        self.lstm = nn.LSTM(8, CLASSES, batch_first=True)

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        outputs, _ = self.lstm(self.embedding(ids))
        return {"loss": F.cross_entropy(outputs.flatten(0, 1), targets.flatten())}


class InEvaluationNothing(Scores):
    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        scores = super().forward(ids)
        return (
            F.cross_entropy(scores.flatten(0, 1), targets.flatten())
            if self.training
            else {"scores": scores}
        )


class Learned(Scores):
    """Has learned its targets: the loss is the square of rounding, which depends on the size of the
    batch.
    """

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        scores = super().forward(ids)
        return F.mse_loss(scores * 0, torch.full_like(scores, 5e-8 * len(ids)))


@pytest.mark.parametrize("make", [Restless, Noisy, Recurrent, InEvaluationNothing, Learned])
def test_sound_models_are_left_alone_in_every_bit(make: Callable[[], nn.Module]) -> None:
    random.seed(0)
    _, compared, texts = train(make())
    with patch.object(LossCheck, "check"):
        random.seed(0)
        _, left_alone, _ = train(make())
    assert not texts
    assert torch.equal(compared, left_alone)


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_draws_little_is_left_alone(seed: int) -> None:
    assert not train(Faint(), seed=seed, max_steps=12)[2]


def on_ranks() -> dict[str, Any]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        for make in (ByHand, NanoGPT, Contrastive, Recurrent):
            model = make()
            ignored = -1 if make is NanoGPT else -100
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer = Trainer(
                    model, optimizer, batch_size=2, global_batch_size=SAMPLES, strategy=strategy
                )
                record = next(iter(trainer.steps(Samples(ignored), epochs=3)))
            texts = [str(w.message) for w in caught if "does not add up" in str(w.message)]
            found[f"{strategy} {make.__name__}"] = float(record.loss), texts
    return found


class TwoEnds(Scores):
    """Two terms, as of question answering: the second leaves out `fewer` targets that the first one
    counts.
    """

    def __init__(self, fewer: int) -> None:
        super().__init__()
        self.fewer = fewer

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        scores = super().forward(ids).flatten(0, 1)
        start = targets.flatten()
        end = targets.clone()
        if self.fewer:
            end[-self.fewer :] = -100
        return {
            "loss": (F.cross_entropy(scores, start) + F.cross_entropy(-scores, end.flatten())) / 2
        }


def test_terms_that_leave_out_different_targets_are_refused_where_a_step_is_cut() -> None:
    assert train(TwoEnds(0), batch_size=2)[0] == pytest.approx(
        plain(TwoEnds(0), None, -100), abs=1e-5
    )
    in_order = {"batch_size": SAMPLES, "shuffle": False}
    assert train(TwoEnds(1), **in_order)[0] == pytest.approx(
        plain(TwoEnds(1), None, -100), abs=1e-6
    )
    with pytest.raises(
        UsageError, match="2 terms that leave out different targets of a micro-batch"
    ):
        train(TwoEnds(1), batch_size=2)
    model = TwoEnds(1)
    placed = lockstep.place(model, strategy="single")
    micro_batches = [
        {name: value[rows] for name, value in Samples(-100).whole().items()}
        for rows in (slice(4), slice(4, 8))
    ]
    with pytest.raises(UsageError, match="2 terms that leave out different targets"):
        placed.backward(*micro_batches)


def test_on_several_ranks_one_of_them_tells() -> None:
    one, other = run_ranks(on_ranks, 2)
    for name, (loss, texts) in one.items():
        assert len(texts) == (name.endswith(("ByHand", "Contrastive"))), name
        assert other[name] == (loss, []), name
        if name.endswith("NanoGPT"):
            assert loss == pytest.approx(plain(NanoGPT(), None, -1), abs=1e-6)


class Head(nn.Linear):
    """The last segment of a model in a pipeline: the loss is computed in the way of `ByHand`, or as
    torch has it.
    """

    takes_inputs = True

    def __init__(self, *, by_hand: bool, only_in_training: bool) -> None:
        super().__init__(8, CLASSES)
        self.by_hand = by_hand
        self.only_in_training = only_in_training

    def forward(self, values: Tensor, *, inputs: Any) -> Any:
        scores = super().forward(values)
        targets = inputs[1]["targets"]
        if self.only_in_training and not self.training:
            raise ValueError("there are no targets where it is not trained")
        if not self.by_hand:
            return {"loss": F.cross_entropy(scores.flatten(0, 1), targets.flatten())}
        valid = targets != -100
        picked = scores.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        return {"loss": -(picked * valid).sum() / valid.sum()}


class First(nn.Embedding):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return super().forward(ids)


class Cut(nn.Module):
    """A chain of four segments, the last of which computes the loss."""

    def __init__(self, *, by_hand: bool = True, only_in_training: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = First(CLASSES, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.head = Head(by_hand=by_hand, only_in_training=only_in_training)

    def segments(self) -> list[tuple[str, nn.Module]]:
        return list(self.named_children())

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        values = self.third(self.second(self.first(ids, targets)))
        return self.head(values, inputs=((), {"targets": targets}))


FOUR_STAGES = {"distributed.pipeline.schedule": "1F1B"}
TWO_BY_TWO = {"distributed.pipeline_size": 2, "distributed.shard_size": 2}
BOTH_ENDS_ON_ONE_RANK = {
    "distributed.pipeline_size": 2,
    "distributed.replicate_size": 2,
    "distributed.pipeline.schedule": "ZBVZeroBubble",
    "distributed.pipeline.stages_per_rank": 2,
}
PIPELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "by hand, four stages": ({}, FOUR_STAGES),
    "by hand, beside shards": ({}, TWO_BY_TWO),
    "by hand, there and back": ({}, BOTH_ENDS_ON_ONE_RANK),
    "of torch, four stages": ({"by_hand": False}, FOUR_STAGES),
    "of torch, there and back": ({"by_hand": False}, BOTH_ENDS_ON_ONE_RANK),
    "fails in evaluation": ({"by_hand": False, "only_in_training": True}, FOUR_STAGES),
    "fails in evaluation, there and back": (
        {"by_hand": False, "only_in_training": True},
        BOTH_ENDS_ON_ONE_RANK,
    ),
}


def in_pipelines() -> dict[str, Any]:
    found = {}
    for name, (kind, settings) in PIPELINES.items():
        config = config_from(
            {
                "distributed.strategy": "pipeline",
                "training.batch_size": 1,
                "training.global_batch_size": SAMPLES,
                "training.max_steps": 3,
                **settings,
            }
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = Trainer(Cut(**kind), config=config)
            losses = [float(record.loss) for record in trainer.steps(Samples(-100), epochs=3)]
        assert len(losses) == 3
        found[name] = (
            losses[0],
            [str(w.message) for w in caught if "does not add up" in str(w.message)],
        )
    return found


@pytest.mark.full
def test_a_pipeline_compares_too() -> None:
    expected = plain(Cut(), None, -100)
    for rank, found in enumerate(run_ranks(in_pipelines, 4)):
        for name, (loss, texts) in found.items():
            assert len(texts) == (rank == 0 and name.startswith("by hand")), (rank, name)
            assert all('return (batch["targets"] != -100).sum()' in text for text in texts)
            if not name.startswith("by hand"):
                assert loss == pytest.approx(expected, abs=1e-5), name


WORKERS = {
    "distributed.strategy": "diloco",
    "distributed.diloco.workers": 2,
    "distributed.diloco.inner_steps": 2,
}


@pytest.mark.parametrize("settings", [{"distributed.strategy": "dp"}, WORKERS])
def test_dp_and_local_updates_compare_too(settings: dict[str, Any]) -> None:
    assert len(train(ByHand(), config=config_from(settings))[2]) == 1
    assert not train(NanoGPT(), ignored=-1, config=config_from(settings))[2]


def test_workers_that_take_one_micro_batch_each_compare_nothing() -> None:
    assert not train(ByHand(), config=config_from(WORKERS), batch_size=SAMPLES // 2)[2]


class LossInABlock(NanoGPT):
    """What a block that is compiled calls is not noted: the loss counts by what is called outside
    of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = Pull()

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [("block", self.block)]

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        found = super().forward(ids, targets)
        return {"loss": found["loss"] + self.block(found["logits"])}


class Pull(nn.Linear):
    def __init__(self) -> None:
        super().__init__(CLASSES, 1)

    def forward(self, logits: Tensor) -> Tensor:
        return F.mse_loss(super().forward(logits), torch.zeros(())) * 0.0


class ByHandInABlock(ByHand):
    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [("scores", self.scores)]


@pytest.mark.parametrize(
    ("make", "ignored", "warned"), [(ByHandInABlock, -100, 1), (LossInABlock, -1, 0)]
)
def test_compiled_blocks_are_compared_as_they_are_written(
    make: Callable[[], nn.Module], ignored: int, warned: int
) -> None:
    def graphs() -> tuple[int, list[str]]:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        # Not the backend "eager", which calls loss functions by their names: these are noted, and
        # those of the default backend, which calls operators, are not.
        with patch("torch.compile", partial(torch.compile, backend="aot_eager")):
            _, _, texts = train(make(), ignored=ignored, compile=True)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"], texts

    found = []
    judge = LossCheck._conclude

    def kept(check: LossCheck, findings: Any) -> None:
        found.extend(finding.adds_up for finding in findings)
        judge(check, findings)

    with patch.object(LossCheck, "_conclude", kept):
        compiled, texts = graphs()
    assert len(texts) == warned
    assert found == ([False] if warned else [True] * 3)
    with patch.object(LossCheck, "check"):
        assert graphs()[0] == compiled > 0  # none is made for the halves


def test_calls_within_calls_are_noted_by_the_innermost() -> None:
    plain_function = F.mse_loss
    one = torch.ones(2)
    other = torch.zeros(2)
    with LossCalls() as outer:
        with LossCalls() as inner:
            assert float(F.mse_loss(one, other)) == 1.0
        F.l1_loss(one, other)
        F.l1_loss(one, other, reduction="sum")
    assert (len(inner.means), inner.others) == (1, 0)
    assert (len(outer.means), outer.others) == (1, 1)
    assert F.mse_loss is plain_function


class KeepsItsLoss(Scores):
    """Attributes that are named like the methods of the protocol, and are none of them."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss
        self.inputs = nn.Identity()
        self.count = 0

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        return self.loss(super().forward(self.inputs(ids)).flatten(0, 1), targets.flatten())


def test_a_loss_that_the_model_keeps_is_no_method_of_it() -> None:
    first, _, texts = train(KeepsItsLoss(nn.CrossEntropyLoss()))
    assert first == pytest.approx(plain(KeepsItsLoss(nn.CrossEntropyLoss()), None, -100), abs=1e-5)
    assert not texts


def test_a_function_that_is_kept_from_before_is_not_observed_and_so_compared() -> None:
    [text] = train(KeepsItsLoss(F.cross_entropy))[2]
    assert 'return (batch["targets"] != -100).sum()' in text


def test_a_method_that_returns_a_sum_needs_a_count() -> None:
    class Summed(Scores):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return F.cross_entropy(
                outputs.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
            )

    with pytest.raises(UsageError, match=r"no count\(\) to divide it by"):
        train(Summed())


def _divided(kind: str) -> tuple[nn.Module, Tensor]:
    """Return one of torch's losses, each with a divisor of its own, and targets for 22 samples."""
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(0, 3, (22,), generator=generator)
    numbers = torch.rand(22, 3, generator=generator)
    weight = torch.tensor([0.2, 1.0, 5.0])
    ignored = classes.clone()
    ignored[[0, 1, 2, 9]] = -100
    losses: dict[str, tuple[nn.Module, Tensor]] = {
        "weights and ignored": (nn.CrossEntropyLoss(weight=weight), ignored),
        "smoothing": (nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1), ignored),
        "probabilities": (nn.CrossEntropyLoss(), numbers.softmax(1)),
        "positive weights": (nn.BCEWithLogitsLoss(pos_weight=weight), numbers.round()),
        "mean over samples": (nn.KLDivLoss(reduction="batchmean"), numbers.softmax(1)),
        "margins": (nn.MultiMarginLoss(weight=weight), classes),
    }
    return losses[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "weights and ignored",
        "smoothing",
        "probabilities",
        "positive weights",
        "mean over samples",
        "margins",
    ],
)
def test_a_loss_of_torch_is_divided_as_torch_divides_it(kind: str) -> None:
    """Steps of two micro-batches, the last of unequal ones, are those of a plain loop."""
    loss_fn, targets = _divided(kind)
    x = torch.randn(22, 6, generator=torch.Generator().manual_seed(0))

    def made() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(6, 3)

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    expected = []
    for begin in (0, 8, 16):
        loss = loss_fn(model(x[begin : begin + 8]), targets[begin : begin + 8])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    settings: Any = {"batch_size": 4, "global_batch_size": 8, "shuffle": False}
    make = lambda parameters: torch.optim.SGD(parameters, 0.05)  # noqa: E731
    trainer = Trainer(made(), make, loss_fn, **settings)
    steps = trainer.steps(torch.utils.data.TensorDataset(x, targets), epochs=1)
    assert [float(step.loss) for step in steps] == pytest.approx(expected, rel=2e-6)
