"""What ranks hold is seen of every rank, whatever rank 0 lacks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import RunError
from lockstep.verify.algebra import Values
from lockstep.verify.comparison_result import Outcome
from lockstep.verify.script.causes.replicas import replicas_apart
from lockstep.verify.script.comparison import ScriptComparison
from lockstep.verify.script.flows import first_output_of_all
from lockstep.verify.script.observed.loaders import say_length
from lockstep.verify.script.observed.observed_models import ObservedModels
from lockstep.verify.script.observed.values import piece_of
from lockstep.verify.script.record import (
    AUTOCAST,
    FSDP_CASTS,
    RecordedStep,
    ScriptRecord,
    TensorPiece,
    casts_of,
)
from lockstep.verify.script.runs import Runs
from lockstep.verify.script.task import GivenValues, ScriptTask
from lockstep.verify.script.world import World


def test_a_gradient_that_rank_0_lacks_is_given_to_one_process(tmp_path: Path) -> None:
    pieces = {name: TensorPiece(torch.ones(2), (2,)) for name in ("used", "other")}
    runs = Runs(ScriptTask("train.py", (), 1, tmp_path), lambda *_: None, print)
    comparison = ScriptComparison(runs, Outcome("2 ranks", 2))
    comparison.world = World([ScriptRecord(first=pieces) for _ in range(2)])
    gradients = comparison.on_ranks([{"used": pieces["used"]}, pieces])
    assert {name: len(ranks) for name, ranks in gradients.items()} == {"used": 2, "other": 1}


def test_ranks_that_run_once_more_take_no_step_beyond_the_one_that_differs(tmp_path: Path) -> None:
    """A failing verdict traces each operation, which takes longer than all else."""
    taken: list[ScriptTask] = []

    def start(tasks: Sequence[ScriptTask], _ranks: int) -> None:
        taken.extend(tasks)
        raise RunError("no rank is needed")

    runs = Runs(ScriptTask("train.py", (), 3, tmp_path), start, lambda _line: None)
    comparison = ScriptComparison(runs, Outcome("2 ranks", 2))
    with pytest.raises(RunError):
        comparison.rerun("with each operation traced", 1, traced=True)
    assert [(task.steps, task.conditions.traced) for task in taken] == [(2, True)]


def test_a_loader_says_a_length_of_another_run_and_gives_the_batches_that_it_has() -> None:
    """A schedule asks for it: with a rank's number of batches one process has the rank's rate."""
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    say_length(loader, 3)
    assert len(loader) == 3
    assert len([*loader]) == 4
    assert len(DataLoader(TensorDataset(torch.arange(7)), batch_size=2)) == 4


def test_replicas_are_compared_where_no_process_can_be() -> None:
    """A loop that draws its own samples can't be given those of other ranks."""

    def record(gradients: Sequence[float], *, before: str = "begin") -> ScriptRecord:
        found = ScriptRecord(first={"a": TensorPiece(torch.zeros(2), (2,))})
        value = torch.zeros(2)
        for gradient in gradients:
            value = value - gradient
            step = RecordedStep(before={"a": before}, losses=[1.0])
            step.gradients = {"a": TensorPiece(torch.full((2,), gradient), (2,))}
            step.values = {"a": TensorPiece(value, (2,))}
            found.steps.append(step)
            before = str(value.tolist())
        return found

    def kinds(*ranks: ScriptRecord) -> list[str]:
        return [cause.kind for cause in replicas_apart(World(ranks), 2)]

    sound = record([1.0, 2.0])
    assert kinds(sound, record([1.0, 2.0])) == []
    assert kinds(sound, record([1.0, 3.0])) == ["gradient synchronisation"]
    assert kinds(sound, record([2.0, 2.0], before="other")) == []  # first values are the cause
    changed = record([1.0, 2.0])
    changed.steps[1].before = {"a": "changed"}
    assert kinds(sound, changed) == ["replicas"]


