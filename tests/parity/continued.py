"""Adapters that were saved earlier, and heads beside adapters: functions here run on every rank of
a test.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from lockstep.config import config_from
from lockstep.data import Data
from lockstep.trainer import Trainer, build
from tests.models.test_hf_auto import Samples, library
from tests.parity.adapted import LORA, Labelled, settings_of, write_base
from tests.parity.same_bits import digest
from tests.parity.toy import Tokens

STEPS = 3
BATCH = 4
HEADS = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification")
_OF_HEADS = {"r": 4, "target_modules": ["query", "value"]}
Outcome = tuple[list[float], str]  # losses and the digest


def write_all(folder: Path) -> None:
    """Write bases and an adapter whose values are all drawn, as their libraries do."""
    import peft
    import transformers

    write_base(folder / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    torch.manual_seed(2)
    settings: dict[str, Any] = {**LORA, "task_type": "CAUSAL_LM", "init_lora_weights": False}
    peft.get_peft_model(theirs, peft.LoraConfig(**settings)).save_pretrained(folder / "adapter")
    headless, _ = library("AutoModelForMaskedLM")
    headless.save_pretrained(folder / "headless")


def of_configs(folder: str, topologies: Sequence[str]) -> dict[tuple[str, str], Outcome]:
    """Return what became of each kind of run by a config."""
    found: dict[tuple[str, str], Outcome] = {}
    for topology in topologies:
        adapter = {"model.lora": None, "model.adapter": f"{folder}/adapter"}
        found["folder", topology] = _trained(f"hf:{folder}/base", topology, adapter, Tokens())
        for auto in HEADS:
            _, sample = library(auto)
            head = {"model.lora": _OF_HEADS, "model.auto": auto, "model.args.num_labels": 3}
            data = Samples(sample)
            found[auto, topology] = _trained(f"hf:{folder}/headless", topology, head, data)
    return found


def _trained(name: str, topology: str, changes: dict[str, Any], data: Any) -> Outcome:
    sizes = {"training.batch_size": 1, "training.global_batch_size": BATCH}
    config = config_from(settings_of(name, topology, {**changes, **sizes}))
    trainer = Trainer(build(config, Data(None)), config=config)
    losses = [float(record.loss) for record in islice(trainer.steps(data, epochs=STEPS), STEPS)]
    return losses, digest(trainer)


def of_peft(folder: str, strategies: Sequence[str]) -> dict[str, list[float]]:
    """Return losses of adapters that peft itself has loaded."""
    return {strategy: _handed_over(folder, strategy) for strategy in strategies}


def loaded(folder: str) -> Any:
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    return peft.PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True)


def _handed_over(folder: str, strategy: str) -> list[float]:
    model = loaded(folder)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    sizes: dict[str, Any] = {"batch_size": 1, "global_batch_size": BATCH, "max_steps": STEPS}
    trainer = Trainer(model, optimizer, strategy=strategy, shuffle=False, **sizes)
    return [float(record.loss) for record in trainer.steps(Labelled())]


def by_hand(folder: str) -> list[float]:
    """Return the losses of the same steps in plain PyTorch and peft, a whole batch at once."""
    model = loaded(folder).train()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    data = Labelled()
    losses = []
    for step in range(STEPS):
        samples = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
        ids = torch.stack([sample["input_ids"] for sample in samples])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
