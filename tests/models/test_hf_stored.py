"""A folder's weights are read by pieces: each rank its own, with the values that transformers
loads.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config import config_from
from lockstep.data import Data
from lockstep.errors import UsageError
from lockstep.models.hf_decoder import FAMILIES
from lockstep.models.stored import ComputedPart
from lockstep.parallel.initial import FirstValues
from lockstep.trainer import build
from tests.models.decoders import decoder
from tests.parity.adapted import settings_of, trainer_of
from tests.ranks import run_ranks
from tests.sampled import quick_and_full

transformers = pytest.importorskip("transformers")
hf_stored = pytest.importorskip("lockstep.models.hf_stored")
pytestmark = pytest.mark.skipif(
    not hf_stored.CAN_READ_PIECES, reason="transformers 5 names weights by a table"
)

WITHOUT_ADAPTERS = {"model.lora": None}


def folder_of(path: Path, family: str, **changes: Any) -> str:
    decoder(family, **changes).save_pretrained(path)
    return f"hf:{path}"


def on_meta(name: str) -> Any:
    config = config_from(settings_of(name, "single", WITHOUT_ADAPTERS))
    return build(config, Data(None))


def expected(path: Path) -> dict[str, Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_values(path: Path) -> Any:
    """Parameters and buffers are those that transformers has; returns the model on meta."""
    model = on_meta(f"hf:{path}")
    names = dict(model.named_parameters())
    assert all(parameter.is_meta for parameter in names.values())
    first = FirstValues(model, seed=1)
    wanted = expected(path)
    for name in names:
        assert torch.equal(first.parameter(name), wanted[name]), name
    for name, buffer in first.buffers().items():
        assert torch.equal(buffer, wanted[name]), name
    return model


SOME = ["gemma2", "gpt2", "gpt_neox", "llama", "mixtral", "phi3", "qwen3_moe"]


@pytest.mark.parametrize("family", quick_and_full(FAMILIES, SOME))
def test_the_values_are_those_that_transformers_loads(family: str, tmp_path: Path) -> None:
    folder_of(tmp_path, family)
    check_values(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_tied_weight_lies_in_the_files_once(family: str, tmp_path: Path) -> None:
    folder_of(tmp_path, family, tie_word_embeddings=True)
    model = check_values(tmp_path)
    head = model.get_output_embeddings().weight
    assert head is model.get_input_embeddings().weight
    # a file may have the other one of its names
    tensors = load_file(tmp_path / "model.safetensors")
    key = next(key for key in tensors if "embed_tokens" in key or "wte" in key)
    tensors["lm_head.weight"] = tensors.pop(key)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check_values(tmp_path)


def test_several_files_of_bfloat16(tmp_path: Path) -> None:
    decoder("llama").bfloat16().save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check_values(tmp_path)


def test_experts_are_followed_into_their_files(tmp_path: Path) -> None:
    """A mixture's stacked weights are read piece by piece, not made of all experts."""
    folder_of(tmp_path, "mixtral")
    model = on_meta(f"hf:{tmp_path}")
    stored = model.stored_weights
    names = [name for name in dict(model.named_parameters()) if "experts" in name]
    assert names
    for name in names:
        assert not isinstance(stored._parts[name], ComputedPart), name
        tensor = stored.tensor(name, torch.float32)
        before = stored.counted.total
        piece = tensor.chunk(4, 0)[1].read()
        assert stored.counted.total - before == piece.numel() * 4


def read_by(name: str, topology: str) -> tuple[int, int, int]:
    """(bytes that this rank has read, of its parameters, of its largest weight)."""
    trainer = trainer_of(name, topology, {**WITHOUT_ADAPTERS, "distributed.reproducible": False})
    placed = trainer.placed
    read = placed.root.stored_weights.counted.total
    local = [getattr(p, "_local_tensor", p) for p in placed.parameters.values()]
    largest = max(p.numel() for p in placed.parameters.values())
    return read, sum(p.numel() * 4 for p in local), largest * 4


def all_read(name: str, topologies: list[str]) -> list[tuple[int, int, int]]:
    return [read_by(name, topology) for topology in topologies]


@pytest.mark.parametrize(
    ("family", "topologies"),
    [
        ("llama", ["fsdp:2", "tensor:2", "pipeline:2", "ddp:2"]),
        ("mixtral", ["fsdp:2", "pipeline:2"]),
    ],
)
def test_a_rank_reads_its_own_bytes(family: str, topologies: list[str], tmp_path: Path) -> None:
    name = folder_of(tmp_path, family, attention_dropout=0.0, vocab_size=64)
    results = run_ranks(all_read, 2, name, topologies)
    for number, topology in enumerate(topologies):
        for rank in results:
            read, held, _ = rank[number]
            assert read == held, (topology, read, held)


def test_what_does_not_fit_is_one_error(tmp_path: Path) -> None:
    folder_of(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.1.self_attn.q_proj.weight"
    save_file({**tensors, key: torch.zeros(3, 16)}, file, {"format": "pt"})
    with pytest.raises(UsageError, match=rf"{key} has the shape \[3, 16\]"):
        on_meta(f"hf:{tmp_path}")
    save_file({k: v for k, v in tensors.items() if k != key}, file, {"format": "pt"})
    with pytest.raises(
        UsageError, match=f"do not fill 1 of the model's parameters, the first {key}"
    ):
        on_meta(f"hf:{tmp_path}")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"model\.safetensors can't be read"):
        on_meta(f"hf:{tmp_path}")


def test_settings_of_generation_stay(tmp_path: Path) -> None:
    folder_of(tmp_path, "llama")
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**settings, "top_k": 7}))
    model = on_meta(f"hf:{tmp_path}")
    assert model.generation_config.top_k == 7
    assert model.name_or_path == str(tmp_path)
