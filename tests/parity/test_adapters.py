"""Adapters of peft: on ranks as in one process and in plain peft; the rest costs nothing."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.checkpoint import export_hugging_face
from tests.parity import adapted
from tests.parity.adapted import Adapted
from tests.ranks import run_ranks
from tests.sampled import sampled

pytest.importorskip("peft")

TOLERANCE = 1e-5
PLAIN = ("ddp", "fsdp")  # where sums are plain ones, too: what reduces gradients is another part
TOPOLOGIES = {
    2: ("fsdp:2", "ddp:2", "pipeline:2", "context:2"),
    4: (
        *("ddp:4", "fsdp:4", "hybrid:2x2"),
        *("pipeline:2*ddp:2", "pipeline:2*fsdp:2", "fsdp:2*context:2"),
    ),
}


def check(ranks: int, topologies: Sequence[str], folder: Path) -> None:
    """Losses of plain peft to 1e-5, one digest, state of adapters alone, and one file of them."""
    name = adapted.write_base(folder)
    expected = adapted.own_loop(str(folder))
    cases = [
        (name, topology, {"distributed.reproducible": exact}, saved_by(folder, topology, exact))
        for topology in topologies
        for exact in (True, False)
        if exact or topology.partition(":")[0] in PLAIN
    ]
    digests: dict[str, str] = {}
    alone = str(folder / "alone" / "step-00000004")
    for results in run_ranks(adapted.many, ranks, cases, timeout=1800):
        for (_, topology, settings, _), found in zip(cases, results, strict=True):
            assert isinstance(found, Adapted), (topology, found)
            assert not found.refused, (topology, found.refused)
            assert found.losses == pytest.approx(expected, rel=TOLERANCE), topology
            assert found.states == found.trained, topology
            assert all("lora_" in parameter for parameter in found.states)
            like = adapted.CHUNKS if "context" in topology else {}
            if settings["distributed.reproducible"]:
                key = str(like)
                if key not in digests:
                    saved = "" if like else alone
                    digests[key] = adapted.run(name, "single", like, saved).digest
                assert found.digest == digests[key], topology
    whole = exported(Path(alone))
    assert all(bool(value.all()) for key, value in whole.items() if "lora_B" in key)
    for case in cases:
        if case[3]:
            found_there = exported(Path(case[3]))
            assert found_there.keys() == whole.keys(), case[1]
            assert all(torch.equal(value, whole[key]) for key, value in found_there.items())


def saved_by(folder: Path, topology: str, exact: bool) -> str:
    """Where a topology writes its checkpoint; the bits of cut sequences are others."""
    if not exact or "context" in topology:
        return ""
    return str(folder / topology.replace(":", "-").replace("*", "-") / "step-00000004")


def exported(checkpoint: Path) -> dict[str, Tensor]:
    """The adapters of a checkpoint, as peft's file has them: all elements of each was trained."""
    folder = checkpoint.with_name("adapter")
    export_hugging_face(checkpoint, folder, adapter=True)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == adapted.LORA["r"]
    return load_file(folder / "adapter_model.safetensors")


@sampled("topologies", TOPOLOGIES[2], 4)
def test_two_ranks_train_adapters_as_one_process(topologies: list[str], tmp_path: Path) -> None:
    check(2, topologies, tmp_path)


@pytest.mark.full
def test_four_ranks_train_adapters_as_one_process(tmp_path: Path) -> None:
    check(4, TOPOLOGIES[4], tmp_path)


def test_frozen_parameters_are_in_no_reduction(tmp_path: Path) -> None:
    """Besides the gradients that are trained, there are the figures that ddp carries."""
    name = adapted.write_base(tmp_path)
    for found in run_ranks(adapted.reduced, 2, name, ["ddp:2"]):
        sent, trained = found["ddp:2", True]
        sent_of_all, all_of_them = found["ddp:2", False]
        assert trained < all_of_them / 9
        assert sent - trained == sent_of_all - all_of_them


@pytest.mark.full
def test_shards_exchange_no_frozen_parameters(tmp_path: Path) -> None:
    """But those that are trained, in each of the rank's two micro-batches."""
    name = adapted.write_base(tmp_path)
    for found in run_ranks(adapted.reduced, 2, name, ["fsdp:2"]):
        for adapters in (True, False):
            sent, trained = found["fsdp:2", adapters]
            assert sent == 2 * trained


@pytest.mark.full
def test_adapters_of_ones_own_train_under_every_strategy(tmp_path: Path) -> None:
    """A model that peft has made, handed to the Trainer; prompts are not a chain, and refused."""
    adapted.write_base(tmp_path)
    alone = adapted.train_own_adapters(str(tmp_path), ["single"])
    strategies = ["ddp", "fsdp", "pipeline"]
    for found in run_ranks(adapted.train_own_adapters, 2, str(tmp_path), strategies, timeout=600):
        assert len(found) == 3 * len(alone) == 15
        for name, losses in found.items():
            kind, _, strategy = name.partition(" on ")
            if strategy == "pipeline" and kind in ("prompt", "prefix"):
                assert "PeftModelForCausalLM can't be cut into stages" in losses
            else:
                expected = alone[f"{kind} on single"]
                assert losses == pytest.approx(expected, rel=TOLERANCE), name
                assert losses[0] != losses[-1], name
