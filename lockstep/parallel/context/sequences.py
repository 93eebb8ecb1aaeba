"""Context parallel: each rank of the axis `context` works on its part of every sequence.

These ranks run the same micro-batches. Sequences are cut into chunks, two for each rank, one from
the front and one from the back: causal attention needs more work the later its queries are. Eight
tokens on two ranks, four chunks of two:

                           rank 0                      rank 1
    chunks                 0 and 3                     1 and 2
    positions              [0, 1, 6, 7]                [2, 3, 4, 5]
    keys that they see     1 + 2 + 7 + 8 = 18          3 + 4 + 5 + 6 = 18

A model's `context_plan()` says along which dim the parts of a batch are cut. What works on each
position by itself, such as a linear layer, runs on [B, 4, D] as it would on [B, 8, D]. Attention
sees other positions (`lockstep.parallel.context.attention`), and so do the mean over positions,
draws of random numbers, and the loss, which is summed over ranks.

Under `reproducible` sequences are cut into `context_blocks` chunks on any number of ranks, also on
one, and each layer runs chunk by chunk: what several chunks add up to is summed as one tree over
them. With four chunks of two tokens each, the gradient of a linear layer's weight is
(c0 + c1) + (c2 + c3) on one rank, on two and on four.

A module that does more than a product of each position names its products: `products =
{"method": "parameter"}`, for methods (x [B, T, …], …, parameter), where the parameter may be a
module of parameters, or, with `to_lend() -> {name: tensor}`, of what stands for them.

Tests: tests/parity/test_context.py, tests/parallel/test_worked_examples.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.models.attention import Attend, SequenceBernoulli, SequenceMean
from lockstep.models.language import TokenLosses
from lockstep.models.objective import Objective
from lockstep.parallel.changes import replace_method
from lockstep.parallel.context.attention import SequenceCut as SequenceCut
from lockstep.parallel.context.attention import cut_attention
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.loss_weights import LossWeights
from lockstep.parallel.tensor.cuts import sum_over_ranks
from lockstep.parallel.tensor.layer_cut import SEQUENCE
from lockstep.parallel.tensor.products import by_pieces, cut_dropout, spread
from lockstep.tensors import local
from lockstep.torch_compat.pytree import tree_map

_FLOAT = 4  # bytes of a number of a gradient


def refuse_loss_weights(loss: LossWeights) -> None:
    """Refuse a loss function with weights of its own, which sees complete sequences."""
    if not loss.any:
        return
    what = f"the loss function has weights of its own: {listed(list(loss.own))}"
    why = "under reproducible the gradient of each parameter is a sum over chunks of sequences"
    fix = "let the model hold them and compute loss(outputs, batch), or write reproducible: false"
    raise UsageError(what, where="distributed.context_blocks", why=why, fix=fix)


def apply_context(facts: ModelFacts, context: SequenceCut) -> None:
    """Let a model, whose layers are cut already, run on parts of sequences."""
    ways: dict[type[nn.Module], Callable[[Any, SequenceCut], None]] = {
        Attend: cut_attention,
        nn.Dropout: _dropout,
        SequenceBernoulli: _bernoulli,
        SequenceMean: _mean,
        TokenLosses: _losses,
    }
    handed: set[nn.Module] = set()  # modules whose parameters another module multiplies by
    for name, module in facts.model.named_modules():
        way = next((way for kind, way in ways.items() if isinstance(module, kind)), None)
        if way is not None:
            way(module, context)
        elif context.blocks is not None and module not in handed:
            handed |= _by_chunks(name, module, context, facts.lent)


def cut_objective(objective: Objective, context: SequenceCut, plan: Mapping[str, int]) -> Objective:
    """Return an objective that takes complete batches, and gives the model this rank's part.

    Its loss is that of complete sequences, on every rank. What the plan does not name of a batch
    stays as it is.
    """
    if objective.is_mean:
        what = (
            "a loss that is a mean over some positions can't be put together from several ranks'"
            " means"
        )
        fix = (
            "give the model loss(outputs, batch), which returns the sum over valid targets, and"
            " count(batch)"
        )
        raise UsageError(what, where="distributed.context_size", fix=fix)

    def part_of(batch: Any) -> Any:
        return {
            name: context.part(value, plan[name]) if name in plan else value
            for name, value in batch.items()
        }

    def loss(outputs: Any, batch: Any) -> Tensor:
        """Return the loss of complete sequences from this rank's outputs, [B, T / ranks, …]."""
        length = next(batch[name].shape[dim] for name, dim in plan.items())
        part = part_of(batch)
        # Where bits count, the loss is a sum over chunks, as every other sum over positions is.
        count = 1 if context.blocks is None else len(context.here(length))
        pieces = {name: part[name].chunk(count, dim) for name, dim in plan.items()}
        of_chunks = _by_chunk(outputs, length // context.ranks, count, context)
        losses = [
            objective.loss(chunk, part | {name: piece[number] for name, piece in pieces.items()})
            for number, chunk in enumerate(of_chunks)
        ]
        return context.total(torch.stack(losses))

    def gathered(outputs: Any) -> Any:
        return tree_map(
            lambda x: context.gathered(x) if isinstance(x, Tensor) and x.ndim > 1 else x, outputs
        )

    return replace(
        objective,
        inputs=lambda batch: objective.inputs(part_of(batch)),
        loss=loss,
        gather_outputs=gathered,
    )


def sum_gradients(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, context: SequenceCut
) -> None:
    """Sum the gradients of parts of sequences over the ranks of a group, which have one each."""
    sum_over_ranks(parameters, group)
    if context.on_send is not None:
        numbers = sum(local(p.grad).numel() for p in parameters if p.grad is not None)
        context.on_send(2 * _FLOAT * numbers * (context.ranks - 1) // context.ranks)


def _by_chunk(outputs: Any, length: int, count: int, context: SequenceCut) -> list[Any]:
    """Return the outputs for each of this rank's chunks.

    Outputs without positions are the same for all chunks.
    """
    if not isinstance(outputs, Tensor):
        return list(
            zip(*(_by_chunk(each, length, count, context) for each in outputs), strict=True)
        )
    if outputs.dim() > SEQUENCE and outputs.shape[SEQUENCE] == length:
        return list(outputs.chunk(count, SEQUENCE))
    return list(spread(outputs, context, count))


def _dropout(module: nn.Dropout, context: SequenceCut) -> None:
    if "forward" not in vars(module):  # else it is cut over `tensor`, too, and knows of this
        cut_dropout(module, [(context, getattr(module, "sequence_dim", SEQUENCE))], by="context")


def _bernoulli(module: SequenceBernoulli, context: SequenceCut) -> None:
    """Draw for the complete sequence, and keep this rank's part.

    The probabilities at positions of other ranks do not matter.
    """

    def forward(_self: SequenceBernoulli, probabilities: Tensor) -> Tensor:
        if context.is_outside:
            return torch.bernoulli(probabilities)
        length = probabilities.shape[SEQUENCE] * context.ranks
        positions = context.part(torch.arange(length, device=probabilities.device), 0)
        shape = [
            length if dim == SEQUENCE else size for dim, size in enumerate(probabilities.shape)
        ]
        full = probabilities.new_zeros(shape).index_copy(SEQUENCE, positions, probabilities)
        return torch.bernoulli(full).index_select(SEQUENCE, positions)

    replace_method(module, MethodType(forward, module), by="context")


def _losses(module: TokenLosses, context: SequenceCut) -> None:
    """Let chunks of the losses be parts of each chunk of a sequence, where bits count."""
    if context.blocks is not None:
        module.cut_into(context.blocks // context.ranks)


def _mean(module: SequenceMean, context: SequenceCut) -> None:
    """Make a mean over positions one over those of all ranks, [B, T / ranks, K] → [K].

    With sums [6, …] and [10, …] over four tokens each it is [16 / 8, …] = [2, …] on both ranks.
    """

    def forward(_self: SequenceMean, x: Tensor) -> Tensor:
        if context.is_outside:
            return x.mean((0, 1))
        count = context.blocks_of(x.shape[SEQUENCE])
        sums = torch.stack([piece.sum((0, 1)) for piece in x.chunk(count, SEQUENCE)])
        return context.total(sums) / (x.shape[0] * x.shape[1] * context.ranks)

    def total(_self: SequenceMean, counts: Tensor) -> Tensor:
        if not context.is_outside and context.group is not None:
            dist.all_reduce(counts, group=context.group)
        return counts

    replace_method(module, MethodType(forward, module), by="context")
    replace_method(module, MethodType(total, module), by="context", method="total")


def _by_chunks(
    name: str, module: nn.Module, context: SequenceCut, lent: set[str]
) -> set[nn.Module]:
    """Make a layer run chunk by chunk.

    So a weight's gradient is the same sum over chunks on any number of ranks.

    `lent`: names of parameters that layers borrow. Returns the modules that are handed to the
    layer's products.
    """
    products = getattr(
        module, "products", {"product": "weight"} if hasattr(module, "product") else {}
    )
    own = {full_name for full_name, _ in module.named_parameters(name, recurse=False)}
    # Hugging Face families define their norms for themselves.
    only_weight = [attribute for attribute, _ in module.named_parameters()] == ["weight"]
    is_norm = only_weight and type(module).__name__.endswith("RMSNorm")
    if products:
        for method in products:
            _product_by_chunks(module, method, context)
        own -= {f"{name}.{attribute}".lstrip(".") for attribute in products.values()}
    elif isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm | nn.LayerNorm) or is_norm:
        _layer_by_chunks(module, context)
        return set()
    if own <= lent:
        handed = (getattr(module, attribute, None) for attribute in products.values())
        return {inner for inner in handed if isinstance(inner, nn.Module)}
    what = (
        f"{name or 'the model'}, a {type(module).__name__}, owns parameters, and can't run chunk by"
        " chunk"
    )
    why = "under reproducible the gradient of each parameter is a sum over chunks of sequences"
    fix = (
        "put its parameters into nn.Linear, nn.Embedding, nn.RMSNorm or nn.LayerNorm, or give it"
        " product(x, weight), which its forward pass calls; or write reproducible: false"
    )
    raise UsageError(what, where="distributed.context_blocks", why=why, fix=fix)


def _product_by_chunks(module: nn.Module, method: str, context: SequenceCut) -> None:
    """Make a method (x, …, weight) run by chunks; `weight` is a parameter or a module of them."""
    inner: Callable[..., Tensor] = getattr(module, method).__func__
    dim = getattr(module, "sequence_dim", SEQUENCE)

    def by_chunks(self: nn.Module, *given: Any) -> Tensor:
        """Run the method by chunks, with views of its parameters for each."""
        *x, weight = given
        if context.is_outside:
            return inner(self, *given)
        if isinstance(weight, Tensor):
            return by_pieces(partial(inner, self), x, (weight,), context, dim)
        # A module of parameters, such as a mixture's experts: each chunk sees views of them, so
        # that their gradients, too, are sums over chunks.
        tensors = (
            weight.to_lend() if hasattr(weight, "to_lend") else dict(weight.named_parameters())
        )
        names = list(tensors)

        def run(*pieces: Tensor) -> Tensor:
            lent = _Lent(weight, dict(zip(names, pieces[len(x) :], strict=True)))
            return inner(self, *pieces[: len(x)], partial(weight.forward.__func__, lent))

        return by_pieces(run, x, list(tensors.values()), context, dim)

    replace_method(module, MethodType(by_chunks, module), by="context", method=method)


def _layer_by_chunks(module: nn.Module, context: SequenceCut) -> None:
    """Make a module's own forward pass run by chunks, with views of its parameters for each."""
    plain: Callable[..., Tensor] = module.forward.__func__  # type: ignore[attr-defined]
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if context.is_outside:
            return plain(self, x)

        def run(piece: Tensor, *weights: Tensor) -> Tensor:
            return plain(_Lent(self, dict(zip(names, weights, strict=True))), piece)

        dim = SEQUENCE if x.dim() > 1 else 0  # positions [T], of a table of them
        return by_pieces(run, x, [getattr(self, name) for name in names], context, dim)

    replace_method(module, MethodType(forward, module), by="context")


class _Lent:
    """A module with other tensors in place of its own parameters."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._module = module
        self._tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return self._tensors[name] if name in self._tensors else getattr(self._module, name)
