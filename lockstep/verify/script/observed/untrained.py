"""Networks that a script calls and no optimizer trains, as targets and teachers: are they alike?

Ranks take the trained values over into them by themselves, so that a rank may keep older ones. What
a step calls is known by its print, and ranks are compared where one process can't tell.

Tests: tests/verify/test_untrained.py, tests/verify/test_script.py
"""

from collections.abc import Callable

from torch import nn

from lockstep.tensors import local
from lockstep.verify.own_lines import own_line
from lockstep.verify.script.observed.values import fingerprint


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
