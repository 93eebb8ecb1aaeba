"""Shared parts of the language models: batches, the loss, checks of sizes, and sampling.

A batch is {"input_ids": int64 [B, T], "targets": int64 [B, T]}: targets[:, t] follows input_ids[:,
t], and −100 is not counted. `document_ids`, int64 [B, T], may number the documents of a sequence
(`lockstep.models.attention.Attend`).

Tests: tests/models/test_generate.py, tests/models/test_every_family.py,
tests/models/test_token_losses.py
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.division import ceil_div
from lockstep.errors import UsageError
from lockstep.models.attention import Attend
from lockstep.models.batch_parts import DOCUMENTS, IGNORED_TARGET, logits_of
from lockstep.models.chain import LOSS_TARGETS, run_segments

NextLogits = Callable[[Tensor], Any]
"""The next ids of a text [1, T] → their logits [1, T, V]; what came before is kept."""


class LanguageModel(nn.Module):
    """A model that predicts the next token: ids [B, T] → logits [B, T, V]."""

    block_size: int
    keeps_past = False  # whether positions meet in causal `Attend`s alone

    def __init__(self) -> None:
        super().__init__()
        self.token_losses = TokenLosses()

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        documents = batch.get(DOCUMENTS)
        return (batch["input_ids"],) if documents is None else (batch["input_ids"], documents)

    def loss_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `forward` needs to compute losses by chunks; empty where it does not."""
        return {LOSS_TARGETS: batch["targets"]} if self.token_losses.chunks > 1 else {}

    def compute_by_chunks(self, chunks: int) -> bool:
        """Let the forward pass compute losses in so many chunks, where it is given targets.

        Returns whether this model can.
        """
        return chunks == 1

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over the valid targets, in nats, float32."""
        return self.token_losses.of(outputs, batch["targets"]).sum()

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of valid targets.

        It is a 0-dim tensor, so that the caller decides when the host reads it.
        """
        return (batch["targets"] != IGNORED_TARGET).sum()

    @contextmanager
    def keeping_past(self) -> Iterator[NextLogits | None]:
        """Keep keys and values in the block, so that a text goes on without its beginning.

        None where the model can't: each token then takes the whole text.
        """
        if not self.keeps_past:
            yield None
            return
        layers = [layer for layer in self.modules() if isinstance(layer, Attend)]
        for layer in layers:
            layer.keep_past(keeps=True)
        try:
            yield self
        finally:
            for layer in layers:
                layer.keep_past(keeps=False)


class Decoder(LanguageModel):
    """A chain of an embedding, layers and a head, each position by itself but for attention."""

    embed: nn.Module
    layers: nn.ModuleList
    head: nn.Module
    tie_embeddings = False

    def init_weights(self) -> None:
        for _, segment in self.segments():
            segment.init_weights()  # type: ignore[operator]

    def forward(
        self,
        ids: Tensor,
        document_ids: Tensor | None = None,
        *,
        loss_targets: Tensor | None = None,
    ) -> Any:
        """Return logits [B, T, V], or with `loss_targets` the losses [B, T] in their place."""
        inputs = (ids,) if document_ids is None else (ids, document_ids)
        to_head = {} if loss_targets is None else {"head": {LOSS_TARGETS: loss_targets}}
        return run_segments(
            self, self.segments(), self.shared_parameters(), *inputs, keywords=to_head
        )

    def compute_by_chunks(self, chunks: int) -> bool:
        self.token_losses.divide(chunks)
        if chunks > 1:
            assert isinstance(self.head, OutputHead)
            self.head.token_losses = self.token_losses
        return True

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]

    def segments(self) -> list[tuple[str, nn.Module]]:
        return [("embed", self.embed), *self.blocks(), ("head", self.head)]

    def context_plan(self) -> dict[str, int]:
        return {"input_ids": 1, "targets": 1}

    def shared_parameters(self) -> dict[str, dict[str, str]]:
        return {"head": {"weight": "embed.weight"}} if self.tie_embeddings else {}