def test_outputs_that_all_ranks_have_alike_are_compared_with_one_process() -> None:
    """The first layer is cut, the second adds up what ranks have, and its bias for each of them."""
    right = [("wrapped", 9.0, 9.0), ("up", 2.0, 3.0), ("down", 4.0, 5.0), ("", 1.0, 1.0)]
    ranks = [[("up", 1.0, rank), ("down", 4.0, 5.0), ("", 1.0, 1.0)] for rank in (1.0, 2.0)]
    assert first_output_of_all(ranks, right) is None
    twice = [[flow[0], ("down", 4.5, 5.5), ("", 1.5, 1.5)] for flow in ranks]
    assert first_output_of_all(twice, right) == "down"
    of_stages = [[("down", 1.0, 1.0)], [("", 2.0, 2.0)]]
    assert first_output_of_all(of_stages, right) is None


def test_what_computes_in_16_bits() -> None:
    step = RecordedStep(dtypes={"torch.float32", f"{FSDP_CASTS} to torch.bfloat16"})
    assert casts_of([ScriptRecord([step])]) == [FSDP_CASTS]
    step.dtypes.add(f"{AUTOCAST} to torch.bfloat16")
    assert casts_of([ScriptRecord([step])]) == [AUTOCAST, FSDP_CASTS]
    assert casts_of([ScriptRecord([RecordedStep(dtypes={"torch.bfloat16"})])]) == []


def test_one_process_takes_the_names_of_ranks_by_the_order_in_its_optimizer(tmp_path: Path) -> None:
    """Lightning wraps a model on several ranks only: one process calls a part of it first."""
    order = ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def names(optimizers: list[torch.optim.Optimizer]) -> tuple[list[str], str | None]:
        task = ScriptTask("train.py", (), 1, tmp_path, GivenValues(order=order))
        record = ScriptRecord()
        models = ObservedModels(task, record, 0, 1, lambda: optimizers, lambda *_: None)
        models.begin_with(model)
        return [*record.first], models.module_name(model[0])

    assert names([optimizer]) == ([*order], "body.0")
    own = [name.removeprefix("body.") for name in order]
    assert names([optimizer, optimizer]) == (own, "0")  # nothing tells which of them steps first


def test_a_sparse_gradient_is_kept_with_its_zeros() -> None:
    words = nn.Embedding(4, 2, sparse=True)
    words(torch.tensor([1, 1, 3])).sum().backward()
    assert words.weight.grad is not None
    piece = piece_of(words.weight.grad)
    assert piece.local.tolist() == [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    assert piece.shape == (4, 2)


class _Parts(ScriptComparison):
    """Two ranks, whose part of the gradient depends on how many samples one process is given."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__(None, Outcome("2 ranks", 2))  # type: ignore[arg-type]
        self.counts = counts
        step = RecordedStep(losses=[1.0], flow=[("body", 2.0, 1.0)])
        record = ScriptRecord([step], batches={0: [["a"]]})
        self.records = [record, record]
        self.world = World(self.records)
        self.feed = {(0, 0): [(0, 0), (1, 0)]}

    def _alone_on_each(
        self, number: int, *, traced: bool = False, times: int = 1
    ) -> list[tuple[Values, ScriptRecord]]:
        scale = times / 2 if self.counts else 1.0
        output = RecordedStep(losses=[scale], flow=[("body", 2.0 * times, 1.0)])
        gradients = [np.array([1.0, 2.0]), np.array([3.0, 0.0])]
        return [(scale * gradient, ScriptRecord([output])) for gradient in gradients]


@pytest.mark.parametrize("counts", [False, True])
def test_parts_have_as_many_samples_as_all_where_the_script_counts_them(counts: bool) -> None:
    comparison = _Parts(counts=counts)
    comparison.repeat_parts(0, np.array([2.0, 1.0]))
    for (gradient, record), right in zip(
        comparison.alone_on_each(0), ([1.0, 2.0], [3.0, 0.0]), strict=True
    ):
        assert gradient.tolist() == right
        assert record.steps[0].losses == [1.0]
        assert record.steps[0].flow == [("body", 2.0, 1.0)]  # of its own samples
