"""Networks that a script calls and no optimizer trains, as targets and teachers: are they alike?

Ranks take the trained values over into them by themselves, so that a rank may keep older ones. What
a step calls is known by its print, and ranks are compared where one process can't tell.

Tests: tests/verify/test_untrained.py, tests/verify/test_script.py
"""

from collections.abc import Callable

from torch import nn

from lockstep.errors import listed
from lockstep.tensors import local
from lockstep.verify.comparison_result import Cause
from lockstep.verify.own_lines import own_line
from lockstep.verify.script.causes.gradients import COMPUTATION
from lockstep.verify.script.observed.values import fingerprint
from lockstep.verify.script.world import World


class UntrainedNetworks:
    """The untrained networks that one process calls in a step.

    `trained`: returns the ids of the parameters that optimizers have.
    """

    def __init__(self, trained: Callable[[], set[int]]) -> None:
        self._trained = trained
        self._networks: list[nn.Module] = []
        self._lines: dict[int, str] = {}  # id of a network → where values were loaded into it last
        self._prints: dict[str, str] = {}  # of this step

    def called(self, module: nn.Module) -> None:
        """Note a module that the loop calls, if it has parameters and none of them is trained."""
        parameters = {id(parameter) for parameter in module.parameters()}
        if not parameters or not parameters.isdisjoint(self._trained()):
            return
        if not any(module is network for network in self._networks):
            self._networks.append(module)
        name = self._name_of(module)
        if name not in self._prints:
            state = [local(tensor) for tensor in (*module.parameters(), *module.buffers())]
            self._prints[name] = fingerprint(state)

    def loaded(self, module: nn.Module) -> None:
        """Note where values are loaded into a module."""
        self._lines[id(module)] = own_line()

    def take(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the prints of a step that ends, by name, and where values were loaded last."""
        prints = self._prints
        self._prints = {}
        lines = {
            self._name_of(network): line
            for network in self._networks
            if (line := self._lines.get(id(network)))
        }
        return prints, lines

    def _name_of(self, module: nn.Module) -> str:
        """Return a name for a network: its class, and its number if it is not the first."""
        number = next(at for at, network in enumerate(self._networks) if network is module)
        return f"{type(module).__name__}{f' {number + 1}' if number else ''}"


def networks_apart(world: World, steps: int) -> list[Cause]:
    """Return the cause if ranks call another network than rank 0, where they called the same.

    Each step has to call it on all ranks, whose trained weights are the same.
    """
    records = world.records
    if len(world.units) != len(records) or not steps:
        return []
    called = [set(step.untrained) for record in records for step in record.steps[:steps]]
    equal: set[str] = set()
    for number in range(steps):
        of_step = [record.steps[number] for record in records]
        if any(step.before != of_step[0].before for step in of_step[1:]):
            return []
        for name in sorted(set.intersection(*called)):
            right = of_step[0].untrained[name]
            other = [rank for rank, step in enumerate(of_step) if step.untrained[name] != right]
            if not other:
                equal.add(name)
            elif name in equal:
                return [_apart(name, number, other, [step.loaded_at for step in of_step])]
    return []


def _apart(name: str, number: int, ranks: list[int], lines: list[dict[str, str]]) -> Cause:
    """Return the cause of a network that differs on some ranks in a step, and did not before."""
    plural = "s" * (len(ranks) > 1)
    verb = "call" if plural else "calls"
    numbers = listed([str(rank) for rank in ranks])
    text = (
        f"in step {number + 1}, rank{plural} {numbers} {verb} another"
        f" {name}, which no optimizer trains, than rank 0: it was the same in a step before, and"
        " the trained weights are the same"
    )
    by = "prints of the networks that each step calls and no optimizer trains"
    fix = "let all ranks take values over into it in the same steps"
    cause = Cause(COMPUTATION, text, [by], fix=fix, column="weights")
    cause.place_at(next((each[name] for each in lines if name in each), ""))
    return cause
