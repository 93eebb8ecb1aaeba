"""The Free Transformer (Fleuret 2025): a decoder that is conditioned on a random latent.

It first draws the latent, and then continues accordingly.

    blocks 1 … split_layer             causal                                        → X
    latent                             ℓ = encoder(X), H_z logits; bits B_h ~ Bernoulli(σ(ℓ_h))
                                       d = Σ B_h·2^h (int64), Y = onehot(d) ∈ R^(2^H_z)
                                       Z = Y + G − stop_gradient(G)
                                       G_c = Π_h P(B_h = bit_h(c)) for every code c
                                       r = W_post · Z
    block split_layer + 1              queries from X, keys and values from X + r
    the other blocks, norm, head       as in the baseline                            → logits

Loss, summed over valid targets: CE_t + beta · max(0, KL_t − kappa), with KL_t = Σ_h [p ln 2p +
(1−p) ln 2(1−p)], the divergence of position t's bits from fair coins. It needs ℓ, which is
therefore passed on through the later segments beside the residual stream, and is the second output.

Neither Y nor G is materialised. The value of r is a row of W_post, an ordinary lookup, whose
gradient W_post gets. Only the gradient to the bits goes through G, as the outer product of two
halves (`_ThroughCodes`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.attention import SequenceBernoulli, without_autocast
from lockstep.models.batch_parts import IGNORED_TARGET
from lockstep.models.chain import run_segments
from lockstep.models.language import (
    Decoder,
    draw_token,
    require_positive,
    split_documents,
    with_carried,
)
from lockstep.models.transformer import (
    INIT_STD,
    NORM_EPS,
    Attention,
    Block,
    Embedding,
    Head,
    SwiGLU,
    block_plan,
    decoder_plan,
)

MAX_LATENT_BITS = 20
_CHUNK_NUMEL = 2**24  # elements of the scores of codes that the backward pass holds at once


class FreeTransformer(Decoder):
    """The Free Transformer: ids [B, T] → (logits [B, T, V], z_logits [B, T, H_z]).

    In mode "inference" it returns the logits alone.

    Args:
        latent_bits: H_z; the latent of a position is one of 2^H_z codes.
        beta: weight of the divergence.
        kappa: nats per position that the latent may carry at no cost. Default: ln 2 / 2, half a
            bit.
        split_layer: how many layers come before the latent. Unset: half of them.
        others: as in `Transformer`.
    """

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
        latent_bits: int = 16,
        beta: float = 1.0,
        kappa: float = math.log(2) / 2,
        split_layer: int | None = None,
    ) -> None:
        super().__init__()
        require_positive(n_layer=n_layer, n_embd=n_embd, vocab_size=vocab_size)
        self.split_layer = n_layer // 2 if split_layer is None else split_layer
        _check_latent(latent_bits, self.split_layer, n_layer, n_embd)
        self.block_size = block_size
        self.tie_embeddings = tie_embeddings
        self.latent_bits = latent_bits
        self.beta = beta
        self.kappa = kappa
        sizes = (n_embd, n_head, n_kv_head, mlp_hidden, dropout, n_layer)
        self.embed = Embedding(vocab_size, n_embd, dropout)
        self.layers = nn.ModuleList(
            InjectedBlock(*sizes) if i == self.split_layer else Block(*sizes)
            for i in range(n_layer)
        )
        self.latent = CodeLatent(n_embd, n_head, n_kv_head, mlp_hidden, latent_bits)
        self.head = Head(n_embd, vocab_size, tied=tie_embeddings)
        self.init_weights()

    def blocks(self) -> list[tuple[str, nn.Module]]:
        layers = super().blocks()
        return [*layers[: self.split_layer], ("latent", self.latent), *layers[self.split_layer :]]

    def tensor_plan(self) -> dict[str, str]:
        return decoder_plan() | block_plan("latent")

    def forward(
        self,
        ids: Tensor,
        document_ids: Tensor | None = None,
        *,
        mode: Literal["training", "inference"] = "training",
        codes: Tensor | None = None,
        loss_targets: Tensor | None = None,
    ) -> Any:
        """Return the logits, and in mode "training" those of the latent.

        With `loss_targets` the losses stand in the place of the logits. Mode "inference" takes the
        latent of each position from `codes`, int64 [B, T], or draws it from a uniform prior.
        """
        if mode == "training":
            return super().forward(ids, document_ids, loss_targets=loss_targets)
        if mode != "inference":
            raise UsageError(f"mode={mode!r}", fix="write training or inference")
        if codes is None:
            codes = torch.randint(2**self.latent_bits, ids.shape, device=ids.device)
        return run_segments(
            self,
            self.segments(),
            self.shared_parameters(),
            ids,
            keywords={"latent": {"codes": codes}},
        )

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        terms = self.loss_terms(outputs, batch)
        return terms["cross_entropy"] + terms["penalty"]

    def loss_terms(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the terms of the loss, each a 0-dim float32 sum over valid targets in nats.

        Kl is for reports.
        """
        logits, z_logits = outputs
        valid = batch["targets"] != IGNORED_TARGET
        kl = torch.where(valid, kl_from_fair_coins(z_logits), 0.0)
        excess = torch.where(valid, F.relu(kl - self.kappa), 0.0)
        return {
            "cross_entropy": self.token_losses.of(logits, batch["targets"]).sum(),
            "penalty": self.beta * excess.sum(),
            "kl": kl.detach().sum(),
        }

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Continue ids [1, T], and return [1, T + num_tokens].

        The global random state is not changed.

        Each position's latent is drawn once, when the position is first read, and keeps its value.
        """
        generator = torch.Generator(ids.device).manual_seed(seed)
        codes = torch.empty(ids.shape[0], 0, dtype=torch.int64, device=ids.device)
        for _ in range(num_tokens):
            new = (ids.shape[0], ids.shape[1] - codes.shape[1])
            drawn = torch.randint(2**self.latent_bits, new, generator=generator, device=ids.device)
            codes = torch.cat((codes, drawn), 1)
            logits = self(
                ids[:, -self.block_size :], mode="inference", codes=codes[:, -self.block_size :]
            )
            token = draw_token(logits[:, -1], generator, temperature=temperature, top_k=top_k)
            ids = torch.cat((ids, token), 1)
        return ids


class InjectedBlock(Block):
    """The block after the latent: (x, r, …) → x.

    Its queries come from x, its keys and values from x + r.
    """

    def forward(self, x: Tensor, *carried: Tensor) -> Tensor | tuple[Tensor, ...]:
        documents, (r, *others) = split_documents(carried)
        attended = self.attention(self.attention_norm(x), self.attention_norm(x + r), documents)
        return with_carried(self._add(x, attended), (*carried[: documents is not None], *others))


class CodeLatent(nn.Module):
    """The latent: x [B, T, D] → (x, r [B, T, D], z_logits [B, T, H_z]).

    It consists of an encoder, a draw and a projection.

    The encoder is one block that is not causal. Its queries are one learned vector at every
    position, so positions enter only through the rotary embedding of queries and keys. The numbers
    of documents are passed on after x.
    """

    products = {"queries": "query", "injected": "post"}

    def __init__(
        self,
        n_embd: int,
        n_head: int,
        n_kv_head: int | None,
        mlp_hidden: int | None,
        latent_bits: int,
    ) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(n_embd))
        self.query_norm = nn.RMSNorm(n_embd, eps=NORM_EPS)
        self.key_norm = nn.RMSNorm(n_embd, eps=NORM_EPS)
        self.attention = Attention(n_embd, n_head, n_kv_head, causal=False)
        self.mlp_norm = nn.RMSNorm(n_embd, eps=NORM_EPS)
        self.mlp = SwiGLU(n_embd, mlp_hidden)
        self.readout_norm = nn.RMSNorm(n_embd, eps=NORM_EPS)
        self.readout = nn.Linear(n_embd, latent_bits, bias=False)
        self.draw = SequenceBernoulli()
        self.post = nn.Parameter(torch.empty(2**latent_bits, n_embd))

    def init_weights(self) -> None:
        for norm in (self.query_norm, self.key_norm, self.mlp_norm, self.readout_norm):
            nn.init.ones_(norm.weight)
        for weight in (self.query, self.readout.weight, self.post):
            nn.init.normal_(weight, std=INIT_STD)
        self.attention.init_weights(INIT_STD)
        self.mlp.init_weights(INIT_STD)

    def queries(self, x: Tensor, query: Tensor) -> Tensor:
        """Return the learned vector at each position of x; a context-parallel run replaces this."""
        return query.expand_as(x)

    def injected(self, codes: Tensor, z_logits: Tensor, post: Tensor) -> Tensor:
        """Return r, [B, T, D]; a context-parallel run replaces this."""
        r: Tensor = _ThroughCodes.apply(F.embedding(codes, post), *code_halves(z_logits), post)  # type: ignore[no-untyped-call]
        return r

    def forward(
        self, x: Tensor, *documents: Tensor, codes: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Encode and draw; with `codes` given, skip the encoder and return (x, r)."""
        if codes is not None:
            return x.clone(), F.embedding(codes, self.post)
        z_logits = self.encode(x, *documents).float()
        with without_autocast(x.device):
            codes = draw_codes(z_logits, self.draw)
            r = self.injected(codes, z_logits, self.post)
        return x.clone(), *(numbers.clone() for numbers in documents), r, z_logits

    def encode(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits of the latent: x [B, T, D] → z_logits [B, T, H_z]."""
        query = self.queries(x, self.query)
        h = query + self.attention(self.query_norm(query), self.key_norm(x), documents)
        h = h + self.mlp(self.mlp_norm(h))
        z_logits: Tensor = self.readout(self.readout_norm(h))
        return z_logits


def draw_codes(z_logits: Tensor, bernoulli: Callable[[Tensor], Tensor] = torch.bernoulli) -> Tensor:
    """Draw bit h with probability σ(z_logits[…, h]), and return the bits as a number: int64 [B, T].

    It uses integers: a sum of powers of two in bf16 is wrong for nearly all codes.
    """
    bits = bernoulli(torch.sigmoid(z_logits.detach().float())).long()
    return (bits << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)


def code_halves(z_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the low and the high half of the bits.

    Their shapes are [B, T, 2^⌊H/2⌋] and [B, T, 2^⌈H/2⌉], in float32.

    G[…, high · 2^⌊H/2⌋ + low] is the product of the two.
    """
    half = z_logits.shape[-1] // 2
    return _code_probabilities(z_logits[..., :half]), _code_probabilities(z_logits[..., half:])


def _code_probabilities(logits: Tensor) -> Tensor:
    """Return the probability of each code of these bits: [..., H] → [..., 2^H].

    P(code) = Π_h P(B_h = bit_h(code)).
    """
    bits = logits.shape[-1]
    codes = torch.arange(2**bits, device=logits.device)
    # [H, 2^H]
    is_set = (codes >> torch.arange(bits, device=logits.device)[:, None] & 1).to(logits.dtype)
    return (F.logsigmoid(logits) @ is_set + F.logsigmoid(-logits) @ (1 - is_set)).exp()


def kl_from_fair_coins(z_logits: Tensor) -> Tensor:
    """Return KL_t = Σ_h [p ln 2p + (1−p) ln 2(1−p)] in nats: [..., H] → float32 [...]."""
    z_logits = z_logits.float()
    p = torch.sigmoid(z_logits)
    log_p = F.logsigmoid(z_logits)
    log_q = F.logsigmoid(-z_logits)
    return (p * (log_p + math.log(2)) + (1 - p) * (log_q + math.log(2))).sum(-1)


class _ThroughCodes(torch.autograd.Function):
    """The straight-through estimator, which returns r unchanged.

    Its gradient is that of W_post·(G − stop_gradient(G)).

    With g the gradient of r, code c scores g·W_post[c]. The gradients of the two halves of G are
    that table of scores [2^high, 2^low] times the other half. It is made for a few positions at a
    time and discarded.
    """

    @staticmethod
    def forward(ctx: Any, r: Tensor, low: Tensor, high: Tensor, post: Tensor) -> Tensor:
        ctx.save_for_backward(low, high, post)
        return r.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return r's gradient as it is, and those of both halves, a chunk of rows at a time."""
        low, high, post = ctx.saved_tensors
        g = gradients[0]
        g_low = torch.empty_like(low)
        g_high = torch.empty_like(high)
        rows = [tensor.flatten(0, -2) for tensor in (g, low, high, g_low, g_high)]
        size = max(1, _CHUNK_NUMEL // post.shape[0])
        for g_, low_, high_, g_low_, g_high_ in zip(
            *(tensor.split(size) for tensor in rows), strict=True
        ):
            scores = (
                (g_.to(post.dtype) @ post.T).to(low.dtype).view(-1, high.shape[-1], low.shape[-1])
            )
            g_low_.copy_(torch.bmm(high_[:, None], scores).squeeze(1))
            g_high_.copy_(torch.bmm(scores, low_[:, :, None]).squeeze(2))
        return g, g_low, g_high, None


def _check_latent(latent_bits: int, split_layer: int, n_layer: int, n_embd: int) -> None:
    """Refuse a latent that has too many codes, or no layer behind it."""
    require_positive(latent_bits=latent_bits)
    if latent_bits > MAX_LATENT_BITS:
        what = (
            f"latent_bits={latent_bits} makes 2^{latent_bits} = {2**latent_bits:,} codes; at most"
            f" {MAX_LATENT_BITS} bits are allowed"
        )
        why = f"each code has a vector of {n_embd}: {2**latent_bits * n_embd:,} parameters"
        raise UsageError(
            what, where="model.args.latent_bits", why=why, fix="16 bits are the published size"
        )
    if not 0 <= split_layer < n_layer:
        what = f"split_layer={split_layer} leaves no layer behind the latent, of n_layer={n_layer}"
        raise UsageError(what, where="model.args.split_layer", fix=f"choose 0 to {n_layer - 1}")
