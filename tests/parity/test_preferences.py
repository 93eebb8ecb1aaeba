"""Preference pairs: the losses of TRL's formula, and one digest on any ranks."""

import pytest
import torch

from tests.parity import preferred
from tests.ranks import run_ranks

for package in ("transformers", "peft"):
    pytest.importorskip(package)

_TOPOLOGIES = ("ddp:2", "fsdp:2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("preferred")
    preferred.write_model(made)
    return str(made)


@pytest.fixture(scope="module")
def single(folder: str) -> dict[bool, tuple[list[float], str]]:
    """Losses and digest of one process, with adapters and without."""
    (found,) = run_ranks(preferred.many, 1, [(folder, "single", each) for each in (True, False)])
    return dict(zip((True, False), found, strict=True))


@pytest.mark.parametrize("adapters", [True, False])
def test_losses_are_those_of_plain_pytorch(
    adapters: bool, folder: str, single: dict[bool, tuple[list[float], str]]
) -> None:
    losses = single[adapters][0]
    assert losses[-1] < losses[0] - 0.01, "it learns"
    torch.testing.assert_close(
        torch.tensor(losses),
        torch.tensor(preferred.by_hand(folder, adapters)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_digest_on_two_ranks_is_that_of_one(
    folder: str, single: dict[bool, tuple[list[float], str]]
) -> None:
    cases = [(folder, topology, each) for topology in _TOPOLOGIES for each in (True, False)]
    for rank in run_ranks(preferred.many, 2, cases):
        for (_, topology, adapters), found in zip(cases, rank, strict=True):
            assert found == single[adapters], (topology, adapters)
