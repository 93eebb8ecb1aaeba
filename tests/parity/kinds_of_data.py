"""Runs of Hugging Face models on data sets that ship; functions run on each rank of a test."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config import config_from
from lockstep.data import build_data
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer, build
from tests.data.chats import write_tokenizer
from tests.data.test_masked import MASK, TEXT
from tests.models.test_hf_auto import _BOTH_WAYS, _IMAGE, _TEXT
from tests.parity.same_bits import digest

STEPS = 3
VOCAB = 264


def write(folder: Path) -> None:
    """Write a tokenizer, a text, pairs of texts, and pictures."""
    from PIL import Image

    write_tokenizer(folder)
    (folder / "text.txt").write_text(TEXT)
    rows = [{"text": f"twice {n}", "target": str(2 * n)} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draws = np.random.default_rng(0)
    for name, least in (("dark", 0), ("light", 128)):
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(16):
            pixels = draws.integers(least, least + 128, (8, 8, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / name / f"{number:02}.png")


def settings(folder: str, kind: str) -> dict[str, Any]:
    """The model and the data of a kind."""
    named: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
        "masked": (
            "hf:bert",
            "AutoModelForMaskedLM",
            {**_TEXT, "vocab_size": VOCAB, "max_position_embeddings": 64},
            {"path": f"{folder}/text.txt", "tokenizer": folder, "block_size": 64}
            | {"mask_token": MASK},
        ),
        "seq2seq": (
            "hf:t5",
            "AutoModelForSeq2SeqLM",
            {k: v for k, v in _BOTH_WAYS.items() if k != "decoder_start_token_id"}
            | {"vocab_size": VOCAB},
            {"path": f"{folder}/pairs.jsonl", "tokenizer": folder, "validation_fraction": 0.1},
        ),
        "images": (
            "hf:vit",
            "AutoModelForImageClassification",
            {key: value for key, value in _IMAGE.items() if key != "image_size"},
            {"path": f"{folder}/pictures", "image_size": 8, "validation_fraction": 0.25},
        ),
    }
    name, auto, sizes, args = named[kind]
    return {
        "model": {"name": name, "auto": auto, "args": sizes},
        "data.name": kind,
        "data.args": args,
    }


def run(folder: str, kind: str, topology: str, workers: int = 0) -> tuple[list[float], float, str]:
    """Losses, the loss of the validation data, and the digest of a run."""
    values, _ = parse_topology(topology)
    config = config_from(
        {
            **settings(folder, kind),
            "data.num_workers": workers,
            "training.max_steps": STEPS,
            "training.batch_size": 4,
            "training.global_batch_size": 16,
            "training.learning_rate": 1e-2,
            "precision.mode": "fp32",
            "distributed.reproducible": True,
            **{f"distributed.{key}": value for key, value in values.items()},
        }
    )
    data = build_data(config.data)
    trainer = Trainer(build(config, data), config=config)
    losses = [float(record.loss) for record in trainer.steps(data.train, epochs=STEPS)]
    return losses, float(trainer.evaluate(data.validation)), digest(trainer)


def many(folder: str, kinds: list[str], topology: str, workers: int = 0) -> list[Any]:
    """`run` of each kind."""
    return [run(folder, kind, topology, workers) for kind in kinds]
