"""Large runs that others have published: models, layouts, MFU, each with its source."""

from dataclasses import dataclass

FOUNDRY = "MosaicML llm-foundry, scripts/train/benchmarking/README.md (2023)"
MEGATRON = "Narayanan et al. 2021, Efficient Large-Scale Language Model Training, table 1"
MEGASCALE = "Jiang et al. 2024, MegaScale, abstract and table 2"
LLAMA3 = "Llama team 2024, The Llama 3 Herd of Models, table 4"


@dataclass(frozen=True)
class Model:
    """A decoder; `hidden` of a gated MLP with as many weights as the published one."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    positions: int


def gpt(name: str, layers: int, width: int, heads: int, vocabulary: int) -> Model:
    """Two matrices of 4 × width in each MLP, which are as many weights as three of 8/3."""
    return Model(name, layers, width, heads, heads, round(width * 8 / 3), vocabulary, 2048)


@dataclass(frozen=True)
class Sharded:
    """A run under FSDP: a micro-batch of `batch` samples on each GPU."""

    model: Model
    batch: int
    checkpointing: str
    gpu: str
    link: str
    sharding: str = "full_shard"


@dataclass(frozen=True)
class Cut:
    """A run with tensor parallelism and an interleaved pipeline: `chunks` stages on each of its
    ranks.
    """

    model: Model
    tensor: int
    pipeline: int
    chunks: int
    samples: int  # of a step
    checkpointing: str
    gpu: str
    link: str


@dataclass(frozen=True)
class Published:
    """MFU of a run on so many GPUs."""

    run: Sharded | Cut
    gpus: int
    mfu: float
    source: str


MPT_7B = gpt("MPT-7B", 32, 4096, 32, 50368)
MPT_13B = gpt("MPT-13B", 40, 5120, 40, 50368)
MPT_30B = gpt("MPT-30B", 48, 7168, 56, 50368)
MPT_70B = gpt("MPT-70B", 80, 8192, 64, 50368)
ON_H100 = {
    name: Sharded(model, batch, checkpointing, "H100", "InfiniBand NDR")
    for name, model, batch, checkpointing in (
        ("7B", MPT_7B, 6, "none"),
        ("13B", MPT_13B, 16, "full"),
        ("30B", MPT_30B, 8, "full"),
        ("70B", MPT_70B, 8, "full"),
    )
}
ON_A100 = Sharded(MPT_13B, 16, "full", "A100-40GB", "InfiniBand HDR")  # 1600 Gbit/s a node
GPT_1T = Cut(
    gpt("GPT 1008B", 128, 25600, 160, 51200), 8, 64, 2, 3072, "full", "A100-80GB", "InfiniBand HDR"
)
GPT_175B = Cut(
    gpt("GPT 175B", 96, 12288, 128, 64000),
    8,
    8,
    6,
    6144,
    "selective",
    "A100-80GB",
    "InfiniBand HDR",
)
LLAMA_405B = Cut(
    Model("Llama 3 405B", 126, 16384, 128, 8, 53248, 128256, 8192),
    8,
    16,
    8,
    2048,
    "none",
    "H100",
    "RoCE 400G",
)


def _megatron(
    billions: str, layers: int, width: int, heads: int, pipeline: int, chunks: int, samples: int
) -> Cut:
    model = gpt(f"GPT {billions}B", layers, width, heads, 51200)
    return Cut(model, 8, pipeline, chunks, samples, "full", "A100-80GB", "InfiniBand HDR")


def _model_flops(teraflops: float) -> float:
    """Megatron counts the recomputed forward pass: three of four parts are the model's own; 312
    TFLOP/s an A100.
    """
    return teraflops * 3 / 4 / 312


PUBLISHED = (
    *(
        Published(ON_H100[size], gpus, mfu, FOUNDRY)
        for size, gpus, mfu in (
            ("7B", 8, 0.4644),
            ("7B", 128, 0.4571),
            ("7B", 256, 0.4415),
            ("7B", 512, 0.4220),
            ("13B", 128, 0.4218),
            ("13B", 256, 0.4142),
            ("13B", 512, 0.4112),
            ("30B", 128, 0.4185),
            ("30B", 256, 0.4089),
            ("30B", 512, 0.4027),
            ("70B", 128, 0.4336),
            ("70B", 256, 0.4242),
            ("70B", 512, 0.4125),
        )
    ),
    *(Published(ON_A100, gpus, mfu, FOUNDRY) for gpus, mfu in ((64, 0.5204), (128, 0.5193))),
    Published(_megatron("39.1", 48, 8192, 64, 2, 2, 1536), 512, _model_flops(138), MEGATRON),
    Published(_megatron("76.1", 60, 10240, 80, 4, 3, 1792), 1024, _model_flops(140), MEGATRON),
    Published(_megatron("145.6", 80, 12288, 96, 8, 2, 2304), 1536, _model_flops(148), MEGATRON),
    Published(_megatron("310.1", 96, 16384, 128, 16, 2, 2160), 1920, _model_flops(155), MEGATRON),
    Published(_megatron("529.6", 105, 20480, 128, 35, 3, 2520), 2520, _model_flops(163), MEGATRON),
    Published(GPT_1T, 3072, _model_flops(163), MEGATRON),
    Published(GPT_175B, 12288, 0.552, MEGASCALE),
    Published(LLAMA_405B, 8192, 0.43, LLAMA3),
    Published(LLAMA_405B, 16384, 0.41, LLAMA3),
)
