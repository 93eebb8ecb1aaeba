"""Classes of torch's normalisations that have no public name.

Public torch: `nn.BatchNorm1d` and its like, which share this base; classes of users derive from the
base itself. `torch.nn.utils.parametrizations.spectral_norm` is a function that registers a module
of a private class. Seen to work: torch 2.11.0 to 2.15.0. When gone: importing this file raises
ImportError.
"""

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNormParametrization

__all__ = ["BatchNorm", "SpectralNormParametrization"]
