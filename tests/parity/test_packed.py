"""Packed documents train as documents alone do; a packed, mixed, filtered run has one digest."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import DataConfig, config_from
from lockstep.data import build_data
from lockstep.data.prepare import prepare
from lockstep.models.batch_parts import DOCUMENTS
from lockstep.models.protocol import objective_of, require_segments
from lockstep.strategy import parse_topology
from lockstep.trainer import Trainer
from tests.data.chats import write_rows, write_tokenizer
from tests.parity.same_bits import digest, go_on, hand_over, trainer_for
from tests.parity.toy import language_model, unchecked
from tests.ranks import run_ranks
from tests.sampled import sampled

pytest.importorskip("transformers")
from lockstep.models.hf_causal import _KEEPS_DOCUMENTS_APART

LENGTH = 24
VOCABULARY = 264  # bytes, and the special tokens of conversations
WITHOUT_DROPOUT = {"dropout": 0.0}
OWN = ("transformer", "mixture", "bdh")
PRECISIONS = {torch.float32: 1e-5, torch.float64: 1e-10}
IGNORED = -100


def write_texts(folder: Path) -> None:
    """Two sources of documents: some of more than a sequence, some short."""
    for name, texts in {
        "long": [
            "".join(chr(1 + (n * k + n) % 60) for k in range(2 + n * 7 % 40)) for n in range(60)
        ],
        "short": [chr(1 + n) * (n % 6 + 1) for n in range(50)],
    }.items():
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(rows)
    prepare(folder / "long.jsonl", folder / "long")
    write_conversations(folder)


# in place of a packing
CONVERSATIONS = "conversations"
STREAM = "stream"  # whose lengths nobody knows


def write_conversations(folder: Path) -> None:
    """Conversations of one answer and of two, some of which are longer than a sequence."""
    write_tokenizer(folder / "model")
    talks = [
        [
            {"role": role, "content": chr(97 + (n + k) % 26) * (1 + (n * 5 + k * 3) % 4)}
            for k in range(2 + 2 * (n % 5 == 0))
            for role in [("user", "assistant")[k % 2]]
        ]
        for n in range(70)
    ]
    write_rows(folder / "chat.jsonl", *talks)


def mixture(folder: Path | str, packing: str = "first_fit") -> Any:
    if packing == CONVERSATIONS:
        source = {"path": str(Path(folder, "chat.jsonl")), "messages_field": "messages"}
        tokenizer = str(Path(folder, "model"))
        args = {"sources": [source], "sequence_length": LENGTH, "tokenizer": tokenizer}
        return build_data(DataConfig(name="documents", args=args)).train
    if packing == STREAM:
        sources = [
            {"path": str(Path(folder, f"{name}.jsonl")), "weight": weight}
            for name, weight in (("long", 0.7), ("short", 0.3))
        ]
        args = {"sources": sources, "sequence_length": LENGTH, "window": 5}
        return build_data(DataConfig(name="stream", args=args)).train
    sources = [
        {"path": str(Path(folder, "long")), "weight": 0.7},
        {"path": str(Path(folder, "short.jsonl")), "weight": 0.3, "min_tokens": 3},
    ]
    args = {"sources": sources, "sequence_length": LENGTH, "packing": packing}
    return build_data(DataConfig(name="documents", args=args)).train


def several(data: Any, count: int) -> dict[str, Tensor]:
    """A batch of the first `count` sequences with three documents and more."""
    found = [n for n in range(len(data)) if int(data[n][DOCUMENTS].max()) >= 2]
    assert len(found) >= count
    batch: dict[str, Tensor] = data.collated(found[:count])
    return batch


def alone(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each document of a batch as a batch of its own."""
    found = []
    for row in range(len(batch["input_ids"])):
        ids = batch[DOCUMENTS][row]
        for number in range(int(ids.max()) + 1):
            of_document = {key: value[row][ids == number][None] for key, value in batch.items()}
            del of_document[DOCUMENTS]
            if (of_document["targets"] != IGNORED).any():
                found.append(of_document)
    return found


