"""Saving on several ranks and loading on others; the cases are in rank_cases.py, and share two
launches.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint import DamagedError, commands
from tests.checkpoint import rank_cases
from tests.checkpoint.shared import Snapshot, blank, flip, known, known_model
from tests.checkpoint.test_hostile import reseal
from tests.ranks import run_ranks

Saved = tuple[Path, list[dict[str, str]]]


@pytest.fixture(scope="module")
def saved(module_path: Path) -> Saved:
    return module_path, run_ranks(rank_cases.on_four, 4, module_path)


@pytest.mark.parametrize("layout", ["save_on_one_axis", "save_on_two_axes", "save_by_stages"])
def test_digest_is_that_of_the_whole_tensors_whatever_the_layout(saved: Saved, layout: str) -> None:
    expected = checkpoint.digest_tensors(sorted(known_model().items()))
    assert [said[layout] for said in saved[1]] == [expected] * 4


@pytest.mark.parametrize("case", [case.__name__ for case in rank_cases.CASES])
def test_on_four_ranks(saved: Saved, case: str) -> None:
    assert [said[case] for said in saved[1]] == ["passed"] * 4


def test_two_ranks_load_what_four_saved(saved: Saved) -> None:
    run_ranks(rank_cases.on_two, 2, saved[0])


def test_one_process_loads_what_four_ranks_saved(saved: Saved) -> None:
    for step in (1, 2, 3):
        target = blank(Snapshot(known_model()))
        checkpoint.load(saved[0] / "layouts" / f"step-{step:08d}", target, only=["model"])
        assert all(
            torch.equal(target.model[name], tensor) for name, tensor in known_model().items()
        )
    single, its_optimizer = rank_cases.network(None)
    rank_cases.train(single, its_optimizer, range(2))
    for step in (1, 2):
        path = saved[0] / "fsdp_goes_on_in_the_same_bits" / f"step-{step:08d}"
        model, optimizer = rank_cases.load_network(path, None)
        for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
            assert torch.allclose(mine, theirs)
        assert optimizer.state[model.embedding.weight]["step"] == 2


def test_raw_shards_of_four_ranks_are_converted_by_one_process(
    saved: Saved, tmp_path: Path
) -> None:
    raw = saved[0] / "local_format_is_for_the_ranks_that_wrote_it" / "step-00000001"
    commands.run("convert", raw, to="full", output=tmp_path / "whole")
    assert checkpoint.digest(tmp_path / "whole") == checkpoint.digest(raw)
    target = blank(Snapshot(known_model(), {"main": {"head.weight//exp_avg": torch.zeros(5, 7)}}))
    checkpoint.load(tmp_path / "whole", target)
    assert all(torch.equal(target.model[name], tensor) for name, tensor in known_model().items())
    assert torch.equal(target.optimizers["main"]["head.weight//exp_avg"], known("exp_avg", (5, 7)))
    commands.run("export", raw, output=tmp_path / "model.safetensors")


@pytest.mark.fault(
    "hostile: raw shards that claim what is not there",
    "`format: local`: sizes beyond the file, blocks that leave a hole, other dtypes",
    "refused with one message before anything is allocated",
)
def test_raw_shards_that_claim_what_is_not_there_are_refused(saved: Saved, tmp_path: Path) -> None:
    """The attacker computes checksums too."""
    raw = saved[0] / "local_format_is_for_the_ranks_that_wrote_it" / "step-00000001"
    for number, (facts, said) in enumerate(
        (
            ({"shape": [1 << 40], "offset": [0], "block": [1 << 40]}, "claims more bytes"),
            ({"shape": [9], "offset": [4], "block": [9]}, "lies outside it"),
            ({"shape": [9], "offset": [0], "block": [5]}, "do not make up the whole"),
            ({"dtype": "load"}, "is not a dtype"),
            ({"at": -4}, "where a count is needed"),
            ({"block": "9"}, "where counts are needed"),
        )
    ):
        path = tmp_path / f"{number}" / raw.name
        shutil.copytree(raw, path)
        for file in (path / "model").iterdir():
            data = file.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            header["norm"] |= facts
            text = json.dumps(header).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        reseal(path)
        with pytest.raises(DamagedError, match=said):
            checkpoint.digest(path)
    path = tmp_path / "flipped" / raw.name
    shutil.copytree(raw, path)
    flip(path / "model/rank-00002.raw", -1)
    assert checkpoint.verify(path) == [
        "model/rank-00002.raw: its checksum is not that of what was written"
    ]


@pytest.mark.fault(
    "process: a rank is killed inside a save of several",
    "SIGKILL while it writes its part",
    "the old checkpoint is whole, the new one invisible, and no rank waits for ever",
)
def test_a_rank_killed_in_a_save_leaves_the_old_checkpoint_and_no_rank_waiting(
    tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(rank_cases.killed_in_pairs, 4, tmp_path)
    assert str(caught.value).split("\n") == ["1 died", "2 died"]
    assert {path.name for path in tmp_path.glob("survivor-*")} == {"survivor-0", "survivor-3"}
    for pair in ("pair-0", "pair-1"):
        (old,) = checkpoint.list_checkpoints(tmp_path / pair)
        assert checkpoint.verify(old) == []
        checkpoint.rotate(tmp_path / pair, keep=3)
        assert list((tmp_path / pair).iterdir()) == [old], "what the dead left is swept"


def test_replicas_share_the_writing(saved: Saved) -> None:
    """Plain tensors lie on all ranks, and each rank writes some of them."""
    path = saved[0] / "one_rank_fails" / "step-00000002"
    sizes = [file.stat().st_size for file in sorted((path / "model").glob("*.distcp"))]
    assert len(sizes) == 4
    assert max(sizes) < 2 * min(sizes)
