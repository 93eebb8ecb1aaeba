"""The first operation that differs from one process is found, with its line."""

import torch
from torch import Tensor, nn

from lockstep.torch_compat.script_patches import patch_products
from lockstep.verify.own_lines import code_at
from lockstep.verify.script.causes.operations import (
    OperationDifference,
    difference_keys,
    earliest,
    first_cut,
    first_operation,
    first_operation_of_part,
    line_that_couples,
    line_that_passes_on,
)
from lockstep.verify.script.observed.passed_on import PassedOn
from lockstep.verify.script.observed.traced_operations import (
    BEFORE,
    FORWARD,
    TracedOperation,
    TracedOperations,
    line_of_loss,
)

LAYER = nn.Linear(4, 4)


def told(found: OperationDifference | None) -> str:
    return "" if found is None else found.text


def traced(scale: float | None, inputs: Tensor) -> list[TracedOperation]:
    found: list[TracedOperation] = []
    with TracedOperations(lambda: ("head", FORWARD), found.append):
        x = LAYER(inputs)
        if scale is not None:
            x = x * scale
        x.sum()
    return found


def test_the_first_operation_that_differs() -> None:
    inputs = torch.ones(2, 4)
    plain = traced(None, inputs)
    scaled = traced(2.0, inputs)
    assert [operation.name for operation in scaled][-2:] == ["mul", "sum"]
    assert first_operation(plain, plain) is None
    found = told(first_operation(scaled, plain))
    assert "test_operations.py:" in found
    assert " in head: mul where one process calls sum" in found
    assert "mul returns something else" in told(first_operation(scaled, traced(3.0, inputs)))
    # the first operation is given other inputs, and is not what makes the difference
    assert "is given something else" in told(first_operation(scaled, traced(2.0, 2 * inputs)))
    assert "sum is left out" in told(first_operation(plain[:-1], plain))
    assert "mul is left out, which one process calls" in told(first_operation(plain, scaled))
    assert "sum, which one process does not call" in told(first_operation(plain, plain[:-1]))


def test_what_gradients_do_not_go_through_on_one_side() -> None:
    inputs = torch.ones(2, 4)

    def inner_step(*, keeps: bool) -> list[TracedOperation]:
        found: list[TracedOperation] = []
        with TracedOperations(lambda: ("", FORWARD), found.append):
            loss = LAYER(inputs).square().sum()
            (gradient,) = torch.autograd.grad(loss, LAYER.weight, create_graph=keeps)
            (LAYER.weight - 0.1 * gradient).sum()
        return found

    cut = first_cut(inner_step(keeps=False), inner_step(keeps=True))
    assert cut is not None
    assert "no gradient goes through what" in cut.text
    assert "autograd.grad" in code_at(cut.line) or "0.1 * gradient" in code_at(cut.line)
    assert first_cut(inner_step(keeps=True), inner_step(keeps=True)) is None


def test_before_training_what_is_made_of_the_same_counts_alone() -> None:
    def prepared(shift: int, factor: float) -> list[TracedOperation]:
        found: list[TracedOperation] = []
        with TracedOperations(lambda: ("", BEFORE), found.append):
            labels = torch.arange(6).roll(shift)
            torch.full((2,), factor).mul_(2.0)
            if shift:
                labels.clone()
        return found

    same = prepared(0, 1.0)
    assert first_operation(same, same) is None
    # Rank 0 prints, and ranks have numbers of their own.
    assert first_operation(prepared(0, 3.0), same) is None
    difference = first_operation(prepared(1, 3.0), same)
    assert difference is not None
    assert "roll returns something else" in difference.text
    assert not difference.is_of_data


def test_an_operator_that_is_observed_has_the_line_that_calls_it() -> None:
    """Products of a script are looked at, too, whether they broadcast."""
    undo = patch_products(lambda _mine, _other: None)
    try:
        scaled = traced(2.0, torch.ones(2, 4))
    finally:
        undo()
    assert [operation.name for operation in scaled][-2:] == ["mul", "sum"]
    assert code_at(scaled[-2].line) == "x = x * scale"


def test_memory_that_holds_no_values_yet_is_left_out() -> None:
    found: list[TracedOperation] = []
    with TracedOperations(lambda: ("", FORWARD), found.append):
        torch.empty_like(torch.ones(3)).fill_(2.0)
    assert [operation.name for operation in found] == ["ones", "fill_"]


def test_rounding_and_modules_of_one_side_are_left_out() -> None:
    def made(bits: int, returned: float, module: str = "head") -> TracedOperation:
        return TracedOperation("mul", module, "train.py:1", FORWARD, 1.0, returned, bits)

    assert first_operation([made(1, 1.0)], [made(2, 1.0 + 1e-7)]) is None
    assert first_operation([made(1, 1.0, "wrapper"), made(1, 1.0)], [made(1, 1.0)]) is None


def test_what_a_rank_with_the_right_gradient_does_otherwise_too_is_passed_over() -> None:
    """Both ranks clone what one process divides, as wrappers do; rank 1 adds a penalty to it."""

    def made(names: str, lines: str) -> list[TracedOperation]:
        pairs = zip(names.split(), lines.split(), strict=True)
        return [TracedOperation(name, "", f"{line}", FORWARD, 1.0, 1.0, 1) for name, line in pairs]

    one = made(
        "mm div add mul mean neg exp sub",
        "a.py:1 lib.py:7 a.py:2 a.py:3 a.py:4 a.py:5 a.py:6 a.py:7",
    )
    right = made(
        "mm clone add mul mean neg exp sub",
        "a.py:1 lib.py:9 a.py:2 a.py:3 a.py:4 a.py:5 a.py:6 a.py:7",
    )
    wrong = [*right[:3], *made("square sum", "a.py:8 a.py:8"), *right[3:]]
    assert "lib.py:9" in told(first_operation(wrong, one))
    excused = difference_keys(right, one)
    assert (
        told(first_operation(wrong, one, excused=excused))
        == "a.py:8: square where one process calls mul"
    )
    assert first_operation(right, one, excused=excused) is None


