"""Adapters of a folder, and heads beside adapters: on ranks as in one process."""

from pathlib import Path

import pytest

from tests.parity import continued
from tests.ranks import run_ranks

for package in ("transformers", "peft"):
    pytest.importorskip(package)

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made: Path = tmp_path_factory.mktemp("continued")
    continued.write_all(made)
    return str(made)


def check(folder: str, ranks: int, topologies: list[str]) -> None:
    alone = continued.of_configs(folder, ["single"])
    for found in run_ranks(continued.of_configs, ranks, folder, topologies, timeout=900):
        for (kind, topology), (losses, digest) in found.items():
            expected, own = alone[kind, "single"]
            assert losses == pytest.approx(expected, rel=TOLERANCE), (kind, topology)
            assert digest == own, (kind, topology)
            assert losses[0] != losses[-1], kind


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "topologies"), [(2, ["ddp:2", "fsdp:2"]), (4, ["ddp:4", "fsdp:4", "hybrid:2x2"])]
)
def test_an_adapter_of_a_folder_and_heads_train_on_ranks(
    folder: str, ranks: int, topologies: list[str]
) -> None:
    check(folder, ranks, topologies)


def test_what_peft_has_loaded_trains_as_in_a_loop_by_hand(folder: str) -> None:
    expected = continued.by_hand(folder)
    assert continued.of_peft(folder, ["single"])["single"] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.full
def test_what_peft_has_loaded_trains_on_ranks(folder: str) -> None:
    expected = continued.by_hand(folder)
    for found in run_ranks(continued.of_peft, 2, folder, ["ddp", "fsdp", "pipeline"], timeout=600):
        for strategy, losses in found.items():
            assert losses == pytest.approx(expected, rel=TOLERANCE), strategy
