"""Packages of others with ours, for real; each is skipped where it is missing: pip install
'lockstep-train[interop]'.

What they leave behind, file by file, is tested without them in tests/checkpoint/test_importing.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Trainer, checkpoint
from lockstep.errors import UsageError
from tests.ranks import run_ranks

pytestmark = pytest.mark.full


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def data(samples: int = 48) -> torch.utils.data.TensorDataset:
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))


def train(optimizer: Any, strategy: str = "auto", *, steps: int = 12) -> list[float]:
    torch.manual_seed(0)
    model = Classifier()
    trainer = Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        strategy=strategy,
        batch_size=6,
        global_batch_size=24,
        max_steps=steps,
        lr_schedule="constant",
        min_num_params=1,
    )
    return [float(record.loss) for record in trainer.steps(data())]


# ---- on two ranks ----


def lion(strategy: str) -> list[float]:
    lion_pytorch = pytest.importorskip("lion_pytorch")
    from lockstep.optim import register_elementwise

    register_elementwise(lion_pytorch.Lion)
    return train(lambda parameters: lion_pytorch.Lion(parameters, lr=3e-3), strategy)


def accuracy_by_torchmetrics() -> float:
    """Each rank shows the metric its share of the samples; torchmetrics joins the ranks itself."""
    from torchmetrics.classification import MulticlassAccuracy

    import lockstep

    torch.manual_seed(0)
    model = Classifier()
    metric = MulticlassAccuracy(num_classes=3, average="micro")
    x, y = data().tensors
    rank = lockstep.rank()
    ranks = lockstep.world_size()
    with torch.no_grad():
        metric.update(model(x[rank::ranks]), y[rank::ranks])
    return float(metric.compute())


def lora(folder: str, strategy: str) -> tuple[list[float], int]:
    """Adapters of PEFT on a small GPT-2, of which nothing else trains; saved, and taken
    up again.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    wrapped = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(r=4, target_modules=["c_attn"])
    )
    before = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    ids = torch.arange(16).repeat(24, 1)
    samples = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(
        wrapped,
        strategy=strategy,
        batch_size=2,
        global_batch_size=8,
        max_steps=4,
        learning_rate=0.05,
        lr_schedule="constant",
    )
    losses = [
        float(r.loss) for r in trainer.steps(torch.utils.data.DataLoader(samples, batch_size=2))
    ]  # type: ignore[arg-type]
    whole = checkpoint.weights(trainer.save_checkpoint(Path(folder)))
    moved = {name for name, tensor in before.items() if not torch.equal(whole[name], tensor)}
    assert moved
    assert all("lora_" in name for name in moved)
    trainer.load_checkpoint(Path(folder))
    return losses, len(moved)


def on_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lion ddp": lion("ddp"),
        "lion fsdp": lion("fsdp"),
        "accuracy": accuracy_by_torchmetrics(),
    }
    for strategy in ("ddp", "fsdp"):
        found[f"lora {strategy}"] = lora(f"{folder}/{strategy}", strategy)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    for package in ("lion_pytorch", "torchmetrics", "peft", "transformers"):
        pytest.importorskip(package)
    first, second = run_ranks(on_ranks, 2, str(tmp_path_factory.mktemp("interop")))
    assert first == second
    found: dict[str, Any] = first
    return found


def test_an_optimizer_of_a_package(ranks: dict[str, Any]) -> None:
    alone = lion("auto")
    assert ranks["lion ddp"] == pytest.approx(alone, rel=1e-5)
    assert ranks["lion fsdp"] == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < alone[0]


def test_torchmetrics_joins_the_ranks(ranks: dict[str, Any]) -> None:
    assert ranks["accuracy"] == pytest.approx(accuracy_by_torchmetrics())


def test_adapters_of_peft(ranks: dict[str, Any], tmp_path: Path) -> None:
    losses, moved = lora(str(tmp_path), "auto")
    assert losses[-1] < losses[0]
    assert moved == 4
    for strategy in ("ddp", "fsdp"):
        assert ranks[f"lora {strategy}"] == (pytest.approx(losses, rel=1e-5), moved)


# ---- in one process ----


def test_an_eight_bit_optimizer() -> None:
    """Where the package has kernels for this device."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def make(parameters: Any) -> Any:
        return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-2, min_8bit_size=1)

    probe = nn.Linear(64, 64)
    probe(torch.ones(1, 64)).sum().backward()
    try:
        make(probe.parameters()).step()
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        pytest.skip(f"NOT TESTED: bitsandbytes has no 8-bit optimizer for this device: {error}")
    losses = train(make)
    assert losses[-1] < losses[0]


def test_a_checkpoint_of_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = Classifier()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    prepared(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    assert_taken_up(model, checkpoint.import_weights(tmp_path / "state", tmp_path / "imported")[0])


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier()
            self.save_hyperparameters({"width": 64})

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    trainer = lightning.Trainer(
        max_steps=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=8))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(UsageError, match="no name in"):
        checkpoint.import_weights(tmp_path / "last.ckpt", tmp_path / "none", prefix="model.")
    imported = checkpoint.import_weights(
        tmp_path / "last.ckpt", tmp_path / "imported", prefix="net."
    )[0]
    assert_taken_up(module.net, imported)


def assert_taken_up(trained: nn.Module, imported: Path) -> None:
    """By a trainer, which then trains."""
    torch.manual_seed(7)
    mine = Classifier()
    trainer = Trainer(mine, loss_fn=nn.CrossEntropyLoss(), batch_size=6, max_steps=2)
    assert trainer.load_checkpoint(imported)[0] == 0
    for name, tensor in trained.state_dict().items():
        assert torch.equal(mine.state_dict()[name], tensor), name
    assert len(list(trainer.steps(data()))) == 2
