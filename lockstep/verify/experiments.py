"""What is tried where a step differs: the same step once more, with one thing changed on both sides."""

from typing import Any

from lockstep.config import Config
from lockstep.strategy import parse_topology
from lockstep.verify import switches
from lockstep.verify.differences import StepResult
from lockstep.verify.subject import Case, Spec

AGAIN, AGAIN_TOO = "again", "again too"
COMPRESSION, RECOMPUTATION, CLIP, COMPILE, FLOAT32, ONE_EACH = (
    "without compression", "without recomputation", "without clipping", "without compilation", "in float32",
    "one micro-batch a rank",
)  # fmt: skip
SEEDS, DRAWS, SAME, DOUBLE = "with one seed", "without random numbers", "with equal samples", "in float64"
NUDGE = "with other last bits"


def experiments(spec: Spec, topology: str, found: StepResult, data: Any) -> list[Case]:
    """What to try at the step in which `found` differs."""
    config, at = spec.config, found.step
    _, ranks = parse_topology(topology)
    cases = [
        Case(AGAIN, start=at, switches=frozenset({switches.OUTPUTS})),
        Case(AGAIN_TOO, start=at, switches=frozenset({switches.OUTPUTS})),
        Case(SEEDS, start=at, switches=frozenset({switches.SEEDS})),
        Case(DRAWS, start=at, switches=frozenset({switches.DRAWS})),
        Case(NUDGE, start=at, switches=frozenset({switches.NUDGE})),
    ]
    for name, settings in _switched_off(config).items():
        cases.append(Case(name, settings, start=at))
    if ranks > 1:
        size = config.training.batch_size * ranks
        one_each = {"training.global_batch_size": size, "training.gradient_accumulation_steps": None}
        cases.append(Case(ONE_EACH, one_each))
    if switches.is_indexed(data):
        cases.append(Case(SAME, start=at, switches=frozenset({switches.SAME})))
        if FLOAT32 not in _switched_off(config):
            cases.append(Case(DOUBLE, start=at, switches=frozenset({switches.DOUBLE})))
    return cases


def _switched_off(config: Config) -> dict[str, dict[str, Any]]:
    training, precision, distributed = config.training, config.precision, config.distributed
    off: dict[str, dict[str, Any]] = {}
    if distributed.ddp.compression.kind != "none":
        off[COMPRESSION] = {"distributed.ddp.compression.kind": "none"}
    if training.gradient_checkpointing != "none":
        off[RECOMPUTATION] = {"training.gradient_checkpointing": "none"}
    if training.gradient_clip.strategy != "none":
        off[CLIP] = {"training.gradient_clip.strategy": "none"}
    if training.compile:
        off[COMPILE] = {"training.compile": False}
    low = precision.param_dtype != "fp32" or distributed.fsdp.reduce_dtype != "fp32"
    if low or precision.mode != "fp32":
        off[FLOAT32] = {
            "precision.mode": "fp32", "precision.param_dtype": "fp32", "distributed.fsdp.reduce_dtype": "fp32",
        }  # fmt: skip
    return off
