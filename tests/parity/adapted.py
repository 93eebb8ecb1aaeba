"""Adapters of peft in a config's model, on ranks: functions here run on every rank of a test."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.config import config_from
from lockstep.data import Data
from lockstep.errors import UsageError
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer, build
from tests.models.decoders import decoder
from tests.parity.same_bits import digest
from tests.parity.toy import Tokens
from tests.ranks import results_or_errors

STEPS = 4
BATCH = 8
RATE = 0.05
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
CHUNKS = {"distributed.context_blocks": 4}
WITHOUT_DROPOUT = {"attention_dropout": 0.0}


class Adapted(NamedTuple):
    """What became of a run.

    Attributes:
        states: parameters of this rank that the optimizer holds state of.
        trained: parameters of this rank that get adapters' gradients.
        refused: the message, where it was refused.
    """

    losses: list[float]
    digest: str
    states: list[str]
    trained: list[str]
    refused: str = ""


def write_base(folder: Path, family: str = "llama", **changes: Any) -> str:
    """Write a tiny model of a family as transformers does; its name in a config."""
    torch.manual_seed(3)
    decoder(family, **{**WITHOUT_DROPOUT, **changes}).save_pretrained(folder)
    return f"hf:{folder}"


def settings_of(name: str, topology: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    values, _ = parse_topology(topology)
    chunks = CHUNKS if "context" in topology else {}
    return {
        "model.name": name,
        "model.lora": LORA,
        "training.optimizer": "adamw",
        "training.learning_rate": RATE,
        "training.weight_decay": 0.0,
        "training.max_steps": STEPS,
        "training.batch_size": 2,
        "training.global_batch_size": BATCH,
        "precision.mode": "fp32",
        "data.shuffle": False,
        "distributed.reproducible": True,
        **{f"distributed.{key}": value for key, value in values.items()},
        **chunks,
        **changes,
    }


def trainer_of(name: str, topology: str, changes: Mapping[str, Any], **more: Any) -> Trainer:
    config = config_from(settings_of(name, topology, changes))
    return Trainer(build(config, Data(None)), config=config, **more)


def run(name: str, topology: str, changes: Mapping[str, Any], saved: str = "") -> Adapted:
    """Train, and write a checkpoint where `saved` names one."""
    try:
        trainer = trainer_of(name, topology, changes)
        losses = [float(record.loss) for record in islice(trainer.steps(Tokens()), STEPS)]
        if saved:
            trainer.save_checkpoint(saved)
    except UsageError as error:
        return Adapted([], "", [], [], str(error))
    parameters = trainer.placed.parameters
    states = [key for key, value in parameters.items() if trainer.optimizer.state[value]]
    trained = [key for key, value in parameters.items() if value.requires_grad]
    return Adapted(losses, digest(trainer), states, trained)


def own_adapters(folder: str) -> dict[str, Any]:
    """Return models with adapters that are made by peft itself, by kind."""
    import peft
    import transformers

    task = {"task_type": "CAUSAL_LM"}
    dora = peft.LoraConfig(**task, r=2, use_dora=True, target_modules=["q_proj"])
    ia3 = peft.IA3Config(
        **task, target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    kinds = {
        "dora": dora,
        "ia3": ia3,
        "prompt": peft.PromptTuningConfig(**task, num_virtual_tokens=4),
        "prefix": peft.PrefixTuningConfig(**task, num_virtual_tokens=4),
        "second of two": peft.LoraConfig(**task, r=2, target_modules=["q_proj"]),
    }
    models = {}
    for kind, config in kinds.items():
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(4)
        models[kind] = peft.get_peft_model(base, config)
    second = peft.LoraConfig(**task, r=4, target_modules=["v_proj"])
    models["second of two"].add_adapter("second", second)
    models["second of two"].set_adapter("second")
    return models


class Labelled(Tokens):
    """The same rows, as transformers' models take them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = super().__getitem__(index)["input_ids"]
        return {"input_ids": ids, "labels": ids.clone()}


def train_own_adapters(folder: str, strategies: Sequence[str]) -> dict[str, list[float] | str]:
    """Return losses, or why it was refused, by "KIND on STRATEGY"."""
    results: dict[str, list[float] | str] = {}
    for strategy in strategies:
        for kind, model in own_adapters(folder).items():
            model.train()
            trained = [p for p in model.parameters() if p.requires_grad]
            try:
                trainer = Trainer(
                    model,
                    torch.optim.SGD(trained, lr=1.0),
                    strategy=strategy,
                    batch_size=2,
                    global_batch_size=BATCH,
                    max_steps=3,
                )
                losses = [float(record.loss) for record in trainer.steps(Labelled())]
                results[f"{kind} on {strategy}"] = losses
            except UsageError as error:
                results[f"{kind} on {strategy}"] = str(error)
    return results


REDUCTIONS = {"ddp:2": "gloo:all_reduce", "fsdp:2": "gloo:all_to_all"}


def reduced(name: str, topologies: list[str]) -> dict[tuple[str, bool], tuple[int, int]]:
    """(topology, with adapters) → (elements in this rank's reductions of a step, and how many of
    the model's elements are trained).
    """
    found = {}
    for topology in topologies:
        for adapters in (True, False):
            changes: dict[str, Any] = {"distributed.reproducible": False}
            if not adapters:
                changes["model.lora"] = None
            trainer = trainer_of(name, topology, changes)
            steps = trainer.steps(Tokens())
            next(steps)
            next(steps)  # DDP cuts its buckets anew in the second
            with torch.profiler.profile(record_shapes=True) as profile:
                next(steps)
            shapes = [e.input_shapes[0] for e in profile.events() if e.name == REDUCTIONS[topology]]
            trained = (p for p in trainer.placed.root.parameters() if p.requires_grad)
            found[topology, adapters] = (
                sum(map(math.prod, shapes)),
                sum(p.numel() for p in trained),
            )
    return found


def many(cases: Sequence[tuple[Any, ...]]) -> list[Adapted | str]:
    """`run` of each case; an error that is not a refusal is a case's result."""
    return results_or_errors(run, cases)


def own_loop(folder: str) -> list[float]:
    """Losses of the same steps in plain PyTorch and peft, a whole batch at once."""
    import peft
    import transformers
    from torch.nn import functional as F

    torch.manual_seed(5)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    ours = build(config_from(settings_of(f"hf:{folder}", "single", {})), Data(None))
    first = {
        f"base_model.model.{name}": parameter
        for name, parameter in ours.named_parameters()
        if parameter.requires_grad
    }
    assert not model.load_state_dict(first, strict=False).unexpected_keys
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0
    )
    data = Tokens()
    losses = []
    for step in range(STEPS):
        samples = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
