"""BDH, the Dragon Hatchling (Pathway 2025): linear attention over sparse positive neurons.

All layers share one set of weights.

    x = LN(embed(ids))                                       [B, T, D]
    n_layer times, with the same weights:
        s = relu(x @ encoder)                                [H, B, T, N]
        q = rope(s)
        a = LN(tril(q @ q.T, diagonal=-1) @ x)               the past alone; position 0: LN(0) = 0
        u = dropout(s * relu(a @ encoder_v))
        x = LN(x + LN(concat_heads(u) @ decoder))
    logits = x @ head

N = mlp_multiplier · n_embd / n_head neurons a head. No LayerNorm has parameters.

The weights `encoder`, `encoder_v` [H, D, N] and `decoder` [H·N, D] are parameters of the model
itself, which each layer borrows (`lockstep.models.chain`). Tensors of neurons have the heads first:
each product with a weight is then one batched product over heads that copies neither the weight nor
the neurons.

Tests: tests/models/test_bdh.py, tests/models/test_sum_over_past.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.models.attention import (
    Attend,
    SequenceDropout,
    phases,
    rotate,
    same_document,
    without_autocast,
)
from lockstep.models.language import (
    Decoder,
    OutputLayer,
    TokenTable,
    require_multiple,
    require_positive,
    with_carried,
)
from lockstep.models.sums import sum_in_order

THETA = 2.0**16
INIT_STD = 0.02


class BDH(Decoder):
    """The BDH language model: ids [B, T] → logits [B, T, V]."""

    keeps_past = True

    def __init__(
        self,
        n_layer: int = 6,
        n_embd: int = 256,
        n_head: int = 4,
        mlp_multiplier: int = 128,
        dropout: float = 0.1,
        vocab_size: int = 256,
        block_size: int = 512,
    ) -> None:
        super().__init__()
        require_positive(
            n_layer=n_layer, n_embd=n_embd, n_head=n_head, mlp_multiplier=mlp_multiplier
        )
        # Rotary positions rotate pairs of neurons.
        require_multiple("mlp_multiplier·n_embd", mlp_multiplier * n_embd, "2·n_head", 2 * n_head)
        self.block_size = block_size
        neurons = mlp_multiplier * n_embd // n_head
        self.encoder = nn.Parameter(torch.empty(n_head, n_embd, neurons))
        self.encoder_v = nn.Parameter(torch.empty(n_head, n_embd, neurons))
        self.decoder = nn.Parameter(torch.empty(n_head * neurons, n_embd))
        self.embed = NormalizedEmbedding(vocab_size, n_embd)
        self.layers = nn.ModuleList(BDHLayer(dropout) for _ in range(n_layer))
        self.head = OutputLayer(n_embd, vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=INIT_STD)

    def tensor_plan(self) -> dict[str, str]:
        heads = dict.fromkeys(("encoder", "encoder_v", "decoder"), "column")
        return {
            "embed": "vocabulary",
            **heads,
            "layers.*": "scope",
            "head": "head",
            "token_losses": "loss",
        }

    def shared_parameters(self) -> dict[str, dict[str, str]]:
        return {
            name: {weight: weight for weight in ("encoder", "encoder_v", "decoder")}
            for name, _ in self.blocks()
        }


class NormalizedEmbedding(TokenTable):
    """Normalised embedding: ids [B, T] → LN(embedding) [B, T, D].

    The numbers of documents are passed on.
    """

    def forward(self, input: Tensor, *documents: Tensor) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        return with_carried(
            F.layer_norm(self.product(input, self.weight), (self.embedding_dim,)), documents
        )


class BDHLayer(nn.Module):
    """One layer: x [B, T, D] and the weights → x, and the numbers of documents.

    It owns no parameters.
    """

    sequence_dim = 2

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attend = PastAttention()
        self.dropout = SequenceDropout(dropout, sequence_dim=2)

    def enter(self, x: Tensor, heads: int) -> Tensor:
        """Return x for each head: [B, T, D] → [heads, B · T, D].

        A tensor-parallel run replaces this.
        """
        return x.reshape(1, -1, x.shape[-1]).expand(heads, -1, -1)

    def leave(self, parts: Tensor) -> Tensor:
        """Return the sum over heads, in float32; a tensor-parallel run replaces this."""
        return sum_in_order(parts, torch.float32)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W for each head: x [H, B, T, K], weight [H, K, N].

        A context-parallel run replaces this.
        """
        return torch.bmm(x.flatten(1, 2), weight).view(*x.shape[:3], -1)

    def forward(
        self, x: Tensor, *documents: Tensor, encoder: Tensor, encoder_v: Tensor, decoder: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """Return x [B, T, D] after one layer; `documents` are carried on as they come.

        With N neurons in each of H heads, s and u are [H, B, T, N], and y is [B, T, D] again.
        """
        width = x.shape[-1]
        heads, _, neurons = encoder.shape
        x_heads = self.enter(x, heads).view(heads, *x.shape)
        s = torch.relu(self.product(x_heads, encoder))
        a = F.layer_norm(attend_to_past(s, x_heads, self.attend, *documents), (width,))
        u = self.dropout(s * torch.relu(self.product(a, encoder_v)))
        # concat_heads(u) @ decoder
        y = self.leave(self.product(u, decoder.view(heads, neurons, width)).flatten(1, 2))
        y = F.layer_norm(y, (width,)).to(x.dtype).view_as(x)
        return with_carried(F.layer_norm(x + y, (width,)), documents)


class PastAttention(Attend):
    """Attention to strictly earlier positions: tril(q qᵀ, −1) x.

    q [H, B, T, N] is both the queries and the keys, x [H, B, T, D] the values.
    """

    heads_dim = 0

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, first: int, documents: Tensor | None = None
    ) -> Tensor:
        """Attend to earlier positions without softmax: q, k [H, B, T, N] and v [H, B, T, D].

        Where queries begin at 0 and there are no documents, `sum_over_past` does it without T × T
        scores.
        """
        heads, batch = q.shape[:2]
        q, k, v = (each.flatten(0, 1) for each in (q, k, v))
        if not first and documents is None:
            return sum_over_past(q, v).view(heads, batch, *v.shape[1:])
        scores = torch.bmm(q, k.transpose(1, 2)).tril(first - 1)
        if documents is not None:
            scores = scores * same_document(documents, first, q.shape[1], k.shape[1]).repeat(
                heads, 1, 1
            )
        return torch.bmm(scores, v).view(heads, batch, *q.shape[1:2], -1)


