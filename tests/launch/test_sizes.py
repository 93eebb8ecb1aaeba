"""Sizes that no memory here can hold are refused by their key, and all that ships is taken."""

from pathlib import Path
from typing import Any

import pytest

import lockstep.config
from lockstep.config import config_from, load_config
from lockstep.errors import UsageError
from lockstep.launch.sizes import require_sizes


@pytest.mark.parametrize(
    ("settings", "ranks", "where"),
    [
        ({"data.name": "documents", "data.args.sequence_length": 10**11}, 1, "sequence_length"),
        ({"data.name": "stream", "data.args.sequence_length": 10**11}, 1, "sequence_length"),
        ({"data.args": {"documents": True, "block_size": 10**11}}, 1, "data.args.block_size"),
        (
            {"data.name": "stream", "data.args": {"sources": ["hf:a/b"], "window": 10**12}},
            1,
            "data.args.window",
        ),
        ({"data.num_workers": 10**8}, 1, "data.num_workers"),
        ({"data.num_workers": 2, "data.prefetch_factor": 10**12}, 1, "data.prefetch_factor"),
        ({"model.args.n_layer": 10**10}, 1, "model.args.n_layer"),
        ({"model.name": "hf:gpt2", "model.args.num_hidden_layers": 10**10}, 1, "num_hidden_layers"),
        ({"model.args.n_embd": 10**9}, 1, "model.args.n_embd"),
        ({"model.args": {"n_embd": 64, "vocab_size": 10**12}}, 1, "model.args.vocab_size"),
        ({"model.args": {"n_embd": 64, "n_expert": 10**12}}, 1, "model.args.n_expert"),
        ({}, 10**7, "--nproc-per-node"),
    ],
)
def test_a_size_that_no_memory_holds_is_named(
    settings: dict[str, Any], ranks: int, where: str
) -> None:
    config = config_from({"model.name": "transformer", "data.name": "text", **settings})
    with pytest.raises(UsageError, match=r"which no memory here can hold") as caught:
        require_sizes(config, ranks)
    assert str(caught.value.where).endswith(where)


def test_what_machines_share_and_what_is_not_known_is_not_refused() -> None:
    wide = config_from({"model.name": "transformer", "model.args.n_embd": 10**7})
    with pytest.raises(UsageError, match="n_embd"):
        require_sizes(wide, 8, 1)
    require_sizes(wide, 8, 100_000)
    require_sizes(wide, 8, 1, on_cpu=False)
    require_sizes(config_from({"model.name": "mine:Net", "model.args.n_layer": 10**12}), 1)


def test_configs_that_ship_are_taken() -> None:
    shipped = sorted(Path(lockstep.config.__file__).parent.glob("ready/*.yaml"))
    for path in shipped:
        require_sizes(load_config(path), 8)
    assert shipped


@pytest.mark.parametrize("key", ["distributed.timeout_seconds", "distributed.ddp.bucket_cap_mb"])
def test_numbers_that_torch_can_not_hold_are_refused_when_they_are_loaded(key: str) -> None:
    with pytest.raises(UsageError, match=key.rpartition(".")[2]):
        config_from({key: 1e18})
    config_from({key: 1e9})
