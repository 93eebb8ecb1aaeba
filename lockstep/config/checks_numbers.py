"""Contradictions in which numbers are computed: formats, scaling, compression, equal bits.

Tests: tests/config/test_checks.py, tests/test_errors.py
"""

from collections.abc import Iterator

from lockstep.config.schema import StepConfig
from lockstep.errors import Contradiction


def number_contradictions(config: StepConfig) -> Iterator[Contradiction]:
    """Yield contradictions between number formats, loss scaling and compression."""
    precision = config.precision
    scale = config.precision.loss_scale
    compression = config.distributed.ddp.compression
    if precision.mode == "fp16" and precision.param_dtype == "bf16":
        what = "fp16 autocast over bf16 parameters has the range of neither"
        yield Contradiction(
            ("precision.mode", "precision.param_dtype"),
            what,
            "write mode: bf16, or param_dtype: fp32",
        )
    if precision.fp8 != "none" and precision.mode == "fp16":
        what = f"fp8: {precision.fp8} is not offered under fp16"
        why = (
            "what the loss scale lifts into fp16's range, float8 scales again; nothing has compared"
            " the two"
        )
        yield Contradiction(
            ("precision.fp8", "precision.mode"), what, "write mode: bf16, or fp8: none", why
        )
    if not scale.min_scale <= scale.initial_scale <= scale.max_scale:
        keys = tuple(
            f"precision.loss_scale.{name}" for name in ("min_scale", "initial_scale", "max_scale")
        )
        bounds = f"min_scale {scale.min_scale:g} and max_scale {scale.max_scale:g}"
        what = f"initial_scale {scale.initial_scale:g} is not between {bounds}"
        yield Contradiction(keys, what, "write an initial_scale between them")
    feedback = compression.error_feedback or compression.warm_start
    if compression.kind == "powersgd" and feedback and compression.start_step < 2:
        what = (
            "PowerSGD with error feedback or a warm start can't start at step"
            f" {compression.start_step}"
        )
        why = "DDP rebuilds its buckets after the first step"
        yield Contradiction(
            ("distributed.ddp.compression.start_step",), what, "write start_step: 2 or more", why
        )


def reproducible_contradictions(config: StepConfig) -> Iterator[Contradiction]:
    """Yield the settings under which the bits would depend on the number of ranks."""
    distributed = config.distributed
    if not distributed.reproducible:
        return
    rounding = (
        ("precision.param_dtype", config.precision.param_dtype, "fp32"),
        ("distributed.ddp.compression.kind", distributed.ddp.compression.kind, "none"),
        ("distributed.fsdp.reduce_dtype", distributed.fsdp.reduce_dtype, "fp32"),
    )
    for key, value, needed in rounding:
        if value != needed:
            what = (
                f"{key}: {value} rounds differently on another number of ranks, so the bits can't"
                " be equal"
            )
            fix = f"write {key}: {needed}, or reproducible: false"
            yield Contradiction(("distributed.reproducible", key), what, fix)
    if config.precision.fp8 != "none":
        what = f"equal bits are not shown for precision.fp8: {config.precision.fp8}"
        fix = "write precision.fp8: none, or reproducible: false"
        yield Contradiction(("distributed.reproducible", "precision.fp8"), what, fix)
    if distributed.ddp.static_graph:
        what = (
            "with a static graph DDP reduces the first micro-batch by itself, not up the tree that"
            " gives equal bits"
        )
        fix = "write static_graph: false, or reproducible: false"
        yield Contradiction(("distributed.reproducible", "distributed.ddp.static_graph"), what, fix)