def noted(names: str, module: str = "", values: float = 1.0) -> list[TracedOperation]:
    """Return operations of a module, each with a line of its own."""
    return [
        TracedOperation(name, module, f"{name}.py:1", FORWARD, values, values, int(values))
        for name in names.split()
    ]


def test_the_rank_that_parts_first_is_named() -> None:
    """Rank 0 is given what rank 1 has made, and parts two operations later."""
    one = noted("mm add mean exp sub")
    found = {
        0: first_operation([*one[:3], *noted("exp", values=2.0), *one[4:]], one),
        1: first_operation([*one[:1], *noted("add", values=2.0), *one[2:]], one),
    }
    first = earliest(found)
    assert first is not None
    assert first[0] == 1
    assert "add.py:1" in told(first[1])
    assert earliest({0: None}) is None


def test_a_tensor_that_differs_is_named_with_the_line_that_made_it() -> None:
    """Rank 1's frozen weights are scaled before the first step, where nothing is compared yet."""

    def run(times: float) -> list[TracedOperation]:
        found: list[TracedOperation] = []
        place: list[tuple[str, str] | None] = [None]
        with TracedOperations(lambda: place[0], found.append):
            weight = torch.ones(4, 4)
            weight.mul_(times)  # the line
            place[0] = ("", FORWARD)
            torch.ones(2, 4) @ weight
        return found

    right = run(1.0)
    assert [operation.name for operation in right] == ["ones", "mm"]
    found = first_operation(run(0.5), right)
    assert found is not None
    assert "mm is given something else, made at" in found.text
    assert "# the line" in code_at(found.line)


def test_stages_are_compared_module_by_module() -> None:
    """A stage takes its passes in another order, and lacks what the others compute."""
    one = noted("mm tanh", "0") + noted("mm tanh", "1") + noted("mse_loss")
    rank = noted("mm tanh", "0")
    assert first_operation_of_part(rank, one) is None
    found = first_operation_of_part([*noted("roll"), *noted("mm tanh", "0", values=2.0)], one)
    assert "roll.py:1" in told(found)
    assert "tanh" not in told(found)


def test_the_line_at_which_samples_meet() -> None:
    """The rows of two parts of a batch are put together; products of all rows with all are not."""

    def run(rows: int, *, begin: int = 0) -> list[TracedOperation]:
        found: list[TracedOperation] = []
        images = torch.arange(begin, begin + rows).float()[:, None] + 1
        with TracedOperations(lambda: ("", FORWARD), found.append):
            scaled = images * 2
            torch.arange(rows)
            (scaled > 4).nonzero()  # positions, which are other in a larger batch
            logits = scaled @ images.T  # they meet
            logits.mean()
        return found

    together = run(4)
    parts = [run(2), run(2, begin=2)]
    assert "# they meet" in code_at(line_that_couples(together, parts))
    assert line_that_couples(together[:1], [part[:1] for part in parts]) == ""


def gathered(features: Tensor) -> Tensor:
    return features  # nothing is gathered


def scaled(features: Tensor) -> Tensor:
    return features * 2


def test_a_function_that_hands_on_what_it_is_given() -> None:
    """It runs no operation; a product of what it returned, or of a view of that, is there."""
    found: list[TracedOperation] = []
    passed_on = PassedOn()
    passed_on.start()
    try:
        with TracedOperations(lambda: ("", FORWARD), found.append, passed_on.line_of):
            image = torch.ones(2, 3)
            text = torch.ones(2, 3)
            logits = scaled(image) @ gathered(text).T
            logits.sum()
    finally:
        passed_on.stop()
    product, loss = (next(each for each in found if each.name == name) for name in ("mm", "sum"))
    assert "# nothing is gathered" in code_at(line_that_passes_on(found, product.own))
    assert line_that_passes_on(found, loss.own) == ""


def test_what_is_written_on_one_side_alone_is_named_where_it_is_written() -> None:
    """One process updates a teacher between two forward passes, and a rank does not."""

    def passes(*, updates: bool) -> list[TracedOperation]:
        found: list[TracedOperation] = []
        phase = [None, ("teacher", FORWARD)]
        weight = torch.ones(3, 4)
        with torch.no_grad(), TracedOperations(lambda: phase[0], found.append):
            for _ in range(2):
                torch.ones(2, 4) @ weight.t()  # a view was not made here
                if updates:
                    weight.mul_(0.5)  # written
                phase.reverse()
        return found

    with_update = passes(updates=True)
    difference = first_operation(passes(updates=False), with_update)
    assert difference is not None
    assert code_at(difference.line) == "weight.mul_(0.5)  # written"
    difference = first_operation(with_update, passes(updates=False))
    assert difference is not None
    assert code_at(difference.line) == "weight.mul_(0.5)  # written"


def test_a_loss_that_comes_with_its_count_is_noted() -> None:
    found: list[TracedOperation] = []
    logits = torch.randn(4, 3)
    with TracedOperations(lambda: ("", FORWARD), found.append):
        loss = nn.functional.cross_entropy(logits, torch.tensor([0, 1, -100, 2]))
    assert found[-1].name == "nll_loss_forward"
    assert line_of_loss(found, loss) == found[-1].own
