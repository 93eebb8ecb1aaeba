"""Runs on pairs of answers; functions here run on every rank of a test."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from lockstep.config import config_from
from lockstep.data import build_data
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer, build
from tests.data.chats import write_tokenizer
from tests.models.decoders import decoder
from tests.parity.same_bits import digest

BETA = 0.5
RATE = 0.05
STEPS = 3
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
ROWS = [
    {"prompt": f"{n}?", "chosen": str(n + 1), "rejected": "no " * (n % 3 + 1)} for n in range(12)
]


def write_model(folder: Path) -> None:
    """Write a tiny chat model, as transformers does, and pairs of answers."""
    write_tokenizer(folder)
    torch.manual_seed(3)
    sizes = {"vocab_size": 264, "attention_dropout": 0.0, "max_position_embeddings": 96}
    decoder("llama", **sizes).save_pretrained(folder)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def run(folder: str, topology: str, adapters: bool) -> tuple[list[float], str]:
    """Losses and the digest of a run, each step of which has all pairs."""
    values, _ = parse_topology(topology)
    settings = {
        "model.name": f"hf:{folder}",
        "model.lora": LORA if adapters else None,
        "data.name": "preferences",
        "data.args": {
            "sources": [f"{folder}/pairs.jsonl"],
            "tokenizer": folder,
            "sequence_length": 64,
        },
        "data.shuffle": False,
        "loss_fn": {"name": "dpo", "args": {"beta": BETA}},
        "training.optimizer": "adamw",
        "training.learning_rate": RATE,
        "training.weight_decay": 0.0,
        "training.batch_size": 1,
        "precision.mode": "fp32",
        "distributed.reproducible": True,
        **{f"distributed.{key}": value for key, value in values.items()},
    }
    data = build_data(config_from(settings).data)
    whole = {"training.global_batch_size": len(data.train), "training.max_steps": STEPS}
    config = config_from({**settings, **whole})
    trainer = Trainer(build(config, data), config=config)
    losses = [float(record.loss) for record in trainer.steps(data.train, epochs=STEPS)]
    return losses, digest(trainer)


def many(cases: Sequence[tuple[str, str, bool]]) -> list[tuple[list[float], str]]:
    """`run` of each case."""
    return [run(*case) for case in cases]


def by_hand(folder: str, adapters: bool) -> list[float]:
    """Losses of the same steps in plain PyTorch, as TRL's DPOTrainer computes them.

    Each answer is a text of its own; the reference is a model that was loaded for itself.
    """
    import peft
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = load(folder).eval()
    model: Any = load(folder).train()
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
        first = {
            f"base_model.model.{name}": parameter
            for name, parameter in _own(folder).named_parameters()
            if parameter.requires_grad
        }
        assert not model.load_state_dict(first, strict=False).unexpected_keys

    def logps(of: Any, prompt: str, answer: str) -> torch.Tensor:
        asked = [{"role": "user", "content": prompt}]
        said = [*asked, {"role": "assistant", "content": answer}]
        render = tokenizer.apply_chat_template
        begin = len(tokenizer.encode(render(asked, tokenize=False, add_generation_prompt=True)))
        ids = torch.tensor([tokenizer.encode(render(said, tokenize=False).rstrip())])
        logits = of(input_ids=ids).logits[:, :-1]
        per_token = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2)
        return per_token[:, begin - 1 :].sum()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        of_pairs = []
        for row in ROWS:
            with torch.no_grad():
                ref = [logps(reference, row["prompt"], row[key]) for key in ("chosen", "rejected")]
            ours = [logps(model, row["prompt"], row[key]) for key in ("chosen", "rejected")]
            logratios = (ours[0] - ours[1]) - (ref[0] - ref[1])
            of_pairs.append(-F.logsigmoid(BETA * logratios))
        loss = torch.stack(of_pairs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _own(folder: str) -> torch.nn.Module:
    """The model of a run before its first step."""
    settings = {"model.name": f"hf:{folder}", "model.lora": LORA}
    from lockstep.data import Data

    return build(config_from(settings), Data(None))
