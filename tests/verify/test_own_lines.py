"""Lines of the user's own code are found, and each cause gets the line at which it shows."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from lockstep.verify import own_lines
from lockstep.verify.comparison_result import UNKNOWN, Cause, Outcome
from lockstep.verify.own_lines import own_line
from lockstep.verify.script.causes.cause_lines import LineEvidence, name_lines
from lockstep.verify.script.causes.fixes import NORMALISATION
from lockstep.verify.script.causes.gradients import NOT_SYNCHRONISED, SUM
from lockstep.verify.script.causes.operations import OperationDifference
from lockstep.verify.script.observed.draws import LoopDraw
from lockstep.verify.script.observed.traced_operations import (
    BACKWARD,
    FORWARD,
    UPDATE,
    TracedOperation,
    TracedOperations,
    line_of_loss,
)
from lockstep.verify.script.record import CLIP, RecordedStep, ScriptRecord
from lockstep.verify.script.recorded_lines import (
    ScriptLines,
    seed_that_agrees,
    seed_that_differs,
)

HERE = "tests/verify/test_own_lines.py"


def line_with(text: str) -> str:
    """Return this file's only line that ends with a text, as verify names it."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [at for at, line in enumerate(lines, start=1) if line.endswith(text)]
    return f"{HERE}:{number}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = own_lines.line_outside_of_modules()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()