def gradient(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """The gradient of the cross entropy summed over all targets, in the model's own precision."""
    model.zero_grad()
    inputs = objective_of(model).inputs
    for batch in batches:
        args, keywords = inputs(batch)
        outputs = model(*args, **keywords)
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
        F.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        ).backward()
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(parts).double()


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def made(name: str, dtype: torch.dtype) -> nn.Module:
    """A model whose weights are not a symmetric start, without dropout."""
    if name.startswith("hf:"):
        from lockstep.models.hf_causal import meet_protocol
        from tests.models.config_changes import built

        model = meet_protocol(built(name.removeprefix("hf:")))
    else:
        model = language_model(name, vocab_size=VOCABULARY, **WITHOUT_DROPOUT)
        model = model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.init_weights()  # type: ignore[operator]
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.2)
    return model.eval().to(dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made_folder = tmp_path_factory.mktemp("texts")
    write_texts(made_folder)
    return made_folder


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", ["transformer", "hf:llama"])
def test_packed_gradients_are_those_of_documents_alone(
    name: str, dtype: torch.dtype, folder: Path
) -> None:
    check_gradients(name, dtype, folder, PRECISIONS[dtype])


def test_packed_gradients_of_answers_are_those_of_conversations_alone(folder: Path) -> None:
    data = mixture(folder, CONVERSATIONS)
    answers = sum(int((data[n]["targets"] != IGNORED).sum()) for n in range(len(data)))
    assert 0.2 < answers / (len(data) * LENGTH) < 0.6
    check_gradients("transformer", torch.float64, folder, 1e-10, CONVERSATIONS)


@pytest.mark.parametrize("name", ["mixture", "bdh"])
def test_packed_gradients_of_models_that_compute_in_fp32(name: str, folder: Path) -> None:
    check_gradients(name, torch.float32, folder, PRECISIONS[torch.float32])
    if name == "mixture":  # whose router rounds its inputs to fp32
        check_gradients(name, torch.float64, folder, 1e-7)


# Norms of the library that multiply in fp32, and experts whose kernel takes no float64.
ROUNDED = ("cohere", "gemma", "gemma2", "gemma3_text")
IN_FP32_ALONE = ("mixtral", "qwen3_moe")


@pytest.mark.full
@pytest.mark.parametrize("family", _KEEPS_DOCUMENTS_APART)
def test_packed_gradients_of_each_family_are_those_of_documents_alone(
    family: str, folder: Path
) -> None:
    for dtype, tolerance in PRECISIONS.items():
        if dtype == torch.float32 or family not in IN_FP32_ALONE:
            check_gradients(
                f"hf:{family}", dtype, folder, max(tolerance, 1e-6 * (family in ROUNDED))
            )


def check_gradients(
    name: str, dtype: torch.dtype, folder: Path, tolerance: float, packing: str = "first_fit"
) -> None:
    model = made(name, dtype)
    batch = several(mixture(folder, packing), 3)
    packed = gradient(model, [batch])
    expected = gradient(model, alone(batch))
    assert difference(packed, expected) < tolerance
    without = {key: value for key, value in batch.items() if key != DOCUMENTS}
    assert difference(gradient(model, [without]), expected) > 1e-3  # it tells


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_stages_of_the_librarys_models_hand_documents_on(family: str, folder: Path) -> None:
    """Learned positions, and windows beside complete attention."""
    model = made(f"hf:{family}", torch.float32)
    batch = several(mixture(folder), 2)
    args, _ = objective_of(model).inputs(batch)
    values = args
    for _, segment in require_segments(model):
        further = {"inputs": (args, {})} if getattr(segment, "takes_inputs", False) else {}
        outputs = segment(*values, **further)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    assert torch.equal(logits, model(*args))
    assert not torch.allclose(logits, model(args[0]), atol=1e-3)


class Alone(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The documents of some sequences, a sample each, padded to a sequence."""

    deterministic = True

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.documents = alone(batch)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = {}
        for key, value in self.documents[index].items():
            padding = IGNORED if key == "targets" else 0
            found[key] = F.pad(value[0], (0, LENGTH - value.shape[1]), value=padding)
        return found


RATE = 1e3  # so that what an update leaves of the weights is the gradient


def updated(topology: str, model: str, folder: str, *, packed: bool) -> dict[str, Tensor]:
    """The weights after one step on eight sequences, packed or as documents alone."""
    data = mixture(folder)
    batch = several(data, 8)
    parts = [{key: value[n] for key, value in batch.items()} for n in range(8)]
    samples: Any = parts if packed else Alone(batch)
    loader = torch.utils.data.DataLoader(samples, batch_size=1)
    size = len(samples)
    settings = {
        "training.batch_size": 1,
        "training.global_batch_size": size,
        "training.optimizer": "sgd",
        "training.learning_rate": RATE,
        "training.weight_decay": 0.0,
        "training.max_steps": 1,
        "precision.mode": "fp32",
        **{f"distributed.{key}": value for key, value in parse_topology(topology)[0].items()},
    }
    sizes = {"block_size": LENGTH, "vocab_size": 64}
    args: dict[str, Any] = {} if model.startswith("hf:") else dict(WITHOUT_DROPOUT)
    if model == "hf:gpt2":
        args |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    if model == "mixture":
        # The router's terms are means over the positions of a micro-batch, padding among them.
        args |= {"balance": "none", "z_weight": 0.0}
    trainer = unchecked(
        Trainer(language_model(model, **sizes, **args), config=config_from(settings))
    )
    list(trainer.steps(loader))
    found: dict[str, Tensor] = {}
    for name, parameter in trainer.placed.parameters.items():
        full = getattr(parameter, "full_tensor", None)
        found[name] = (full() if full is not None else parameter).detach().double()
    return found


def many_updated(cases: list[tuple[str, str, str]]) -> list[dict[str, Tensor]]:
    return [updated(*case, packed=True) for case in cases]


def check_updates(cases: list[tuple[str, str]], ranks: int, folder: Path) -> None:
    """Compare packed updates on ranks with those of documents alone on one process."""
    results = run_ranks(many_updated, ranks, [(*case, str(folder)) for case in cases])
    for number, (topology, model) in enumerate(cases):
        expected = updated("single", model, str(folder), packed=False)
        found: dict[str, Tensor] = {}
        for result in results:  # a pipeline's ranks have a part each
            found |= result[number]
        assert found.keys() == expected.keys()
        gap = torch.cat([(found[name] - expected[name]).flatten() for name in expected])
        size = torch.cat([expected[name].flatten() for name in expected]).norm()
        assert float(gap.norm() / size) < PRECISIONS[torch.float32], (topology, model)


PACKED_ON_TWO = [
    ("fsdp:2", "transformer"),
    ("ddp:2", "transformer"),
    ("tensor:2", "transformer"),
    ("context:2", "transformer"),
    ("pipeline:2", "transformer"),
    ("tensor:2", "hf:llama"),
    ("pipeline:2", "hf:llama"),
]


@sampled("cases", PACKED_ON_TWO, 6)
def test_packed_steps_are_those_of_documents_alone_on_any_strategy(
    cases: list[tuple[str, str]], folder: Path
) -> None:
    check_updates(cases, 2, folder)


@pytest.mark.full
@pytest.mark.parametrize("model", [*OWN, "hf:llama", "hf:gpt2", "hf:qwen3"])
def test_packed_steps_of_each_model_are_those_of_documents_alone(model: str, folder: Path) -> None:
    topologies = ["ddp:2", "fsdp:2", "tensor:2", "pipeline:2"]
    topologies += [] if model.startswith("hf:") else ["context:2"]
    check_updates([(topology, model) for topology in topologies], 2, folder)


# ---- one digest ----


def leg(folder: str, topology: str, workers: int, steps: int, packing: str) -> str:
    """Go on with the run for some steps, save it, and return the digest."""
    settings = {
        "data.num_workers": workers,
        "training.max_steps": 8,
        "training.global_batch_size": 12,
    }
    trainer = trainer_for(
        topology, "transformer", settings, block_size=LENGTH, vocab_size=VOCABULARY
    )
    go_on(trainer, folder)
    for _ in islice(trainer.steps(mixture(folder, packing)), steps):
        pass
    hand_over(trainer, folder)
    return digest(trainer)


def through(legs: list[tuple[str, int, int]], folder: Path, packing: str) -> str:
    """The digest of a run that goes on elsewhere: (topology, workers, steps) of each leg."""
    write_texts(folder)
    found = ""
    for topology, workers, steps in legs:
        arguments = (str(folder), topology, workers, steps, packing)
        ranks = parse_topology(topology)[1]
        found = leg(*arguments) if ranks == 1 else run_ranks(leg, ranks, *arguments)[0]
    return found


def check_legs(legs: list[tuple[str, int, int]], folder: Path, packing: str) -> None:
    (folder / "there").mkdir()
    (folder / "whole").mkdir()
    found = through(legs, folder / "there", packing)
    steps = sum(of_leg for _, _, of_leg in legs)
    assert found == through([("single", 0, steps)], folder / "whole", packing)


def test_a_packed_run_resumed_twice_on_other_ranks_has_one_digest(tmp_path: Path) -> None:
    check_legs([("ddp:2", 1, 2), ("single", 2, 1), ("fsdp:3", 0, 1)], tmp_path, "first_fit")


@pytest.mark.full
@pytest.mark.parametrize("packing", ["first_fit", "in_order", CONVERSATIONS, STREAM])
@pytest.mark.parametrize(
    "legs",
    [
        [("ddp:4", 0, 8)],
        [("fsdp:2", 2, 8)],
        [("pipeline:2", 1, 1), ("ddp:3", 2, 6), ("pipeline:2", 0, 1)],
        [("single", 1, 4), ("hybrid:2x2", 1, 2), ("tensor:2", 2, 2)],
    ],
    ids=str,
)
def test_a_packed_run_has_one_digest_anywhere(
    legs: list[tuple[str, int, int]], packing: str, tmp_path: Path
) -> None:
    check_legs(legs, tmp_path, packing)
