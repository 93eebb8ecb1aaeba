"""Masked models, models with encoder and decoder, and classifiers of pictures, on any ranks."""

import pytest

from tests.parity import kinds_of_data
from tests.ranks import run_ranks

for package in ("transformers", "PIL"):
    pytest.importorskip(package)

KINDS = ["masked", "seq2seq", "images"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("kinds")
    kinds_of_data.write(made)
    return str(made)


@pytest.mark.parametrize("topology", ["ddp:2", pytest.param("fsdp:2", marks=pytest.mark.full)])
def test_two_ranks_and_a_worker_end_in_the_bits_of_one(folder: str, topology: str) -> None:
    """The draws of what is hidden follow the sample, in training and in an evaluation."""
    (alone,) = run_ranks(kinds_of_data.many, 1, folder, KINDS, "single")
    for losses, _, _ in alone:
        assert losses[-1] < losses[0]
    for found in run_ranks(kinds_of_data.many, 2, folder, KINDS, topology, 1):
        assert found == alone
