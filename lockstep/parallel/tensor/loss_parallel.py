"""Loss parallel: the cross entropy of logits whose vocabulary is cut over the axis `tensor`.

No rank has all of them. For each position the ranks gather two numbers of each: the log-sum-exp of
its logits, and the logit of the target if it is there (Shoeybi et al. 2019, Megatron-LM,
section 3). One position with the logits [1, 2, 3, 4] and the target 2, on two ranks:

                           rank 0                      rank 1
    logits                 [1, 2]                      [3, 4]
    their log-sum-exp      2.3133                      4.3133
    the target's logit     0, as it is not here        3
    loss, on each          log(e^2.3133 + e^4.3133) − (0 + 3) = 1.4402
    gradient               [0.0321, 0.0871]            [-0.7631, 0.6439]

The gradient is the softmax of all four logits, less 1 at the target: each rank knows the sum, so it
needs no message. (`blocks`, where bits count: each block's log-sum-exp is gathered.)

With label smoothing ε the target has 1 − ε in place of 1, and ε/V of each logit is subtracted: the
sum of each rank's logits is gathered, too. A z-loss of weight z adds z · log(Z)², with the
log-sum-exp of all as log(Z), and its gradient, 2 · z · log(Z) times the softmax.

Tests: tests/parity/test_tensor.py, tests/models/test_token_losses.py,
tests/parallel/test_worked_examples.py
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.models.batch_parts import IGNORED_TARGET
from lockstep.models.language import logits_in
from lockstep.models.objective import Objective
from lockstep.models.out_of_range import TargetOutOfBoundsError
from lockstep.models.sums import logsumexp_in_order, sum_in_order
from lockstep.parallel.tensor.layer_cut import LayerCut
from lockstep.parallel.tensor.products import in_blocks
from lockstep.torch_compat.fake_tensors import FakeTensor


def cut_token_losses(
    logits: Tensor, targets: Tensor, cut: LayerCut, terms: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Return the cross entropy of each target in nats, float32 [B·T]; 0 if it does not count.

    `logits` are this rank's part of the vocabulary, [B, T, V / ranks]. `terms` are those of
    `TokenLosses`: label smoothing and the z-loss. A target outside of the vocabulary gives nan on a
    GPU, where the host does not look.

    Raises:
        TargetOutOfBoundsError: a target on the CPU is outside of the vocabulary.
    """
    return _TokenLosses.apply(logits, targets.flatten(), cut, *terms)  # type: ignore[no-untyped-call,no-any-return]


def with_whole_logits(objective: Objective, cut: LayerCut) -> Objective:
    """Return an objective that shows metrics and predictions all logits of the vocabulary."""
    if cut.group is None or not cut.keeps_logits:
        return objective

    def gathered(outputs: Any) -> Any:
        logits = logits_in(outputs)
        return objective.gather_outputs(cut.gathered(logits, logits.ndim - 1))

    return replace(objective, gather_outputs=gathered)


class _TokenLosses(torch.autograd.Function):
    """The loss of each position, and its gradient for the logits that are here."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, cut: LayerCut, smoothing: float, z_loss: float
    ) -> Tensor:
        """Return each position's loss, from two numbers that each rank gathers, or three."""
        width = logits.shape[-1]
        blocks = in_blocks(logits, cut.blocks_of(width))
        here = targets - cut.rank * width  # the target's place among this rank's logits
        is_here = (here >= 0) & (here < width)
        own = (
            logits.reshape(-1, width)
            .gather(1, torch.where(is_here, here, 0)[:, None])[:, 0]
            .float()
        )
        sums = [block.float().logsumexp(-1) for block in blocks]
        plain = [block.float().sum(-1) for block in blocks] if smoothing else []
        of_ranks = torch.stack([*sums, *plain, torch.where(is_here, own, 0.0)])[None]
        if cut.group is not None:
            of_ranks = cut.gathered(of_ranks, 0)  # [ranks, blocks + 1, B · T], or 2 · blocks + 1
        total = logsumexp_in_order(of_ranks[:, : len(blocks)].flatten(0, 1))
        of_target = of_ranks[:, -1].sum(0)  # one rank's, and zeros
        counted = targets != IGNORED_TARGET
        outside = counted & ((targets < 0) | (targets >= width * cut.ranks))
        if outside.device.type == "cpu" and not isinstance(outside, FakeTensor) and outside.any():
            raise TargetOutOfBoundsError(int(targets[outside][0]), width * cut.ranks)
        ctx.save_for_backward(logits, here, is_here, counted, total)
        ctx.count = len(blocks)
        ctx.terms = (smoothing, z_loss)
        ctx.vocabulary = width * cut.ranks
        losses = total - of_target
        if smoothing:
            mean = sum_in_order(of_ranks[:, len(blocks) : -1].flatten(0, 1)) / ctx.vocabulary
            losses = losses + smoothing * (of_target - mean)
        if z_loss:
            losses = losses + z_loss * total.square()
        return torch.where(counted, losses, 0.0).masked_fill(outside, torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of this rank's columns of the logits, [tokens, V / ranks].

        It is the softmax, less 1 at the target. `total`, the log of the sum over the columns of
        all ranks, is known already, so no rank needs those of another.
        """
        logits, here, is_here, counted, total = ctx.saved_tensors
        smoothing, z_loss = ctx.terms
        scale = torch.where(counted, gradients[0], 0.0)[:, None]
        of_softmax = scale * (1 + 2 * z_loss * total[:, None]) if z_loss else scale
        # the softmax times the gradient of the loss, and below less that at the target
        pulls = []
        for block in in_blocks(logits, ctx.count):
            softmax = (block.float() - total[:, None]).exp_()
            block_pull = softmax.mul_(of_softmax)
            if smoothing:
                block_pull.sub_(scale, alpha=smoothing / ctx.vocabulary)
            pulls.append(block_pull.to(logits.dtype))
        pull = pulls[0] if ctx.count == 1 else torch.stack(pulls, 1).flatten(1)
        at = torch.where(is_here, here, 0)[:, None]
        of_target = -scale * (1 - smoothing) if smoothing else -scale
        pull.scatter_add_(1, at, torch.where(is_here[:, None], of_target, 0.0).to(logits.dtype))
        return pull.view(logits.shape), None, None, None, None
