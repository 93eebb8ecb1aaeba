"""The default random generator of Apple's MPS.

Public torch: `torch.cuda.default_generators` and `torch.xpu.default_generators` have no counterpart
in `torch.mps`. Seen to work: torch 2.13.0, as far as a machine without MPS goes. When gone: a run
with `distributed.device: mps` raises AttributeError as it starts.
"""

import torch


def default() -> torch.Generator:
    """Return the generator from which random functions draw on MPS."""
    return torch.mps._get_default_mps_generator()
