"""BDH, the Dragon Hatchling (Pathway 2025): linear attention over many sparse positive neurons, one set of weights.

    x = LN(embed(ids))                                       [B, T, D]
    n_layer times, with the same weights:
        s = relu(x @ encoder)                                [H, B, T, N]
        q = rope(s)
        a = LN(tril(q @ q.T, diagonal=-1) @ x)               strictly the past: position 0 sees nothing, LN(0) = 0
        u = dropout(s * relu(a @ encoder_v))
        x = LN(x + LN(concat_heads(u) @ decoder))
    logits = x @ head

N = mlp_multiplier · n_embd / n_head neurons a head. No LayerNorm has parameters.

The weights `encoder`, `encoder_v` [H, D, N] and `decoder` [H·N, D] are parameters of the model itself, and each layer
borrows them at each call (`shared_parameters`, see `lockstep.models.chain`); a `BDHLayer` owns none. Wrapping by block
therefore finds nothing to wrap: shard the three along a dim that divides, and gather them once per step. A pipeline
stage with any layer needs the three, and their gradients are summed over those stages.

Tensors of neurons are large (H·N = 128·D) and have the heads first: each product with a weight is then one batched
product over heads that copies neither the weight nor the neurons.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.language import LanguageModel, require_multiple, require_positive
from lockstep.models.past import sum_over_past
from lockstep.models.rotary import phases, rotate, without_autocast

THETA = 2.0**16
INIT_STD = 0.02


class BDH(LanguageModel):
    """The BDH language model: ids [B, T] → logits [B, T, V].

    Raises:
        UsageError: the number of neurons per head is not a whole, even number.
    """

    def __init__(
        self, n_layer: int = 6, n_embd: int = 256, n_head: int = 4, mlp_multiplier: int = 128, dropout: float = 0.1,
        vocab_size: int = 256, block_size: int = 512,
    ) -> None:  # fmt: skip
        super().__init__()
        require_positive(n_layer=n_layer, n_embd=n_embd, n_head=n_head, mlp_multiplier=mlp_multiplier)
        # Rotary positions rotate pairs of neurons.
        require_multiple("mlp_multiplier·n_embd", mlp_multiplier * n_embd, "2·n_head", 2 * n_head)
        self.block_size = block_size
        neurons = mlp_multiplier * n_embd // n_head
        self.encoder = nn.Parameter(torch.empty(n_head, n_embd, neurons))
        self.encoder_v = nn.Parameter(torch.empty(n_head, n_embd, neurons))
        self.decoder = nn.Parameter(torch.empty(n_head * neurons, n_embd))
        self.embed = NormalizedEmbedding(vocab_size, n_embd)
        self.layers = nn.ModuleList(BDHLayer(dropout) for _ in range(n_layer))
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw every parameter from N(0, 0.02), each on its own."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=INIT_STD)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the layers."""
        return [(f"layers.{i}", layer) for i, layer in enumerate(self.layers)]

    def segments(self) -> list[tuple[str, nn.Module]]:
        """Return the forward pass as a chain."""
        return [("embed", self.embed), *self.blocks(), ("head", self.head)]

    def shared_parameters(self) -> dict[str, dict[str, str]]:
        """Return the three large weights for every layer to borrow."""
        return {name: {weight: weight for weight in ("encoder", "encoder_v", "decoder")} for name, _ in self.blocks()}


class NormalizedEmbedding(nn.Embedding):
    """Normalised embedding: ids [B, T] → LN(embedding) [B, T, D]."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up and normalise."""
        return F.layer_norm(super().forward(input), (self.embedding_dim,))


class BDHLayer(nn.Module):
    """One layer: x [B, T, D] and the weights → x [B, T, D]. It owns no parameters."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, encoder: Tensor, encoder_v: Tensor, decoder: Tensor) -> Tensor:
        """Run the layer."""
        batch, length, width = x.shape
        heads, _, neurons = encoder.shape
        rows = batch * length
        x_heads = x.reshape(1, rows, width).expand(heads, -1, -1)
        s = torch.relu(torch.bmm(x_heads, encoder))
        a = attend_to_past(s.view(heads, batch, length, neurons), x)
        a = F.layer_norm(a, (width,)).view(heads, rows, width)
        u = self.dropout(s * torch.relu(torch.bmm(a, encoder_v)))
        # concat_heads(u) @ decoder, as a sum over heads in float32.
        y = torch.bmm(u, decoder.view(heads, neurons, width)).sum(0, dtype=torch.float32)
        y = F.layer_norm(y, (width,)).to(x.dtype).view_as(x)
        return F.layer_norm(x + y, (width,))


def attend_to_past(s: Tensor, x: Tensor) -> Tensor:
    """Return tril(q qᵀ, −1) x with q = rope(s): s [H, B, T, N], x [B, T, D] → [H, B, T, D].

    Under fp16 it computes in float32: entries of q qᵀ are sums of N mostly positive products, and exceed fp16's
    65504. The range of bf16 suffices.
    """
    heads, batch, length, neurons = s.shape
    dtype = torch.bfloat16 if s.dtype == torch.bfloat16 else torch.float32
    with without_autocast(x.device):
        cos, sin = phases(length, neurons, THETA, x.device)
        q = rotate(s, cos, sin, dtype).view(heads * batch, length, neurons)
        values = x.to(dtype).expand(heads, -1, -1, -1).reshape(heads * batch, length, -1)
        return sum_over_past(q, values).view(heads, batch, length, -1)
