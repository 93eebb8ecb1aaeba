"""What is tried where a step differs can be tried: each experiment changes a config into one that
is accepted.
"""

from lockstep.config import Config, config_from
from lockstep.verify.experiments import (
    CLIP,
    COMPILE,
    COMPRESSION,
    FLOAT32,
    RECOMPUTATION,
    further_experiments,
    switched_off,
)
from lockstep.verify.subject import Spec
from lockstep.verify.worker import settings_of

EVERYTHING = {
    "training.gradient_checkpointing": "full",
    "training.gradient_clip": 1.0,
    "training.compile": True,
    "precision.mode": "bf16",
    "distributed.strategy": "ddp",
    "distributed.ddp.compression.kind": "fp16",
}


def tried(config: Config, topology: str) -> dict[str, Config]:
    cases = further_experiments(Spec(config, None, 5), topology, 2, [*switched_off(config)], [])
    return {
        case.name: config_from({**settings_of(topology), **case.settings}, config) for case in cases
    }


def test_each_switches_off_what_it_says() -> None:
    found = tried(config_from(EVERYTHING), "ddp:2")
    assert found[COMPRESSION].distributed.ddp.compression.kind == "none"
    assert found[RECOMPUTATION].training.gradient_checkpointing == "none"
    assert found[CLIP].training.gradient_clip.strategy == "none"
    assert not found[COMPILE].training.compile
    assert found[FLOAT32].precision.mode == "fp32"


def test_float32_is_tried_where_only_the_reduction_is_low() -> None:
    settings = {
        "precision.mode": "fp32",
        "distributed.strategy": "fsdp",
        "distributed.fsdp.reduce_dtype": "bf16",
    }
    assert tried(config_from(settings), "fsdp:2")[FLOAT32].distributed.fsdp.reduce_dtype == "fp32"
    assert FLOAT32 not in tried(config_from({"precision.mode": "fp32"}), "ddp:2")
