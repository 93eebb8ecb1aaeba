"""Preference pairs: the losses of TRL's formula, and one digest on any ranks."""

import pytest
import torch

from tests.parity import preferred
from tests.ranks import run_ranks

for package in ("transformers", "peft"):
    pytest.importorskip(package)

# Topologies, with adapters or without, that run in one launch.
_SOME = [("ddp:2", False), ("fsdp:2", True)]
_OTHERS = [("ddp:2", True), ("fsdp:2", False)]


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


@pytest.mark.parametrize(
    "cases",
    [_SOME, pytest.param(_OTHERS, marks=pytest.mark.full)],
    ids=["some", "others"],
)
def test_the_digest_on_two_ranks_is_that_of_one(
    cases: list[tuple[str, bool]], folder: str, single: dict[bool, tuple[list[float], str]]
) -> None:
    for rank in run_ranks(preferred.many, 2, [(folder, *case) for case in cases]):
        for (topology, adapters), found in zip(cases, rank, strict=True):
            assert found == single[adapters], (topology, adapters)
