"""Figures that others have published, and what this package says for the same runs.

Each has its source and the error within which it is reproduced; `benchmarks/published.py` prints
the table and a test holds it. All throughputs of torchtitan were in view when `Efficiency` and the
GPUs' `products` were set, and are marked as calibration: they show that one set of constants fits
five runs, not that unseen ones are predicted. The other rows are arithmetic on what the papers
state, or memory, for which no constant was set.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.goodput import Reliability, best_interval, expected_goodput
from lockstep.config import Config, config_from
from lockstep.costs.hardware import cluster_of
from lockstep.layout import Layout
from lockstep.plan.candidates import Candidate, evaluate_layout, pieces_of
from lockstep.plan.layouts import model_size_of
from lockstep.plan.messages import Messages
from lockstep.plan.rehearsal import Rehearsal, rehearse
from lockstep.plan.workload import Workload, workload_of
from lockstep.strategy import parse_topology, strategy_named

DAY = 86400.0


@dataclass(frozen=True)
class Figure:
    """One published number.

    Attributes:
        within: relative error that is allowed.
        calibrates: a constant here was set by it.
    """

    what: str
    source: str
    published: float
    predicted: Callable[[], float]
    within: float
    calibrates: bool = False


_TITAN = "torchtitan, docs/performance.md (2024): 64 A100 80 GB, FSDP2"
# Their H100 run at 500 W, and have, they say, a peak between that of the SXM and that of the NVL,
# whose is taken.
_TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_PALM = "Chowdhery et al. 2022, PaLM, section 4.1 and appendix B"
_MEGATRON = (
    "Narayanan et al. 2021, Efficient Large-Scale Language Model Training, sections 5.1 and 5.2"
)
_BLOOM = "Le Scao et al. 2022, BLOOM, section 3.4 and table 3"
_OPT = "Zhang et al. 2022, OPT, section 2.4; metaseq's chronicles of OPT-175B"
_LLAMA3 = "Llama team 2024, The Llama 3 Herd of Models, sections 3.2 and 3.3"
_LLAMA3_SCALE = "Llama team 2024, The Llama 3 Herd of Models (arXiv:2407.21783), table 4"
_MEGATRON_SCALE = (
    "Narayanan et al. 2021 (arXiv:2104.04473), table 1; micro-batches of one sample are assumed"
)
_SELECTIVE = "Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5"
_DEEPSEEK = "DeepSeek-AI 2024, DeepSeek-V3 (arXiv:2412.19437), sections 1 and 3.2"
_ZERO = "Rajbhandari et al. 2020, ZeRO, figure 1"

# (layers, width, heads, kv heads, hidden, vocabulary, positions)
_LLAMA = {
    "8B": (32, 4096, 32, 8, 14336, 128256, 8192),
    "13B": (40, 5120, 40, 40, 13824, 32000, 4096),
    "70B": (80, 8192, 64, 8, 28672, 128256, 8192),
    "405B": (126, 16384, 128, 8, 53248, 128256, 8192),
}
# (layers, width, heads)
_GPT = {
    "18B": (40, 6144, 48),
    "22B": (48, 6144, 64),
    "39B": (48, 8192, 64),
    "76B": (60, 10240, 80),
    "175B": (96, 12288, 96),
}


def _config(size: str, batch: int, checkpointing: str) -> Config:
    names = ("n_layer", "n_embd", "n_head", "n_kv_head", "mlp_hidden", "vocab_size", "block_size")
    return config_from(
        {
            "model.name": "transformer",
            "model.args": dict(zip(names, _LLAMA[size], strict=True)),
            "training.batch_size": batch,
            "training.gradient_checkpointing": checkpointing,
            "precision.mode": "bf16",
            "precision.param_dtype": "bf16",
            "distributed.strategy": "fsdp",
        }
    )


def _rehearsed(
    size: str, batch: int, checkpointing: str, gpus: int
) -> tuple[Workload, Config, Layout, Rehearsal]:
    config = _config(size, batch, checkpointing)
    layout = Layout("fsdp", 1, 1, gpus)
    work = workload_of(config)
    return work, config, layout, rehearse(work, config, layout)


def tokens_per_second(
    size: str, batch: int, checkpointing: str, gpus: int, gpu: str, between: str
) -> float:
    """Of each GPU under FSDP2, parameters gathered in bf16."""
    work, config, layout, rehearsal = _rehearsed(size, batch, checkpointing, gpus)
    cluster = cluster_of(gpus, gpu, between)
    pieces = pieces_of(model_size_of(work, config), rehearsal, Messages(layout, cluster), layout)
    step = strategy_named(layout.strategy).step_time(pieces, config.step, layout, cluster, 1)
    return batch * work.tokens_per_sample() / step.seconds


def planned(
    model: str, args: dict[str, Any], batch: int, topology: str, gpu: str, **more: Any
) -> Candidate:
    """One step of a layout with the axes pipeline, tensor, context and expert, in bf16.

    Args:
        batch: samples in a step, one in a micro-batch unless `batch_size` says another number.
        more: `batch_size`, `stages_per_rank`; `inside`, GB/s between GPUs of a node, where that is
            not the table's.
    """
    values, gpus = parse_topology(topology)
    per_rank = more.get("stages_per_rank", 1)
    cluster = cluster_of(gpus, gpu, more.get("between", "InfiniBand NDR"))
    if "inside" in more:
        cluster = replace(cluster, inside=replace(cluster.inside, bandwidth=more["inside"]))
    config = config_from(
        {
            "model.name": model,
            "model.args": args,
            "training.global_batch_size": batch,
            "training.batch_size": more.get("batch_size", 1),
            "precision.mode": "bf16",
            "training.gradient_checkpointing": more.get("checkpointing", "none"),
            "distributed.pipeline.stages_per_rank": per_rank,
            "distributed.pipeline.schedule": "Interleaved1F1B" if per_rank > 1 else "1F1B",
        }
    )
    work = workload_of(config)
    changes = {f"distributed.{key}": value for key, value in values.items()}
    found = evaluate_layout(work, config, cluster, changes, model_size_of(work, config))
    assert found.step is not None, found
    return found


def teraflops(found: Candidate, gpus: int) -> float:
    """Of each GPU, without recomputation."""
    assert found.step is not None
    return found.model_flops / found.step.seconds / gpus / 1e12


def _llama_405b(positions: int, topology: str, batch: int, gpus: int) -> float:
    names = ("n_layer", "n_embd", "n_head", "n_kv_head", "mlp_hidden", "vocab_size")
    args = dict(zip(names, _LLAMA["405B"], strict=False)) | {"block_size": positions}
    return teraflops(
        planned(
            "transformer", args, batch, topology, "H100", between="RoCE 400G", stages_per_rank=8
        ),
        gpus,
    )


def _gpt(size: str, topology: str, batch: int, **more: Any) -> Candidate:
    layers, width, heads = _GPT[size]
    args = {
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "mlp_hidden": width * 8 // 3 // 64 * 64,
        "vocab_size": 51200,
        "block_size": 2048,
    }
    return planned(
        "transformer", args, batch, topology, "A100-80GB", between="InfiniBand HDR", **more
    )


def _gpt_seconds(size: str, topology: str, batch: int, **more: Any) -> float:
    step = _gpt(size, topology, batch, **more).step
    assert step is not None
    return step.seconds


def _gpt_with_recomputation(size: str, topology: str, batch: int, **more: Any) -> float:
    """TFLOP/s of a GPU, the second forward pass among them, as that paper counts."""
    found = _gpt(size, topology, batch, checkpointing="full", **more)
    return 4 / 3 * teraflops(found, parse_topology(topology)[1])


def _deepseek_hours() -> float:
    """GPU-hours of a trillion tokens; with whole attention for MLA, experts in all layers, and
    products in bf16.

    Computation and the bubble of 1F1B alone: they hide the rows of experts behind it, and Lockstep
    does not.
    """
    args = {
        "n_layer": 61,
        "n_embd": 7168,
        "n_head": 56,
        "n_expert": 256,
        "top_k": 8,
        "n_shared": 1,
        "expert_hidden": 2048,
        "router": "sigmoid",
        "balance": "none",
        "bias_rate": 0.001,
        "vocab_size": 129280,
        "block_size": 4096,
    }
    step = planned(
        "mixture", args, 15360, "pipeline:16*ddp:128*expert:64", "H100", inside=200.0
    ).step
    assert step is not None
    seconds = step.compute * (1 + (16 - 1) / (15360 / 128))
    return 1e12 / (15360 * 4096) * seconds * 2048 / 3600


def memory_gib(size: str, batch: int, checkpointing: str, gpus: int) -> float:
    return _rehearsed(size, batch, checkpointing, gpus)[3].peak.total / 2**30


def llama_parameters(size: str) -> float:
    return float(
        model_size_of(workload_of(_config(size, 1, "none")), _config(size, 1, "none")).parameters
    )


def gpt_parameters(layers: int, width: int, vocabulary: int, positions: int) -> float:
    """Of a GPT with biases, norms and learned positions."""
    return (
        12
        * layers
        * width**2
        * (1 + 13 / (12 * width) + (vocabulary + positions) / (12 * layers * width))
    )


def training_days(
    parameters: float, tokens: float, gpus: int, teraflops: float, *, recomputes: bool
) -> float:
    """6 operations a parameter and token, 8 where the forward pass is repeated."""
    return (8 if recomputes else 6) * parameters * tokens / (gpus * teraflops * 1e12) / DAY


def utilisation(
    tokens_per_second: float,
    parameters: float,
    layers: int,
    heads: int,
    head_width: int,
    positions: int,
    peak: float,
) -> float:
    """Model FLOPs utilisation with attention, as PaLM defines it; `peak` of all chips together."""
    return (
        tokens_per_second * (6 * parameters + 12 * layers * heads * head_width * positions) / peak
    )


def _llama_goodput() -> float:
    days = 54
    interruptions = 466
    gpus = 16384
    # The report says neither how long a restart nor a save took: 10 minutes and 10 seconds are
    # assumed.
    machine = Reliability(days * 24 * gpus / interruptions, restart_seconds=600, save_seconds=10)
    mean = machine.mean_time(gpus)
    interval = best_interval(machine.save_seconds, mean)
    return expected_goodput(interval, machine.save_seconds, machine.restart_seconds, mean)


def zero_gb(shards: tuple[int, int, int]) -> float:
    """7.5 billion parameters: fp16 weights and gradients, 12 bytes of optimizer state, each over so
    many ranks.
    """
    return 7.5 * sum(size / shard for size, shard in zip((2, 2, 12), shards, strict=True))


def figures() -> list[Figure]:
    """All of them."""
    slow = "InfiniBand HDR"
    fast = "InfiniBand NDR"
    return [
        Figure(
            "Llama 2 13B, no recomputation: tokens/s a GPU",
            _TITAN,
            2162,
            lambda: tokens_per_second("13B", 2, "none", 64, "A100-80GB", slow),
            0.10,
            calibrates=True,
        ),
        Figure(
            "Llama 3 70B, full recomputation: tokens/s a GPU",
            _TITAN,
            331,
            lambda: tokens_per_second("70B", 1, "full", 64, "A100-80GB", slow),
            0.10,
            calibrates=True,
        ),
        Figure(
            "Llama 3 8B, every second layer recomputed: tokens/s a GPU",
            _TITAN,
            2904,
            lambda: tokens_per_second("8B", 1, "every_n", 64, "A100-80GB", slow),
            0.10,
            calibrates=True,
        ),
        Figure(
            "Llama 3.1 8B on 8 H100 (500 W), compiled: tokens/s a GPU",
            _TITAN_H100,
            6667,
            lambda: tokens_per_second("8B", 2, "selective", 8, "H100-NVL", fast),
            0.15,
            calibrates=True,
        ),
        Figure(
            "Llama 3.1 8B on 128 H100 (500 W), compiled: tokens/s a GPU",
            _TITAN_H100,
            6514,
            lambda: tokens_per_second("8B", 2, "selective", 128, "H100-NVL", fast),
            0.15,
            calibrates=True,
        ),
        Figure(
            "Llama 3.1 8B on 8 H100: GiB",
            _TITAN_H100,
            82.4,
            lambda: memory_gib("8B", 2, "selective", 8),
            0.10,
        ),
        Figure(
            "Llama 3.1 8B on 128 H100: GiB",
            _TITAN_H100,
            67.0,
            lambda: memory_gib("8B", 2, "selective", 128),
            0.15,
        ),
        Figure(
            "Llama 3 405B on 8,192 H100, TP 8, PP 16: TFLOP/s a GPU",
            _LLAMA3_SCALE,
            430,
            lambda: _llama_405b(8192, "pipeline:16*ddp:64*tensor:8", 2048, 8192),
            0.30,
        ),
        Figure(
            "Llama 3 405B on 16,384 H100, TP 8, PP 16: TFLOP/s a GPU",
            _LLAMA3_SCALE,
            400,
            lambda: _llama_405b(8192, "pipeline:16*ddp:128*tensor:8", 2048, 16384),
            0.30,
        ),
        Figure(
            "Llama 3 405B on 16,384 H100, TP 8, CP 16, PP 16, 131,072 positions: TFLOP/s a GPU",
            _LLAMA3_SCALE,
            380,
            lambda: _llama_405b(131072, "pipeline:16*ddp:8*context:16*tensor:8", 128, 16384),
            0.30,
        ),
        Figure(
            "GPT 18.4B on 256 A100, TP 8, full recomputation: TFLOP/s a GPU",
            _MEGATRON_SCALE,
            135,
            lambda: _gpt_with_recomputation("18B", "ddp:32*tensor:8", 1024),
            0.30,
        ),
        Figure(
            "GPT 39.1B on 512 A100, TP 8, PP 2, full recomputation: TFLOP/s a GPU",
            _MEGATRON_SCALE,
            138,
            lambda: _gpt_with_recomputation("39B", "pipeline:2*ddp:32*tensor:8", 1536),
            0.30,
        ),
        Figure(
            "GPT 76.1B on 1,024 A100, TP 8, PP 4, full recomputation: TFLOP/s a GPU",
            _MEGATRON_SCALE,
            140,
            lambda: _gpt_with_recomputation("76B", "pipeline:4*ddp:32*tensor:8", 1792),
            0.30,
        ),
        Figure(
            "GPT 22B on 8 A100, TP 8, full recomputation: seconds of a step",
            _SELECTIVE,
            1.42,
            lambda: _gpt_seconds("22B", "tensor:8", 4, batch_size=4, checkpointing="full"),
            0.30,
        ),
        Figure(
            "GPT 22B on 8 A100, TP 8, only attention recomputed: seconds of a step",
            _SELECTIVE,
            1.10,
            lambda: _gpt_seconds("22B", "tensor:8", 4, batch_size=4),
            0.30,
        ),
        Figure(
            "GPT 175B on 64 A100, TP 8, PP 8, full recomputation: seconds of a step",
            _SELECTIVE,
            18.13,
            lambda: _gpt_seconds(
                "175B", "pipeline:8*tensor:8", 64, stages_per_rank=3, checkpointing="full"
            ),
            0.30,
        ),
        Figure(
            "GPT 175B on 64 A100, TP 8, PP 8, only attention recomputed: seconds of a step",
            _SELECTIVE,
            13.75,
            lambda: _gpt_seconds("175B", "pipeline:8*tensor:8", 64, stages_per_rank=3),
            0.30,
        ),
        Figure(
            "DeepSeek-V3 on 2,048 H800, PP 16, EP 64: GPU-hours of a trillion tokens; here in bf16,"
            " there in fp8",
            # products in bf16 take up to twice as long
            _DEEPSEEK,
            180_000,
            _deepseek_hours,
            1.0,
        ),
        Figure(
            "PaLM 540B: MFU at 238.3K tokens/s on 6144 TPU v4",
            _PALM,
            0.462,
            lambda: utilisation(238_300, 540.35e9, 118, 48, 256, 2048, 6144 * 275e12),
            0.01,
        ),
        Figure(
            "GPT of 128 layers, 25600 wide: parameters",
            _MEGATRON,
            1008e9,
            lambda: gpt_parameters(128, 25600, 51200, 2048),
            0.01,
        ),
        Figure(
            "GPT-3 175B, 300B tokens, 1024 A100 at 140 TFLOP/s: days",
            _MEGATRON,
            34,
            lambda: training_days(175e9, 300e9, 1024, 140, recomputes=True),
            0.03,
        ),
        Figure(
            "GPT 1T, 450B tokens, 3072 A100 at 163 TFLOP/s: days",
            _MEGATRON,
            84,
            lambda: training_days(1e12, 450e9, 3072, 163, recomputes=True),
            0.03,
        ),
        Figure(
            "BLOOM: parameters",
            _BLOOM,
            176.247e9,
            lambda: gpt_parameters(70, 14336, 250_880, 0),
            0.01,
        ),
        Figure(
            "BLOOM: GPU-hours, 366B tokens at 150 TFLOP/s on 384 A100",
            _BLOOM,
            1_082_990,
            lambda: training_days(176.247e9, 366e9, 384, 150, recomputes=True) * 24 * 384,
            0.15,
        ),
        Figure(
            "OPT-175B: days, 300B tokens at 147 TFLOP/s on 1024 A100",
            _OPT,
            33,
            lambda: training_days(175e9, 300e9, 1024, 147, recomputes=True),
            0.05,
        ),
        Figure("Llama 3 405B: parameters", _LLAMA3, 405e9, lambda: llama_parameters("405B"), 0.01),
        Figure(
            "Llama 3 405B: operations for 15.6T tokens",
            _LLAMA3,
            3.8e25,
            lambda: 6 * llama_parameters("405B") * 15.6e12,
            0.01,
        ),
        Figure(
            "Llama 3 405B: effective training time in 54 days with 466 interruptions, at least",
            _LLAMA3,
            0.90,
            _llama_goodput,
            0.06,
        ),
        Figure(
            "ZeRO, 7.5B on 64 GPUs: GB, nothing sharded",
            _ZERO,
            120,
            lambda: zero_gb((1, 1, 1)),
            0.01,
        ),
        Figure(
            "ZeRO, 7.5B on 64 GPUs: GB, optimizer sharded",
            _ZERO,
            31.4,
            lambda: zero_gb((1, 1, 64)),
            0.01,
        ),
        Figure(
            "ZeRO, 7.5B on 64 GPUs: GB, all sharded",
            _ZERO,
            1.9,
            lambda: zero_gb((64, 64, 64)),
            0.02,
        ),
    ]
