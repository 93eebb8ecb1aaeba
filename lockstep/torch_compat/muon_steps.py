"""The two computations of torch's Muon: the orthogonal factor of a matrix, and its learning rate.

Public torch: `torch.optim.Muon`, which takes whole matrices alone, and no other parameters. Seen to
work: torch 2.13.0. When gone: ImportError as `training.optimizer: muon` is loaded.
"""

from torch.optim import _muon

orthogonal = _muon._zeropower_via_newtonschulz
adjusted_rate = _muon._adjust_lr
COEFFICIENTS = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
EPS = _muon.EPS
