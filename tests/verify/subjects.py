"""What the tests of `verify` train: sound models, and twelve that have a fault where there are
several ranks.

Each is built by name in every process. A fault is planted in the process that builds it, and taken
out at its end.
"""

import ast
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from inspect import getsource
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from benchmarks.silent_bugs.faults.models import Chain, net
from lockstep.machine.environment import rank_facts
from lockstep.parallel.axes import replicate
from lockstep.parallel.comm import compression
from lockstep.parallel.execution import activation
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.trainer import Trainer
from lockstep.verify import Subject
from tests.parity.toy import Tokens, language_model


def on_ranks() -> bool:
    return rank_facts().world_size > 1


def subject(model: nn.Module | None = None, data: Any = None, **rest: Any) -> Subject:
    return Subject(
        language_model("transformer", n_layer=2) if model is None else model,
        Tokens() if data is None else data,
        **rest,
    )


def with_patch(module: ModuleType, name: str, broken: Any, **rest: Any) -> Subject:
    """A sound subject in a process in which a function that the module uses is broken.

    Where the module no longer uses it, nothing would be planted.
    """
    used = {
        node.id for node in ast.walk(ast.parse(getsource(module))) if isinstance(node, ast.Name)
    }
    assert name in used, f"{module.__name__} does not use {name}"
    stack = ExitStack()
    if on_ranks():
        stack.enter_context(patch.object(module, name, broken))
    return subject(close=stack.close, **rest)


def sound() -> tuple[nn.Module, Any]:
    return language_model("transformer", n_layer=2), Tokens()


def without_a_loss() -> tuple[nn.Module, Any]:
    return nn.Linear(4, 1), TensorDataset(torch.ones(8, 4), torch.ones(8, 1))


def another_seed_on_a_rank() -> Subject:
    def prepare(trainer: Trainer) -> None:
        trainer.placed.random_state.seed += rank_facts().rank

    return subject(prepare=prepare)


def reduced_in_the_wrong_backward_pass() -> Subject:
    """In the first one of a step instead of the last."""

    class InTheFirst(AroundMicroBatch):
        def __init__(self, model: DistributedDataParallel) -> None:
            self._model = model
            self._first = True

        def before(self, passing: MicroBatchPass) -> None:
            self._model.require_backward_grad_sync = self._first
            self._first = passing.last

    return with_patch(replicate, "DDPSync", InTheFirst)


def mean_of_means() -> Subject:
    """Each micro-batch's mean counts as one, however many targets it has."""
    model = language_model("transformer", n_layer=2)
    summed: Callable[..., Tensor] = model.loss  # type: ignore[assignment]
    count: Callable[..., Tensor] = model.count  # type: ignore[assignment]
    if on_ranks():
        model.loss = lambda outputs, batch: summed(outputs, batch) / count(batch)  # type: ignore[assignment]
        model.count = lambda batch: 1  # type: ignore[assignment]
    return subject(model)


LEFT_OUT = "layers.1.mlp.down.weight"


def a_parameter_left_out_of_ddp() -> Subject:
    model = language_model("transformer", n_layer=2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [LEFT_OUT])
    return subject(model)


def a_broken_compression_hook() -> Subject:
    """It forgets that a mean is divided by the number of ranks."""
    sound_hook = compression.compress

    def broken(*args: Any, **kwargs: Any) -> Any:
        found = sound_hook(*args, **kwargs)
        hook = found.hook
        if hook is None:
            return found
        return replace(
            found,
            hook=lambda state, bucket: hook(state, bucket).then(lambda done: done.value() * 2.0),
        )

    return with_patch(replicate, "compress", broken)


class Drifting(nn.Module):
    """Remembers what it has seen, on each rank for itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> Any:
        self.seen.mul_(0.9).add_(0.1 * ids.float().mean())
        return self.model(ids)

    def inputs(self, batch: Any) -> Any:
        return self.model.inputs(batch)  # type: ignore[operator]

    def loss(self, outputs: Any, batch: Any) -> Any:
        return self.model.loss(outputs, batch)  # type: ignore[operator]

    def count(self, batch: Any) -> Any:
        return self.model.count(batch)  # type: ignore[operator]


def a_buffer_that_drifts() -> Subject:
    torch.manual_seed(0)
    from lockstep.models import get_model

    return subject(
        Drifting(get_model("transformer")(n_layer=2, n_embd=32, n_head=4, vocab_size=61))
    )


class Shuffled(Dataset[Any]):
    deterministic = True

    def __len__(self) -> int:
        return len(Tokens())

    def __getitem__(self, index: int) -> Any:
        return Tokens()[(5 * index + 3) % len(self) if on_ranks() else index]


def shuffled_data() -> Subject:
    return subject(data=Shuffled())


def segments_that_are_not_forward_in_training() -> Subject:
    """What placement compares, in evaluation mode, is the same."""

    class Scaled(Chain):
        def forward(self, ids: Tensor) -> Tensor:
            logits = super().forward(ids)
            return logits * 0.5 if self.training else logits

    return net(Scaled())


NOISY = "embed"


def an_operation_that_is_not_deterministic() -> Subject:
    model = language_model("transformer", n_layer=2)

    def noisy(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        seed = int.from_bytes(os.urandom(4), "little")
        return output * (
            1 + 0.5 * torch.rand(output.shape, generator=torch.Generator().manual_seed(seed))
        )

    model.get_submodule(NOISY).register_forward_hook(noisy)
    return subject(model)


def the_norm_of_the_local_shard() -> Subject:
    from lockstep.parallel import parallel_model

    sound_norm = parallel_model.gradient_norm
    return with_patch(
        parallel_model,
        "gradient_norm",
        lambda gradients, _groups, device: sound_norm(gradients, [], device),
    )


def random_numbers_lost_in_recomputation() -> Subject:
    def forgetful(function: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs |= {
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), nullcontext()),
        }
        return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)

    return with_patch(activation, "checkpoint", forgetful)


def attention_that_knows_of_no_other_ranks() -> Subject:
    """One layer of a model with `context_plan()` attends to the positions that are here."""
    model = language_model("transformer", n_layer=2)

    model.get_submodule("layers.1.attention").attend = AttendHere()
    return subject(model)


class AttendHere(nn.Module):
    def positions(
        self, length: int, device: torch.device, _documents: Tensor | None = None
    ) -> Tensor:
        return torch.arange(length, device=device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, _documents: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def a_sound_model_that_rounds(*, noise: bool) -> Subject:
    """Sines of large numbers magnify the last bits of what they get, and ranks get them in another
    order.
    """
    model = language_model("transformer", n_layer=2)

    def magnified(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        seen = output + 0.01 * torch.randn_like(output) if noise else output
        large = (seen * 30.0) * 700.0 if on_ranks() else seen * 21000.0
        return torch.sin(large)

    model.get_submodule("embed").register_forward_hook(magnified)
    return subject(model)


def rounds() -> Subject:
    return a_sound_model_that_rounds(noise=False)


def rounds_and_draws_other_numbers_in_float64() -> Subject:
    return a_sound_model_that_rounds(noise=True)


class Faulty(nn.Module):
    """For a config: a model whose loss is a mean of means, where it finds itself on
    several ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 16)
        self.head = nn.Linear(16, 61)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits

    def inputs(self, batch: Any) -> tuple[Tensor]:
        return (batch["input_ids"],)

    def loss(self, logits: Tensor, batch: Any) -> Tensor:
        reduction = "mean" if on_ranks() else "sum"
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction=reduction
        )

    def count(self, batch: Any) -> int:
        return 1 if on_ranks() else int((batch["targets"] != -100).sum())
