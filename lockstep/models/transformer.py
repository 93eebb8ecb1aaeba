"""A Llama-style decoder, which is the baseline.

It has pre-RMSNorm, rotary positions, SwiGLU and grouped-query attention, and no biases.

Dropout is on the embedding and on what each block adds to the residual stream, not inside
attention, so that the fused kernels serve.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.attention import Attend, phases, rotate
from lockstep.models.language import (
    Decoder,
    OutputHead,
    TokenTable,
    require_multiple,
    require_positive,
    split_documents,
    with_carried,
)

THETA = 10_000.0
INIT_STD = 0.02
NORM_EPS = 1e-5


def decoder_plan() -> dict[str, str]:
    """Return the plan by which a decoder of `Block`s is sharded.

    It is sharded by heads, by units of the feed-forward layers, and by the vocabulary.
    """
    return {"embed": "vocabulary", **block_plan("layers.*"), "head": "head", "token_losses": "loss"}


def block_plan(name: str) -> dict[str, str]:
    """Return how the attention and the feed-forward layer of a module are cut."""
    return attention_plan(f"{name}.attention") | mlp_plan(f"{name}.mlp")


def attention_plan(name: str) -> dict[str, str]:
    """Return how an `Attention` is cut."""
    return {
        **{f"{name}.{layer}": "heads" for layer in ("query", "key", "value")},
        f"{name}.out": "row",
    }


def mlp_plan(name: str) -> dict[str, str]:
    """Return how a `SwiGLU` is cut."""
    return {f"{name}.gate": "column", f"{name}.up": "column", f"{name}.down": "row"}


class Transformer(Decoder):
    """A Llama-style language model: ids [B, T] → logits [B, T, V].

    Args:
        n_kv_head: heads of keys and values, a divisor of n_head. Unset: n_head.
        mlp_hidden: width of the SwiGLU. Unset: 8/3 · n_embd, up to a multiple of 32.
        tie_embeddings: the head is the embedding, transposed.
    """

    keeps_past = True

    def __init__(
        self,
        n_layer: int = 6,
        n_embd: int = 256,
        n_head: int = 4,
        n_kv_head: int | None = None,
        mlp_hidden: int | None = None,
        tie_embeddings: bool = False,
        dropout: float = 0.0,
        vocab_size: int = 256,
        block_size: int = 512,
    ) -> None:
        super().__init__()
        require_positive(n_layer=n_layer, n_embd=n_embd, vocab_size=vocab_size)
        self.block_size = block_size
        self.tie_embeddings = tie_embeddings
        self.embed = Embedding(vocab_size, n_embd, dropout)
        self.layers = nn.ModuleList(
            Block(n_embd, n_head, n_kv_head, mlp_hidden, dropout, n_layer) for _ in range(n_layer)
        )
        self.head = Head(n_embd, vocab_size, tied=tie_embeddings)
        self.init_weights()

    def tensor_plan(self) -> dict[str, str]:
        """Return how the layers are cut; between them each rank has a part of the sequence."""
        between = (
            "embed.dropout",
            "layers.*.attention_norm",
            "layers.*.mlp_norm",
            "layers.*.dropout",
            "head.norm",
        )
        return decoder_plan() | dict.fromkeys(between, "sequence")


class Embedding(TokenTable):
    """An embedding with dropout: ids [B, T] → [B, T, D].

    The numbers of documents are passed on unchanged.
    """

    def __init__(self, vocab_size: int, n_embd: int, dropout: float) -> None:
        super().__init__(vocab_size, n_embd)
        self.dropout = nn.Dropout(dropout)

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, input: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:  # type: ignore[override]
        return with_carried(self.dropout(self.product(input, self.weight)), carried)


class Head(OutputHead):
    """The output layer: x [B, T, D] → logits [B, T, V].

    Further arguments but documents are passed on unchanged.

    A `tied` one owns no weight and borrows one [V, D] at each call.
    """

    def __init__(self, n_embd: int, vocab_size: int, *, tied: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(n_embd, eps=NORM_EPS)
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, n_embd))

    def init_weights(self) -> None:
        nn.init.ones_(self.norm.weight)
        if self.weight is not None:
            nn.init.normal_(self.weight, std=INIT_STD)

    def forward(
        self,
        x: Tensor,
        *carried: Tensor,
        weight: Tensor | None = None,
        loss_targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        own = self.weight if weight is None else weight
        assert own is not None, "a tied head is lent its weight"
        made = self.scores(self.norm(x), own, loss_targets)
        return with_carried(made, split_documents(carried)[1])


class Block(nn.Module):
    """A causal block: x [B, T, D] → x [B, T, D]; further arguments are passed on.

    `mlp` stands in place of a SwiGLU.
    """

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        n_kv_head: int | None,
        mlp_hidden: int | None,
        dropout: float,
        n_layer: int,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(n_embd, eps=NORM_EPS)
        self.attention = Attention(n_embd, n_head, n_kv_head)
        self.mlp_norm = nn.RMSNorm(n_embd, eps=NORM_EPS)
        self.mlp = SwiGLU(n_embd, mlp_hidden) if mlp is None else mlp
        self.dropout = nn.Dropout(dropout)
        # With two additions per layer, this makes the initial variance of the residual stream
        # independent of depth.
        self.out_std = INIT_STD / math.sqrt(2 * n_layer)

    def init_weights(self) -> None:
        nn.init.ones_(self.attention_norm.weight)
        nn.init.ones_(self.mlp_norm.weight)
        self.attention.init_weights(self.out_std)
        self.mlp.init_weights(self.out_std)  # type: ignore[operator]

    def forward(self, x: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        normed = self.attention_norm(x)
        return with_carried(
            self._add(x, self.attention(normed, normed, split_documents(carried)[0])), carried
        )

    def _add(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.dropout(attended)
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Queries, keys and values are projections of [B, T, D], with shapes as in `Attend`.
    """

    def __init__(
        self, n_embd: int, n_head: int, n_kv_head: int | None, *, causal: bool = True
    ) -> None:
        super().__init__()
        n_kv_head = n_head if n_kv_head is None else n_kv_head
        require_positive(n_embd=n_embd, n_head=n_head, n_kv_head=n_kv_head)
        require_multiple("n_embd", n_embd, "2·n_head", 2 * n_head)  # rotary positions rotate pairs
        require_multiple("n_head", n_head, "n_kv_head", n_kv_head)
        self.head_width = n_embd // n_head
        self.attend = Attend(causal=causal)
        self.query = nn.Linear(n_embd, n_embd, bias=False)
        self.key = nn.Linear(n_embd, n_kv_head * self.head_width, bias=False)
        self.value = nn.Linear(n_embd, n_kv_head * self.head_width, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)

    def init_weights(self, out_std: float) -> None:
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, std=INIT_STD)
        nn.init.normal_(self.out.weight, std=out_std)

    def forward(
        self, queries_from: Tensor, keys_from: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Attend from one sequence to another, or to itself: [B, T, D] → [B, T, D]."""
        q = self._heads(self.query(queries_from))
        cos, sin = phases(
            self.attend.positions(q.shape[2], q.device, documents), self.head_width, THETA
        )
        if documents is not None:
            # the same for all heads
            cos = cos.unsqueeze(1)
            sin = sin.unsqueeze(1)
        q = rotate(q, cos, sin)
        k = rotate(self._heads(self.key(keys_from)), cos, sin)
        v = self._heads(self.value(keys_from))
        y = self.attend(q, k, v, documents)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)  # [B, H, T, head width]


class SwiGLU(nn.Module):
    """A gated feed-forward layer: x [B, T, D] → down(silu(gate x) · up x)."""

    def __init__(self, n_embd: int, hidden: int | None) -> None:
        super().__init__()
        hidden = math.ceil(n_embd * 8 / 3 / 32) * 32 if hidden is None else hidden
        require_positive(mlp_hidden=hidden)
        self.gate = nn.Linear(n_embd, hidden, bias=False)
        self.up = nn.Linear(n_embd, hidden, bias=False)
        self.down = nn.Linear(hidden, n_embd, bias=False)

    def init_weights(self, out_std: float) -> None:
        for linear in (self.gate, self.up):
            nn.init.normal_(linear.weight, std=INIT_STD)
        nn.init.normal_(self.down.weight, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y
