"""`lockstep/torch_compat/dispatch_mode.py`: a mode sees operations of a forward and of a backward
pass.
"""

from typing import Any

import torch

from lockstep.torch_compat.dispatch_mode import UntracedDispatchMode


def test_operations_of_both_passes_are_seen() -> None:
    seen = []

    class Calls(UntracedDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append((func.namespace, func.overloadpacket.__name__, func.is_view))
            return func(*args, **(kwargs or {}))

    weight = torch.ones(2, 2, requires_grad=True)
    with Calls():
        torch.mm(torch.ones(2, 2), weight).sum().backward()
    assert seen.count(("aten", "mm", False)) == 2
    assert ("aten", "t", True) in seen