def attend_to_past(
    s: Tensor, x: Tensor, attend: PastAttention, documents: Tensor | None = None
) -> Tensor:
    """Return tril(q qᵀ, −1) x with q = rope(s): s [H, B, T, N], x [H, B, T, D] → [H, B, T, D].

    Under fp16 it computes in float32: entries of q qᵀ are sums of N mostly positive products, and
    exceed fp16's 65504. The range of bf16 suffices.
    """
    length, neurons = s.shape[2:]
    dtype = torch.bfloat16 if s.dtype == torch.bfloat16 else torch.float32
    with without_autocast(x.device):
        cos, sin = phases(attend.positions(length, x.device, documents), neurons, THETA)
        q = rotate(s, cos, sin, dtype)
        attended: Tensor = attend(q, q, x.to(dtype), documents)
        return attended


CHUNK = 128  # positions


# ---- attention to the strict past, linear in its values: tril(q qᵀ, −1) x, in two equal forms ----
#
# Direct: the T × T table of scores, half of which is discarded: 2·T·(N + D) multiply-adds per
# position and head. Chunked (Katharopoulos et al. 2020, Yang et al. 2023): the same within a chunk
# of C positions; all earlier positions enter through their sum Σ qᵀx, [N, D]: 2·C·(N + D) + 4·N·D
# multiply-adds for any T, and no table.


def sum_over_past(q: Tensor, x: Tensor) -> Tensor:
    """Return tril(q qᵀ, −1) x: q [R, T, N], x [R, T, D] → [R, T, D].

    It is computed by the form that needs fewer multiply-adds.
    """
    length = q.shape[1]
    neurons = q.shape[2]
    width = x.shape[2]
    if length * (neurons + width) <= CHUNK * (neurons + width) + 2 * neurons * width:
        return direct(q, x)
    return chunked(q, x)


def direct(q: Tensor, x: Tensor) -> Tensor:
    """Compute the table of all scores."""
    return torch.bmm(torch.bmm(q, q.transpose(1, 2)).tril(-1), x)


def chunked(q: Tensor, x: Tensor, chunk: int = CHUNK) -> Tensor:
    """Compute chunk by chunk; sums over chunks are in float32 at least."""
    result: Tensor = _Chunked.apply(q, x, chunk)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, x: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(q, x)
        ctx.chunk = chunk
        past = _PastSum(q.dtype)
        pieces = []
        for q_here, x_here in zip(torch.split(q, chunk, 1), torch.split(x, chunk, 1), strict=True):
            pieces.append(direct(q_here, x_here) + past.through(q_here))
            past.add(q_here, x_here)
        return torch.cat(pieces, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of q and x, where g is the gradient of o.

        In each chunk, o = tril(q qᵀ, −1) x + q S and S' = S + qᵀx.
        """
        q, x = ctx.saved_tensors
        pieces = list(
            zip(*(torch.split(each, ctx.chunk, 1) for each in (q, x, gradients[0])), strict=True)
        )
        to_q = []
        to_x = []
        past = _PastSum(q.dtype)
        later = _PastSum(q.dtype)
        for q_here, x_here, g_here in pieces:
            scores = torch.bmm(g_here, x_here.transpose(1, 2)).tril(-1)
            to_q.append(
                torch.bmm(scores + scores.transpose(1, 2), q_here) + past.through_transposed(g_here)
            )
            past.add(q_here, x_here)
        for index in reversed(range(len(pieces))):
            q_here, x_here, g_here = pieces[index]
            scores = torch.bmm(q_here, q_here.transpose(1, 2)).tril(-1)
            to_x.append(torch.bmm(scores.transpose(1, 2), g_here) + later.through(q_here))
            to_q[index] += later.through_transposed(x_here)
            later.add(q_here, g_here)
        return torch.cat(to_q, 1), torch.cat(to_x[::-1], 1), None


class _PastSum:
    """The sum Σ qᵀy over the chunks so far, [R, N, D]; empty before the first.

    Products have the dtype of q.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept = torch.promote_types(dtype, torch.float32)
        self._sum: Tensor | None = None

    def add(self, q: Tensor, y: Tensor) -> None:
        if self._sum is None:
            # A copy, as it is added to in place: what selective activation checkpointing keeps of a
            # product is not to be written to.
            self._sum = torch.bmm(q.transpose(1, 2), y).to(self._kept, copy=True)
        elif self._dtype == self._kept:
            self._sum.baddbmm_(q.transpose(1, 2), y)
        else:
            self._sum += torch.bmm(q.transpose(1, 2), y)

    def through(self, q: Tensor) -> Tensor | float:
        """Return q S, [R, chunk, D]."""
        return 0.0 if self._sum is None else torch.bmm(q, self._sum.to(self._dtype))

    def through_transposed(self, y: Tensor) -> Tensor | float:
        """Return y Sᵀ, [R, chunk, N]."""
        return 0.0 if self._sum is None else torch.bmm(y, self._sum.to(self._dtype).transpose(1, 2))
