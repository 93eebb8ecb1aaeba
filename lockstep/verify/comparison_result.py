"""Describes what `lockstep verify` has found.

There is an outcome for each topology of a config, or for each number of ranks of a script.

Tests: tests/verify/test_command.py, tests/verify/test_script.py
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.verify.algebra import Relation

UNKNOWN = "cause not known"
ROUNDING = "rounding"  # kind of a cause that is not an error

# Signs of a table.
EQUAL = "✓"
ALLOWED = "≈"
DIFFERENT = "✗"
NOT_JUDGED = "?"
NOT_RUN = "-"


@dataclass
class Cause:
    """Names a reason why ranks train otherwise than one process."""

    kind: str  # one word or two: data order, random numbers, loss normalisation …
    text: str  # what is known
    found_by: list[str] = field(default_factory=list)  # the experiments or comparisons that show it
    is_error: bool = True  # False: rounding, or what is other by nature
    is_judged: bool = True  # False if neither an error nor rounding could be shown
    fix: str = ""  # what to write
    column: str = "gradients"  # of a script's table
    module: str = ""  # the one in whose forward pass it begins, if it begins in one
    # of a script: its own line at which the cause shows, as `train.py:40`; empty if none is known
    line: str = ""
    parameters: list[str] = field(
        default_factory=list
    )  # those that it is about; empty: all, or none

    def place_at(self, line: str) -> None:
        """Note the script's own line at which the cause shows."""
        self.line = line


@dataclass
class Difference:
    """One difference in one step."""

    aspect: str  # what differs: a loss, a gradient …
    # of the parameter or buffer; for a loss, norm, samples or an option of the optimizer: a
    # description
    name: str
    relative: float  # norm of the difference over the norm of the reference
    excess: float = math.inf  # largest ratio to the bound; inf if every bit must be equal
    ranks: list[int] = field(default_factory=list)  # ranks with the difference
    missing: bool = False  # whether there is nothing to compare on one side
    # to the reference, on which of them; None if it was not looked for
    relation: Relation | None = None
    step: int = 0  # counted from 0

    def name_without_clipping(self) -> None:
        """Call gradients that differ once they are clipped gradients, as the table's columns do."""
        self.aspect = self.aspect.removeprefix("clipped ")


@dataclass
class PartDifference:
    """A module or a parameter that differs."""

    name: str  # in the model; "" is the model itself
    text: str  # what differs there
    relative: float  # size of the difference; inf where there is nothing to compare


@dataclass
class Outcome:
    """The steps of a topology, or of a script on some ranks, compared with one process."""

    # `ddp:2`, as it was written; `single`, the reference taken once more; `2 ranks` of a script
    name: str
    ranks: int = 1
    steps: int = 0  # number of steps that were compared
    signs: dict[str, str] = field(default_factory=dict)  # column of the table → sign
    # the first in the order of a step; in a script, once draws and first values agree
    first: Difference | None = None
    alike: int = 0  # number of further differences of its aspect in that step
    # a script's first operation that differs from one process; empty if it is not known
    operation: str = ""
    # of this difference; of a script's other ones, too
    causes: list[Cause] = field(default_factory=list)
    # of the step that differs, in the order of drawing
    parts: list[PartDifference] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)  # names of all
    rounding: float = 0.0  # the largest relative difference of a gradient that needs no cause
    same_bits: bool = False  # whether no step differs in any bit
    framework: str = ""  # the library whose loop a script runs
    notices: list[str] = field(default_factory=list)  # what the comparison takes for granted
    failed: str = ""  # the error, if it could not be run
    not_judged: str = ""  # why a script's gradients and weights can't be compared

    def fail(self, text: str) -> None:
        """Note the error with which it could not be run."""
        self.failed = text

    def leave_open(self, text: str) -> None:
        """Note why a script's gradients and weights can't be compared."""
        self.not_judged = text

    def take_steps(self, steps: int, framework: str) -> None:
        """Note how many steps are compared, and whose loop took them."""
        self.steps = steps
        self.framework = framework

    def compare(
        self, first: Difference | None, rounding: float, *, alike: int = 0, same_bits: bool = False
    ) -> None:
        """Note what the comparison found: the first difference, and how large rounding is."""
        self.first = first
        self.rounding = rounding
        self.alike = alike
        self.same_bits = same_bits

    def locate(self, operation: str) -> None:
        """Note the first operation of a script that differs."""
        self.operation = operation

    def describe(self, parameters: Iterable[str], parts: list[PartDifference]) -> None:
        """Note the names of all parameters, and which parts differ."""
        self.parameters = list(parameters)
        self.parts = parts

    @property
    def passed(self) -> bool:
        """Return whether the ranks train what one process trains.

        Rounding is allowed, and so are causes that are not errors.
        """
        wrong = any(cause.is_error or not cause.is_judged for cause in self.causes)
        return not self.failed and not self.not_judged and not wrong

    @property
    def result(self) -> str:
        """The verdict in a few words."""
        if self.failed:
            return f"{DIFFERENT} did not run"
        if not self.passed:
            errors = any(cause.is_error and cause.is_judged for cause in self.causes)
            return DIFFERENT if errors else f"{NOT_JUDGED} cannot judge"
        if self.same_bits:
            return f"{EQUAL} the same bits"
        # Samples that ranks read twice are allowed, and leave a step to compare.
        kinds = {cause.kind for cause in self.causes} - {"samples"}
        if kinds:
            return (
                f"{EQUAL} rounding"
                if kinds == {ROUNDING}
                else f"{EQUAL} but for what is other by nature"
            )
        return f"{EQUAL} {self.rounding:.0e}"
