"""`lockstep/torch_compat/normalizations.py`: torch's normalisations are of these classes."""

import pytest
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lockstep.torch_compat.normalizations import BatchNorm, SpectralNormParametrization


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_each_batch_normalisation_is_one(kind: type[nn.Module]) -> None:
    assert issubclass(kind, BatchNorm)
    assert not issubclass(nn.InstanceNorm1d, BatchNorm)


def test_spectral_normalisation_keeps_two_vectors() -> None:
    model = spectral_norm(nn.Linear(2, 3))
    (found,) = [
        module for module in model.modules() if isinstance(module, SpectralNormParametrization)
    ]
    assert sorted(tuple(buffer.shape) for buffer in found.buffers()) == [(2,), (3,)]
