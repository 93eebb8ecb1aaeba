"""A mixture of experts: the transformer with experts in place of feed-forward layers.

A router chooses the experts of each token:

    scores   softmax or sigmoid of x · W, float32 [N, E]
    chosen   the k experts with the largest scores + bias; no token is dropped
    weights  the scores of these, divided by their sum where k > 1 (else W would have no gradient)
    y        Σ weight · expert(x), in the order of the slots, + the shared experts (for every token)

What keeps experts in use, each over the positions of one micro-batch, in training only:

    balance   E · Σ_i f_i P_i, with f_i the fraction of the slots that expert i got and P_i the mean
              of its normalised score; 1 if they are even (Fedus et al. 2021, arXiv:2101.03961). f
              is that of the micro-batch, or of the whole step before, since a step's own is known
              after its last forward pass only
    router z  the mean of logsumexp(logits)² (Zoph et al. 2022, arXiv:2202.08906)
    bias      of an expert that got less than the mean in a step grows by `bias_rate`, else it
              shrinks; it only decides which experts are chosen, so it needs no loss (Wang et al.
              2024, arXiv:2408.15664)

The first two are summed over the layers, and weighed by the valid targets of the micro-batch, so
that they are a mean over a step's targets as the cross entropy is. They travel beside the residual
stream and are the second output. In evaluation they are zero, and the loss is the cross entropy.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.attention import SequenceMean, without_autocast
from lockstep.models.language import Decoder, require_positive, split_documents
from lockstep.models.transformer import (
    INIT_STD,
    Block,
    Embedding,
    Head,
    SwiGLU,
    attention_plan,
    mlp_plan,
)
from lockstep.torch_compat.fake_tensors import FakeTensor


class Mixture(Decoder):
    """A Llama-style mixture of experts: ids [B, T] → (logits [B, T, V], terms [2]).

    The two terms are balance and router z.

    Args:
        n_expert: E, experts in a layer.
        top_k: k, experts that a token goes to.
        expert_hidden: width of an expert's SwiGLU. Unset: that of the transformer, divided by top_k
            + n_shared.
        n_shared: experts that every token goes to, computed as one of n_shared · expert_hidden.
        balance: over what the load in the balance term is counted; "none" leaves the term out.
        balance_weight, z_weight: of the two terms; 0 leaves one out.
        bias_rate: γ, by which the bias of an expert changes after each step. 0: there is no bias.
        others: as in `Transformer`.
    """

    averages_in_forward = True  # the terms: `dp` would take them over parts of a micro-batch
    keeps_past = True

    def __init__(
        self,
        n_layer: int = 6,
        n_embd: int = 256,
        n_head: int = 4,
        n_kv_head: int | None = None,
        n_expert: int = 8,
        top_k: int = 2,
        expert_hidden: int | None = None,
        n_shared: int = 0,
        router: Literal["softmax", "sigmoid"] = "softmax",
        balance: Literal["micro_batch", "step", "none"] = "micro_batch",
        balance_weight: float = 0.01,
        z_weight: float = 0.001,
        bias_rate: float = 0.0,
        tie_embeddings: bool = False,
        dropout: float = 0.0,
        vocab_size: int = 256,
        block_size: int = 512,
    ) -> None:
        super().__init__()
        require_positive(
            n_layer=n_layer, n_embd=n_embd, vocab_size=vocab_size, n_expert=n_expert, top_k=top_k
        )
        _check_choices(n_expert, top_k, router, balance)
        if expert_hidden is None:
            expert_hidden = max(8, round(n_embd * 8 / 3 / (top_k + n_shared) / 8) * 8)
        self.block_size = block_size
        self.tie_embeddings = tie_embeddings
        self.n_shared = n_shared
        self.balance_weight = balance_weight if balance != "none" else 0.0
        self.z_weight = z_weight
        of_step = balance == "step" and balance_weight > 0
        self.embed = Embedding(vocab_size, n_embd, dropout)

        def block() -> MixtureBlock:
            chosen_by = Router(
                n_embd, n_expert, top_k, router, of_step=of_step, bias_rate=bias_rate
            )
            experts = Experts(n_expert, n_embd, expert_hidden)
            shared = SwiGLU(n_embd, n_shared * expert_hidden) if n_shared else None
            mlp = MixtureLayer(chosen_by, experts, shared)
            return MixtureBlock(n_embd, n_head, n_kv_head, None, dropout, n_layer, mlp=mlp)

        self.layers = nn.ModuleList(block() for _ in range(n_layer))
        self.head = Head(n_embd, vocab_size, tied=tie_embeddings)
        self.init_weights()

    def experts(self) -> list[tuple[str, nn.Module]]:
        return [
            (name, module) for name, module in self.named_modules() if isinstance(module, Experts)
        ]

    def tensor_plan(self) -> dict[str, str]:
        shared = mlp_plan("layers.*.mlp.shared") if self.n_shared else {}
        return {
            "embed": "vocabulary",
            **attention_plan("layers.*.attention"),
            "layers.*.mlp.experts": "experts",
            **shared,
            "head": "head",
            "token_losses": "loss",
        }

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        terms = self.loss_terms(outputs, batch)
        return terms["cross_entropy"] + terms["balance"] + terms["router_z"]

    def loss_terms(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the terms of the loss: 0-dim float32 sums over the valid targets, in nats."""
        logits, (balance, router_z) = outputs
        count = self.count(batch)
        return {
            "cross_entropy": self.token_losses.of(logits, batch["targets"]).sum(),
            "balance": self.balance_weight * count * balance,
            "router_z": self.z_weight * count * router_z,
        }


