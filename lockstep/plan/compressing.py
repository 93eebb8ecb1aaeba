"""Whether compressing gradients would pay: only where a step gets shorter, what backward hides included.

Half the bytes on the wire are not half the time of a step: most of them are sent while backward computes, and casting
moves each number four times through the device's memory. Only bf16 is advised: low rank costs loss, which no plan
knows.
"""

from lockstep.config import Config
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import Pieces
from lockstep.layout import Layout
from lockstep.strategy import strategy_named

KEY = "distributed.ddp.compression.kind"
PAYS_FROM = 0.1  # of a step: less is not worth the lost digits
_MOVED = 12.0 / 4.0  # bytes that casting to 16 bits and back reads and writes, for each byte of fp32


def advice(pieces: Pieces, config: Config, layout: Layout, cluster: GpuCluster, micro_batches: int) -> list[str]:
    """One line where compression would pay, or where it was asked for and does not."""
    strategy = strategy_named(layout.strategy)
    if not strategy.reduces_by_ddp or layout.world_size == 1 or config.distributed.reproducible:
        return []
    asked = config.distributed.ddp.compression.kind
    seconds = {
        kind: strategy.step_time(pieces, config.replaced({KEY: kind}).step, layout, cluster, micro_batches).seconds
        for kind in ("none", "bf16")
    }
    seconds["bf16"] += _MOVED * pieces.parameter_bytes / (cluster.gpu.bandwidth * 1e9 * cluster.efficiency.memory)
    saved = 1 - seconds["bf16"] / seconds["none"]
    if asked == "none" and saved >= PAYS_FROM:
        return [
            f"{layout} with {KEY}: bf16 would take {seconds['bf16']:.3g} s a step instead of {seconds['none']:.3g} "
            f"({saved:.0%} less)"
        ]
    if asked in ("fp16", "bf16") and saved < PAYS_FROM:
        return [
            f"{layout}: {KEY}: {asked} does not pay here: {seconds['bf16']:.3g} s a step, and {seconds['none']:.3g} "
            "without; write none"
        ]
    return []
