"""Steps of a model that sleeps where others compute, timed on real ranks, and what the simulation
says of them.
"""

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config import Config, config_from
from lockstep.costs.hardware import Efficiency, Gpu, GpuCluster, Link
from lockstep.costs.steps import Pieces, StepTime
from lockstep.parallel.pipeline.plan import StageTime, pipeline_step
from lockstep.strategy import resolve, strategy_named
from lockstep.trainer import Trainer

# a MiB of parameters a block; seconds a micro-batch
WIDTH = 512
BLOCKS = 4
FORWARD = 0.03
BACKWARD = 0.06
LATENCY = 1e-3  # gloo's, over a link


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD)
        return gradients[0]


class Sleepy(nn.Module):
    """x → linear(x), slowly: backward sleeps first, then the weight's gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x))  # type: ignore[no-untyped-call,no-any-return]


class Data(Dataset[tuple[Tensor, Tensor]]):
    deterministic = True

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), index / 4096), torch.zeros(WIDTH)


class Case(NamedTuple):
    name: str
    micro_batches: int = 1  # of a data-parallel rank
    samples: int = 16
    settings: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Config:
        return config_from(
            {
                "training.batch_size": self.samples,
                "training.gradient_accumulation_steps": self.micro_batches,
                "training.max_steps": 100,
                "training.optimizer": "sgd",
                "precision.mode": "fp32",
                "distributed.ddp.bucket_cap_mb": 1.0,
                **dict(self.settings),
            }
        )


_PIPELINE = ("distributed.strategy", "pipeline")
CASES = [
    Case("ddp", settings=(("distributed.strategy", "ddp"),)),
    Case("fsdp full_shard", settings=(("distributed.strategy", "fsdp"),)),
    Case(
        "ddp, PowerSGD",
        settings=(
            ("distributed.strategy", "ddp"),
            ("distributed.ddp.compression.kind", "powersgd"),
            ("distributed.ddp.compression.start_step", 2),
        ),
    ),
    Case("pipeline GPipe", 4, 64, (_PIPELINE, ("distributed.pipeline.schedule", "GPipe"))),
    Case("pipeline 1F1B", 4, 64, (_PIPELINE, ("distributed.pipeline.schedule", "1F1B"))),
    Case(
        "pipeline Interleaved1F1B",
        4,
        64,
        (
            _PIPELINE,
            ("distributed.pipeline.schedule", "Interleaved1F1B"),
            ("distributed.pipeline.stages_per_rank", 2),
        ),
    ),
]


def measure(cases: list[Case], steps: int = 8) -> list[float]:
    """On every rank: seconds of a step of each case, the fastest after the third: others use these
    cores.
    """
    found = []
    for case in cases:
        torch.manual_seed(0)
        model = nn.Sequential(*[Sleepy() for _ in range(BLOCKS)])
        trainer = Trainer(model, config=case.config(), loss_fn=nn.MSELoss(reduction="sum"))
        times = []
        since = time.perf_counter()
        for record in trainer.steps(Data()):
            float(record.loss)
            times.append(time.perf_counter() - since)
            since = time.perf_counter()
            if record.step == steps:
                break
        found.append(min(times[3:]))
    return found


def predict(case: Case, ranks: int, megabits: float) -> StepTime:
    """Of hosts with one rank each."""
    config = case.config()
    gpu = Gpu("sleeps", 1, 1, 1, 1, "", "none")
    link = Link("shaped", megabits / 8e3, LATENCY, "tc")
    # what TCP's headers leave
    cluster = GpuCluster(gpu, ranks, 1, link, link, Efficiency(links=0.95))
    layout = resolve(config.distributed, ranks, 1)
    block = 4.0 * WIDTH * WIDTH
    if layout.strategy == "pipeline":
        per_rank = config.distributed.pipeline.stages_per_rank
        each = BLOCKS / (ranks * per_rank)
        sent = 4.0 * WIDTH * case.samples
        stages = [
            StageTime(each * FORWARD, each * BACKWARD, sent, each * block)
            for _ in range(ranks * per_rank)
        ]
        return pipeline_step(stages, config.step, layout, cluster, case.micro_batches)
    low_rank = 4.0 * BLOCKS * 2 * WIDTH  # which only PowerSGD's cases send
    pieces = Pieces(
        BLOCKS, block, 0.0, BLOCKS * FORWARD, BLOCKS * BACKWARD, low_rank_bytes=low_rank
    )
    return strategy_named(layout.strategy).step_time(
        pieces, config.step, layout, cluster, case.micro_batches
    )