class TokenTable(nn.Embedding):
    """An embedding: ids [B, T] → [B, T, D]."""

    def product(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the rows of the table; a tensor-parallel run replaces this."""
        return F.embedding(ids, weight, self.padding_idx)


class OutputHead(nn.Module):
    """Makes logits, or losses chunk by chunk, as the last segment of a decoder."""

    takes_targets = True  # an argument LOSS_TARGETS
    token_losses: "TokenLosses"  # the model's, where losses are computed by chunks

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the logits; a tensor-parallel run replaces this."""
        return F.linear(x, weight)

    def scores(self, x: Tensor, weight: Tensor, loss_targets: Tensor | None) -> Tensor:
        """Return the logits of x [B, T, D], [B, T, V], or given targets the losses, [B, T]."""
        if loss_targets is None:
            return self.product(x, weight)
        return self.token_losses.by_chunks(self.product, x, loss_targets, weight)


class OutputLayer(nn.Linear, OutputHead):
    """The output layer: x [B, T, D] → logits [B, T, V]; the numbers of documents end here."""

    def forward(
        self,
        input: Tensor,
        *_documents: Tensor,
        weight: Tensor | None = None,
        loss_targets: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, with a borrowed weight [V, D] where the layer owns none."""
        return self.scores(input, self.weight if weight is None else weight, loss_targets)


class TokenLosses(nn.Module):
    """The cross entropy of each target: logits [B, T, V], targets [B, T] → float32 [B·T].

    Targets that do not count have 0. In training two terms may be added, as `regularize` says; an
    evaluation is without them.

    A tensor-parallel run replaces `forward` where the model's plan has "loss", and gives it a part
    of the vocabulary.

    With `chunks` the output layer calls `by_chunks`, so that no more than the logits of one chunk
    are there at a time, forward and backward. The losses that this returns, [B, T], then stand in
    the place of logits among a model's outputs, where `of` takes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._label_smoothing = 0.0
        self._z_loss = 0.0
        self.chunks = 1  # of the positions of a micro-batch
        # How often axes divide a sequence of a rank where bits count: chunks are parts of each of
        # these pieces, so they hold the same positions on any number of ranks.
        self.pieces = 1

    def regularize(self, *, label_smoothing: float, z_loss: float) -> None:
        """Set the two terms of the training loss.

        Args:
            label_smoothing: ε: the target has the probability 1 − ε + ε/V, each other token ε/V
                (Szegedy et al. 2016).
            z_loss: weight of log(Z)², where Z is the sum of the exponentials of a position's logits
                (Chowdhery et al. 2022, arXiv:2204.02311).
        """
        self._label_smoothing = label_smoothing
        self._z_loss = z_loss

    def divide(self, chunks: int) -> None:
        """Compute losses in so many chunks, of sequences that no axis divides."""
        self.chunks = chunks
        self.pieces = 1

    def cut_into(self, pieces: int) -> None:
        """Let chunks be parts of each of a rank's `pieces` of a sequence, and of earlier ones."""
        self.pieces *= pieces

    @property
    def terms(self) -> tuple[float, float]:
        """Label smoothing and the weight of the z-loss, both 0 outside of training."""
        return (self._label_smoothing, self._z_loss) if self.training else (0.0, 0.0)

    def by_chunks(
        self,
        logits_of: Callable[..., Tensor],
        x: Tensor,
        targets: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Return the loss of each target, [B, T], from hidden states x [B, T, D].

        With 2 chunks and x [B, 8, D], of which another rank has the first half of each sequence of
        16 targets:

            x                    [B, 8, D] → chunks of [B, 4, D]
            logits_of(chunk)     [B, 8, V], as it gathers the positions of both ranks
            targets [B, 16]      0 to 3 and 8 to 11, then 4 to 7 and 12 to 15

        In the backward pass the logits of a chunk are computed again.

        Args:
            logits_of: (chunk of x, *weights) → its logits; position by position, without draws.
            x: this rank's part of the sequences, where they are cut between layers.
            targets: of complete sequences.
            weights: of the output layer.
        """
        pieces = math.gcd(x.shape[1], self.pieces)
        rows = x.unflatten(1, (pieces, -1))  # type: ignore[no-untyped-call]
        wanted = targets.unflatten(1, (-1, rows.shape[2]))  # type: ignore[no-untyped-call]
        size = ceil_div(rows.shape[2], self.chunks)

        def losses(chunk: Tensor, chosen: Tensor, *weights: Tensor) -> Tensor:
            # A copy: the strides of a slice would depend on the ranks.
            flat = chunk.flatten(1, 2).contiguous()
            of_chunk: Tensor = self(logits_of(flat, *weights), chosen.flatten(1))
            return of_chunk.view(chosen.shape)

        run = (
            partial(checkpoint, losses, use_reentrant=False, preserve_rng_state=False)
            if torch.is_grad_enabled()
            else losses
        )
        chunks = [
            run(chunk, chosen, *weights)
            for chunk, chosen in zip(rows.split(size, 2), wanted.split(size, 2), strict=True)
        ]
        return torch.cat(chunks, 2).flatten(1)

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each target's loss, [B·T], from a model's logits, or from losses [B, T]."""
        if outputs.ndim == 2:
            return outputs.flatten()
        losses: Tensor = self(outputs, targets)
        return losses

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return each target's loss in nats, with the terms of training while the module trains."""
        smoothing, z_loss = self.terms
        rows = logits.flatten(0, 1).float()
        flat = targets.flatten()
        losses = F.cross_entropy(
            rows,
            flat,
            ignore_index=IGNORED_TARGET,
            reduction="none",
            label_smoothing=smoothing,
        )
        if z_loss:
            losses = losses + torch.where(
                flat != IGNORED_TARGET, z_loss * rows.logsumexp(-1).square(), 0.0
            )
        return losses


def set_token_losses(
    model: nn.Module, *, label_smoothing: float, z_loss: float, chunks: int, has_loss_fn: bool
) -> None:
    """Set how a language model computes its losses: terms of training, and chunks.

    Raises:
        UsageError: the loss is not one of `TokenLosses`, or is not computed from hidden states that
            this model shows.
    """
    parts = [module for module in model.modules() if isinstance(module, TokenLosses)]
    loss = "loss_fn" if has_loss_fn else f"the loss of {type(model).__name__}"
    if (label_smoothing or z_loss) and (has_loss_fn or not parts):
        what = f"label_smoothing and z_loss are terms of a language model's own loss, not of {loss}"
        fix = "leave them out; torch.nn.CrossEntropyLoss has an argument label_smoothing"
        where = "training.label_smoothing, training.z_loss"
        raise UsageError(what, where=where, fix=fix)
    for part in parts:
        part.regularize(label_smoothing=label_smoothing, z_loss=z_loss)
        part.divide(1)
    # a loss function gets logits
    divided = (
        isinstance(model, LanguageModel)
        and not (has_loss_fn and chunks > 1)
        and model.compute_by_chunks(chunks)
    )
    if chunks > 1 and not divided:
        what = f"loss_chunks={chunks}: {loss} can't be computed chunk by chunk"
        why = (
            "only the models that ship, and causal models of hf:, show what their output layer is"
            " given, and have losses of their own that balance no experts in the library"
        )
        fix = "write loss_chunks: 1, or a smaller batch_size"
        raise UsageError(what, where="training.loss_chunks", why=why, fix=fix)


def with_carried(x: Tensor, carried: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Return x, or a tuple of x and copies of the other values that a chain hands on.

    They are copies, as a segment returns none of its inputs (`lockstep.models.chain`).
    """
    return (x, *(tensor.clone() for tensor in carried)) if carried else x


def split_documents(carried: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Return the numbers of documents, or None, and the other values of a chain.

    The numbers of documents come first, and are the only integers.
    """
    if carried and not carried[0].is_floating_point():
        return carried[0], carried[1:]
    return None, carried


def require_multiple(what: str, value: int, of: str, divisor: int) -> None:
    """Reject sizes that do not divide, with both names and numbers."""
    if divisor >= 1 and value % divisor == 0:
        return
    # what stands behind `·` is the argument by which a size is set
    key = what.rpartition("·")[2]
    divisor_key = of.rpartition("·")[2]
    if divisor < 1:
        fix = f"set model.args.{divisor_key} to 1 or more"
    elif key == what:
        below = value // divisor * divisor
        near = [str(size) for size in (below, below + divisor) if size]
        fix = f"set model.args.{key} to {' or '.join(near)}, or change {divisor_key}"
    else:
        fix = f"change {key} or {divisor_key}"
    raise UsageError(
        f"{what}={value} is not a multiple of {of}={divisor}", where="model.args", fix=fix
    )


def require_positive(**sizes: int) -> None:
    """Reject sizes below 1."""
    for name, value in sizes.items():
        if value < 1:
            what = f"{name}={value}: at least 1 is needed"
            raise UsageError(what, where="model.args", fix=f"set model.args.{name} to 1 or more")


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Any],
    ids: Tensor,
    num_tokens: int,
    *,
    block_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continue a text: int64 [1, T] → int64 [1, T + num_tokens].

    Args:
        model: ids [1, T] → logits [1, T, V], or an output that holds them (see `logits_in`). In
            eval mode.
        block_size: how many of the last tokens the model sees.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: draw only among the k likeliest tokens.
    """
    if ids.numel() == 0:
        raise UsageError(
            "nothing to continue: the prompt is empty", fix="give it at least one token"
        )
    generator = torch.Generator(ids.device).manual_seed(seed)

    def extended(outputs: Any) -> Tensor:
        logits = logits_in(outputs)[:, -1]
        token = draw_token(logits, generator, temperature=temperature, top_k=top_k)
        return torch.cat((ids, token), 1)

    end = ids.shape[1] + num_tokens
    past = model.keeping_past() if isinstance(model, LanguageModel) else nullcontext()
    with past as next_logits:
        read = 0  # tokens whose keys and values are kept
        # Beyond the window each token has another position at each step, so nothing can be kept.
        while next_logits is not None and ids.shape[1] < min(end, block_size + 1):
            new = ids[:, read:]
            read = ids.shape[1]
            ids = extended(next_logits(new))
    while ids.shape[1] < end:
        ids = extended(model(ids[:, -block_size:]))
    return ids


def logits_in(outputs: Any) -> Tensor:
    """Return the logits in a language model's output.

    They are the output itself, the first member of a tuple, or `.logits`.
    """
    logits = logits_of(outputs[0] if isinstance(outputs, tuple) else outputs)
    assert isinstance(logits, Tensor)
    return logits


def draw_token(
    logits: Tensor, generator: torch.Generator, *, temperature: float, top_k: int | None
) -> Tensor:
    """Draw one token per row: logits [B, V] → int64 [B, 1]."""
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise UsageError(
            f"temperature={temperature}, top_k={top_k}", fix="temperature ≥ 0 and top_k ≥ 1"
        )
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