class Reversed(Sampler[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]  # orders samples
        return iter(range(3, -1, -1))


def test_own_lines() -> None:
    assert own_lines.code_at(own_line()).startswith("assert own_lines.code_at(own_line())")
    assert not own_lines.is_own(nn.__file__)
    assert not own_lines.is_own(own_lines.__file__)
    assert own_lines.is_own(__file__)
    # a library calls this: the line is that which calls the library
    found = [own_line() for _ in sorted([1], key=lambda _: 0)]
    assert found == [line_with("key=lambda _: 0)]")]


def test_a_module_is_made_outside_of_the_constructors_of_others() -> None:
    model = Model()  # here it is made
    assert model.block.line == line_with("# here it is made")


def test_the_scripts_own_sampler_orders_a_loader() -> None:
    data = TensorDataset(torch.ones(4))
    assert own_lines.order_of(DataLoader(data)) == ""
    loader = DataLoader(data, sampler=Reversed())
    assert own_lines.order_of(loader) == line_with("# orders samples")


def test_seeds_of_ranks() -> None:
    alike = [ScriptLines(seeds=[("a.py:1", "0"), ("a.py:9", "7")]) for _ in range(2)]
    assert seed_that_agrees(alike) == "a.py:9"
    assert seed_that_differs(alike) == ""
    apart = [ScriptLines(seeds=[("a.py:1", "0"), ("a.py:9", str(rank))]) for rank in range(2)]
    assert seed_that_agrees(apart) == ""
    assert seed_that_differs(apart) == "a.py:9"
    assert seed_that_agrees([ScriptLines(), ScriptLines()]) == ""


def test_the_line_that_computes_a_loss() -> None:
    found: list[TracedOperation] = []
    x = torch.ones(3)
    with TracedOperations(lambda: ("", FORWARD), found.append):
        loss = x.mean() / 2  # the loss
        loss.detach()
        x.sum()
    assert line_of_loss(found, loss) == line_with("# the loss")
    assert line_of_loss([], loss) == ""
    assert line_of_loss(found, Tensor()) == ""


def step(*calls: tuple[str, str], loss_line: str = "") -> RecordedStep:
    return RecordedStep(calls=list(calls), losses=[1.0], loss_line=loss_line)


def lines_of(
    kind: str,
    *calls: tuple[str, str],
    lines: ScriptLines | None = None,
    differs: OperationDifference | None = None,
    traced: str = "",
    parameters: tuple[str, ...] = (),
    column: str = "gradients",
) -> str:
    """Return the line that a cause of a kind gets."""
    known = ScriptLines() if lines is None else lines
    records = [ScriptRecord(steps=[step(*calls)], lines=known) for _ in range(2)]
    ranks = [ScriptRecord(steps=[step(loss_line=traced)])] if traced else []
    outcome = Outcome("2 ranks", 2)
    outcome.causes = [Cause(kind, "", column=column, parameters=list(parameters))]
    name_lines(outcome, LineEvidence(records, 0, differs, ranks))
    return outcome.causes[0].line


BACK = (BACKWARD, "t.py:20")
REDUCE = ("all_reduce", "t.py:30")
STEP = (UPDATE, "t.py:40")


def test_the_line_of_a_loss() -> None:
    assert lines_of(NORMALISATION, BACK, STEP) == "t.py:20"
    assert lines_of(NORMALISATION, BACK, STEP, traced="t.py:18") == "t.py:18"
    stages = ScriptLines(loss="t.py:3")
    assert lines_of(SUM, BACK, STEP, lines=stages) == "t.py:3"


def test_the_line_of_a_reduction() -> None:
    """It is the script's own collective, unless a backward pass adds to what it has reduced."""
    assert lines_of(SUM, BACK, REDUCE, STEP) == "t.py:30"
    assert lines_of(SUM, REDUCE, BACK, STEP) == "t.py:20"  # counts are summed before
    assert lines_of(NOT_SYNCHRONISED, BACK, REDUCE, STEP) == "t.py:30"
    assert lines_of(NOT_SYNCHRONISED, BACK, REDUCE, BACK, STEP) == "t.py:20"
    plain = ScriptLines(models={"": "t.py:15", "1:": "t.py:16"}, wrapped={""})
    parameters = ("1:head.weight",)
    assert lines_of(NOT_SYNCHRONISED, BACK, lines=plain, parameters=parameters) == "t.py:16"
    assert lines_of(NOT_SYNCHRONISED, BACK, lines=plain, parameters=("head.bias",)) == "t.py:20"
    later = OperationDifference("mul_", "t.py:25", is_update=True)
    assert lines_of(NOT_SYNCHRONISED, BACK, differs=later, lines=plain) == "t.py:25"


def test_lines_of_other_causes() -> None:
    found = OperationDifference("mul", "t.py:11")
    assert lines_of("computation of a rank", BACK, differs=found) == "t.py:11"
    assert lines_of(UNKNOWN, BACK) == ""  # none is better than a wrong one
    assert lines_of("clipping", BACK, (CLIP, "t.py:35")) == "t.py:35"
    assert lines_of("learning rate schedule", lines=ScriptLines(schedule="t.py:41")) == "t.py:41"
    # clipped by hand: where tensors are written last before the update
    changes = [
        TracedOperation(name, "", line, phase, 1.0, 1.0, 1, line)
        for name, line, phase in (
            ("mul_", "t.py:36", UPDATE),
            ("mul", "t.py:37", UPDATE),
            ("add_", "t.py:38", BACKWARD),
        )
    ]
    by_hand = [ScriptRecord(steps=[RecordedStep(operations=changes)])]
    outcome = Outcome("2 ranks", 2, causes=[Cause("clipping", "")])
    name_lines(outcome, LineEvidence([ScriptRecord(steps=[step(BACK)])], traced=by_hand))
    assert outcome.causes[0].line == "t.py:36"
    # what rank 1 alone does has its line there
    only_there = [ScriptRecord(steps=[step(BACK)]), ScriptRecord(steps=[step((CLIP, "t.py:36"))])]
    outcome = Outcome("2 ranks", 2, causes=[Cause("clipping", "")])
    name_lines(outcome, LineEvidence(only_there))
    assert outcome.causes[0].line == "t.py:36"
    made = ScriptLines(optimizers=["t.py:8"], made={"": "t.py:7"})
    assert lines_of("learning rate", STEP, lines=made, column="settings") == "t.py:8"
    assert lines_of("first values", lines=made, parameters=("head.weight",)) == "t.py:7"


def test_where_replicas_part() -> None:
    """Weights that are written beside the update have their line; else it is that of the update."""
    written = OperationDifference("t is given something else", "t.py:9")
    assert lines_of("replicas", BACK, STEP, differs=written, parameters=("0.bias",)) == "t.py:9"
    assert lines_of("replicas", BACK, STEP, differs=written) == "t.py:40"
    assert lines_of("replicas", BACK, STEP, parameters=("0.bias",)) == "t.py:40"


def test_an_order_of_each_rank_has_the_line_that_draws_it() -> None:
    """Ranks are seeded alike for their models, and draw their orders by seeds of their own."""
    records = [ScriptRecord(steps=[step(BACK)]) for _ in range(2)]
    for record, order in zip(records, ([0, 1], [1, 0]), strict=True):
        record.lines.seeds.append(("t.py:2", "0"))
        record.draws.append(LoopDraw((-1, 0), "t.py:5", "torch.randperm", 0, order, True))
    outcome = Outcome("2 ranks", 2, causes=[Cause("samples", "")])
    name_lines(outcome, LineEvidence(records))
    assert outcome.causes[0].line == "t.py:5"
    records[1].draws[:] = records[0].draws
    outcome = Outcome("2 ranks", 2, causes=[Cause("samples", "")])
    name_lines(outcome, LineEvidence(records))
    assert outcome.causes[0].line == "t.py:2"


def test_the_line_of_a_collective_through_which_no_gradient_comes_back() -> None:
    given = RecordedStep(calls=[BACK, STEP], losses=[1.0], cutting=["t.py:9"])
    outcome = Outcome("2 ranks", 2)
    outcome.causes = [Cause(SUM, "", column="gradients")]
    name_lines(outcome, LineEvidence([ScriptRecord(steps=[given]) for _ in range(2)]))
    assert outcome.causes[0].line == "t.py:9"
