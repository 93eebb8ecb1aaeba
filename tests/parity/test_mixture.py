"""Mixtures of experts: one process's losses, and its bits where they count, on every composition of axes."""

from typing import Any

from tests.parity.test_tensor import check_both

# name → (settings, model arguments)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": ({}, {"n_layer": 2, "vocab_size": 64}),
    "sigmoid, over the step": (
        {"training.global_batch_size": 22, "training.gradient_checkpointing": "full"},
        {"n_layer": 2, "vocab_size": 64, "router": "sigmoid", "balance": "step", "top_k": 3, "tie_embeddings": True},
    ),
    "one expert a token": (
        {"training.gradient_checkpointing": "selective"},
        {"n_layer": 2, "vocab_size": 64, "top_k": 1, "n_shared": 0, "bias_rate": 0.0},
    ),
    "bf16": ({"precision.mode": "bf16"}, {"n_layer": 2, "vocab_size": 64}),
}


def cases_of(topologies: dict[str, tuple[str, ...]], steps: int = 5) -> list[tuple[Any, ...]]:
    return [
        (topology, "mixture", CASES[name][0], steps, CASES[name][1])
        for topology, names in topologies.items()
        for name in names
    ]


def test_the_same_training() -> None:
    check_both(4, cases_of({
        "ddp:4": ("softmax", "sigmoid, over the step"),
        "fsdp:4": ("sigmoid, over the step", "one expert a token", "bf16"),
        "pipeline:2*ddp:2": ("softmax",),
        "pipeline:2*fsdp:2": ("sigmoid, over the step",),
        "fsdp:2*tensor:2": ("softmax", "sigmoid, over the step"),
    }))  # fmt: skip
