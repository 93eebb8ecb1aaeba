"""One training step, written for each contestant as its own documentation writes it.

    python -m benchmarks.contestants NAME SIZE

`benchmarks.overhead` starts it, as one rank of a launch.

All train the same model on the same data with the same optimizer (AdamW, fused), clip the
gradient's norm at 1, and write loss and norm on every tenth step; none evaluates or saves. The
model ends in its loss, the form that all of them take. Each runs for ever: the gate in front of the
model's forward pass ends it.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks import own_layers
from benchmarks.gate import Gate

EVERY = 10
CLIP = 1.0
RATE = 1e-3
SAMPLES = 100_000
STEPS = 1_000_000


class Size(NamedTuple):
    """Of a model and its batches; `block`: steps between two words with the conductor, a multiple
    of `EVERY`; `rounds`: in a launch of one rank. A machine's speed wavers by a tenth from second
    to second: short steps take many rounds.
    """

    width: int
    depth: int
    batch: int
    block: int
    rounds: int = 8


SIZES = {
    "1ms": Size(64, 4, 8, 200, 40),
    "5ms": Size(256, 8, 32, 40, 40),
    "50ms": Size(768, 10, 96, 10, 8),
}


class Net(nn.Module):
    """x [B, width], labels [B] → {"loss": mean cross entropy}."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(size.width, size.width), nn.GELU()) for _ in range(size.depth)
        ]
        self.body = nn.Sequential(*layers, nn.Linear(size.width, 16))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.body(x), labels)}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of one table, a view each."""

    deterministic = True

    def __init__(self, width: int) -> None:
        self.x = torch.randn(1000, width, generator=torch.Generator().manual_seed(1))
        self.labels = torch.arange(1000) % 16

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index % 1000], "labels": self.labels[index % 1000]}


class Task(NamedTuple):
    """What every contestant is given."""

    model: Net
    data: Rows
    size: Size
    ranks: int
    folder: Path

    def loader(self, sampler: Any = None) -> "DataLoader[dict[str, Tensor]]":
        return DataLoader(
            self.data, batch_size=self.size.batch, shuffle=sampler is None, sampler=sampler
        )

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)


class Log:
    """A line of JSON on every tenth step, as the loops write it that have no log of their own."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "log.jsonl").open("w")

    def __call__(self, step: int, loss: Tensor, norm: Any) -> None:
        if step % EVERY == 0:
            self._file.write(
                json.dumps({"step": step, "loss": loss.item(), "grad_norm": float(norm)}) + "\n"
            )
            self._file.flush()


def epochs(loader: Any, sampler: Any = None) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """(step, batch) for ever."""
    step = 0
    for epoch in range(STEPS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            step += 1
            yield step, batch


def hand_written(task: Task) -> None:
    """The loop of PyTorch's tutorials."""
    model: nn.Module = task.model
    sampler = None
    if task.ranks > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(task.data)
    optimizer = task.optimizer()
    log = Log(task.folder)
    for step, batch in epochs(task.loader(sampler), sampler):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        log(step, loss, norm)


def settings_of(size: Size) -> dict[str, Any]:
    """Return the config keys of a training here: a constant rate, clipping, no checkpoints."""
    return {
        "training.batch_size": size.batch,
        "training.max_steps": STEPS,
        "training.learning_rate": RATE,
        "training.lr_schedule": "constant",
        "training.warmup_steps": 0,
        "training.gradient_clip.value": CLIP,
        "precision.mode": "fp32",
        "checkpoint.save_strategy": "none",
        "monitor.sinks": ["jsonl"],
    }


def lockstep(task: Task) -> None:
    """`Trainer.train` with its defaults: records, phases, the check for bad numbers, the same step
    on any layout.
    """
    from lockstep.config import config_from
    from lockstep.trainer import Trainer

    config = config_from({**settings_of(task.size), "monitor.log_steps": EVERY})
    Trainer(task.model, task.optimizer(), config=config, output_dir=task.folder).train(task.data)


def fabric(task: Task) -> None:
    from lightning.fabric import Fabric

    runs = Fabric(
        accelerator="cpu", devices=task.ranks, strategy="ddp" if task.ranks > 1 else "auto"
    )
    runs.launch()
    model, optimizer = runs.setup(task.model, task.optimizer())
    loader = runs.setup_dataloaders(task.loader())
    log = Log(task.folder)
    for step, batch in epochs(loader):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        runs.backward(loss)
        norm = runs.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        log(step, loss, norm)


def accelerate(task: Task) -> None:
    from accelerate import Accelerator

    runs = Accelerator(cpu=True)
    model, optimizer, loader = runs.prepare(task.model, task.optimizer(), task.loader())
    log = Log(task.folder)
    for step, batch in epochs(loader):
        loss = model(**batch)["loss"]
        runs.backward(loss)
        norm = runs.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        log(step, loss, norm)


def transformers(task: Task) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(task.folder),
        per_device_train_batch_size=task.size.batch,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=CLIP,
        logging_steps=EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        ddp_backend="gloo" if task.ranks > 1 else None,
    )
    Trainer(task.model, arguments, train_dataset=task.data).train()


def lightning(task: Task) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer()

    Trainer(
        accelerator="cpu",
        devices=task.ranks,
        strategy="ddp" if task.ranks > 1 else "auto",
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        log_every_n_steps=EVERY,
        logger=CSVLogger(str(task.folder)),
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(Module(), task.loader())


def deepspeed(task: Task) -> None:
    import deepspeed

    if task.ranks == 1:  # it wants a process group even so
        dist.init_process_group(
            "gloo", init_method=f"file://{task.folder}/meeting", rank=0, world_size=1
        )
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": task.size.batch,
        "gradient_clipping": CLIP,
    }
    runs, _, _, _ = deepspeed.initialize(
        model=task.model, optimizer=task.optimizer(), config=config
    )
    sampler = DistributedSampler(task.data) if task.ranks > 1 else None
    log = Log(task.folder)
    for step, batch in epochs(task.loader(sampler), sampler):
        loss = runs(**batch)["loss"]
        runs.backward(loss)
        runs.step()
        log(step, loss, runs.get_global_grad_norm() or 0.0)


CONTESTANTS: dict[str, Callable[[Task], None]] = {
    "hand-written": hand_written,
    "lockstep": lockstep,
    "fabric": fabric,
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
    "deepspeed": deepspeed,
}


def main() -> None:
    name = sys.argv[1]
    if sys.argv[2] in own_layers.CASES:
        own_layers.run(name, own_layers.CASES[sys.argv[2]])
    size = SIZES[sys.argv[2]]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net(size)
    model.register_forward_pre_hook(Gate(size.block))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        CONTESTANTS[name](Task(model, Rows(size.width), size, ranks, Path(folder)))


if __name__ == "__main__":
    main()