class MixtureBlock(Block):
    """A causal block with experts: (x [B, T, D], terms) → (x, terms).

    The terms of earlier blocks come in, and leave with this block's own added.
    """

    def forward(self, x: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        documents, before = split_documents(carried)
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, documents))
        y, terms = self.mlp(self.mlp_norm(x))
        numbers = () if documents is None else (documents.clone(),)
        return x + self.dropout(y), *numbers, before[0] + terms if before else terms


class MixtureLayer(nn.Module):
    """A feed-forward layer of experts: x [B, T, D] → (y [B, T, D], terms [2]).

    `shared` sees every token.
    """

    products = {"routed": "experts"}

    def __init__(self, router: "Router", experts: "Experts", shared: SwiGLU | None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def init_weights(self, out_std: float) -> None:
        self.router.init_weights()
        self.experts.init_weights(out_std)
        if self.shared is not None:
            self.shared.init_weights(out_std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights, terms = self.router(x)
        y = self.routed(x, chosen, weights, self.experts)
        return y if self.shared is None else y + self.shared(x), terms

    def routed(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Callable[..., Tensor]
    ) -> Tensor:
        """Return what the chosen experts make of x; a context-parallel run replaces this."""
        counts = expert_counts(chosen.flatten(), self.router.weight.shape[0])
        tokens = (each.flatten(0, 1) for each in (x, chosen, weights))
        y: Tensor = through_experts(experts, *tokens, counts)
        return y.view_as(x)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the numbers of rows differ in each pass
def through_experts(
    experts: Callable[[Tensor, list[int]], Tensor],
    tokens: Tensor,
    chosen: Tensor,
    weights: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the weighted sum of the experts' results for each token: [N, D] → [N, D].

    Results are added in the order of the token's slots.

    `experts` maps (rows in the order of experts, rows of each expert) to rows; chosen, weights: [N,
    k]; counts: [E].
    """
    order = chosen.flatten().argsort(stable=True)
    rows = _Dispatch.apply(tokens, order, chosen.shape[1])  # type: ignore[no-untyped-call]
    made = _InSlots.apply(experts(rows, _numbers(counts, len(order))), order)  # type: ignore[no-untyped-call]
    slots: Tensor = made.view(*chosen.shape, -1) * weights.unsqueeze(-1)
    return slots.sum(1).to(tokens.dtype)


class Router(nn.Module):
    """The choice of experts: x [B, T, D] → (chosen int64 [B, T, k], weights [B, T, k], terms [2]).

    What depends on a step's load takes it from `step_counts` by `end_step`
    (`lockstep.models.protocol`); if `of_step`, the balance term does, from the step before.
    """

    step_counts: Tensor
    load: Tensor
    bias: Tensor

    def __init__(
        self, n_embd: int, n_expert: int, top_k: int, score: str, *, of_step: bool, bias_rate: float
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.score = score
        self.of_step = of_step
        self.bias_rate = bias_rate
        self.weight = nn.Parameter(torch.empty(n_expert, n_embd))
        self.mean = SequenceMean()
        self.counts_steps = of_step or bias_rate > 0
        if self.counts_steps:
            self.register_buffer(
                "step_counts", torch.zeros(n_expert, dtype=torch.int64), persistent=False
            )
            self.register_buffer("load", torch.zeros(n_expert, dtype=torch.int64))
            self.register_buffer("bias", torch.zeros(n_expert))

    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)
        if self.counts_steps:
            for buffer in (self.step_counts, self.load, self.bias):
                buffer.zero_()

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the logits; a context-parallel run replaces this."""
        return F.linear(x, weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with without_autocast(x.device):
            logits = self.product(x.float(), self.weight.float())
            scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
            ranked = scores.detach() + self.bias if self.bias_rate else scores.detach()
            chosen = ranked.topk(self.top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
            if self.top_k > 1:
                weights = weights / weights.sum(-1, keepdim=True)
            return chosen, weights, self._terms(logits, scores, chosen)

    def _terms(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        if not self.training:
            return logits.new_zeros(2)
        load = counts = self.mean.total(expert_counts(chosen.flatten(), scores.shape[-1]))
        if self.counts_steps:
            self.step_counts += counts
            load = self.load if self.of_step else counts
        part = scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        fractions = load / load.sum().clamp(min=1)  # before the first step there is no load
        means = self.mean(torch.cat([part, logits.logsumexp(-1, keepdim=True).square()], -1))
        return torch.stack([len(load) * (fractions * means[:-1]).sum(), means[-1]])

    @torch.no_grad()
    def end_step(self, counts: Tensor) -> None:
        """Take up the counts of a whole step, int64 [E]."""
        self.load.copy_(counts)
        if self.bias_rate:
            below = counts.double().mean() - counts
            self.bias += (self.bias_rate * below.sign()).to(self.bias.dtype)


class Experts(nn.Module):
    """SwiGLUs side by side: (rows [n, D], rows of each expert) → [n, D].

    Their parameters are stacked in dim 0.
    """

    def __init__(self, n_expert: int, n_embd: int, hidden: int) -> None:
        super().__init__()
        require_positive(expert_hidden=hidden)
        self.gate = nn.Parameter(torch.empty(n_expert, hidden, n_embd))
        self.up = nn.Parameter(torch.empty(n_expert, hidden, n_embd))
        self.down = nn.Parameter(torch.empty(n_expert, n_embd, hidden))

    def init_weights(self, out_std: float) -> None:
        nn.init.normal_(self.gate, std=INIT_STD)
        nn.init.normal_(self.up, std=INIT_STD)
        nn.init.normal_(self.down, std=out_std)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Run each expert on its rows; one without rows has a gradient of zeros."""
        # unbind, not an index for each: its backward pass writes each expert's gradient once.
        weights = zip(
            torch.split(rows, counts),
            self.gate.unbind(),
            self.up.unbind(),
            self.down.unbind(),
            strict=True,
        )
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
                for x, gate, up, down in weights
            ]
        )


class _Dispatch(torch.autograd.Function):
    """Copies each token for each of its experts: [N, D] → [N·k, D].

    The copies are in the order of the experts.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return tokens[order // top_k]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        slots = torch.empty_like(gradients[0])
        # each row once, so that the result does not depend on the order of writes
        slots[order] = gradients[0]
        return slots.view(-1, ctx.top_k, slots.shape[-1]).sum(1), None, None


class _InSlots(torch.autograd.Function):
    """Puts rows from the order of experts into that of tokens and slots: [N·k, D] → [N·k, D]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        slots = torch.empty_like(rows)
        slots[order] = rows
        return slots

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradients[0][order], None


def expert_counts(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert is among the chosen: int64 [n] → int64 [E]."""
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add(0, chosen, torch.ones_like(chosen))


def _numbers(counts: Tensor, rows: int) -> list[int]:
    """Return the rows of each expert as numbers.

    In `lockstep plan`, where tensors have no values, the rows are divided evenly.
    """
    if isinstance(counts, FakeTensor):
        experts = len(counts)
        return [rows // experts + (index < rows % experts) for index in range(experts)]
    return counts.tolist()  # host waits for the device


def _check_choices(n_expert: int, top_k: int, router: str, balance: str) -> None:
    """Refuse choices that no mixture has."""
    if top_k > n_expert:
        what = (
            f"top_k={top_k} of n_expert={n_expert}: a token can't go to more experts than there are"
        )
        raise UsageError(what, where="model.args.top_k", fix=f"write 1 to {n_expert}")
    for key, value, known in (
        ("router", router, ("softmax", "sigmoid")),
        ("balance", balance, ("micro_batch", "step", "none")),
    ):
        if value not in known:
            what = f"{key}={value!r} is not known"
            raise UsageError(what, where=f"model.args.{key}", fix=f"write {', '.join(known)}")
