"""Makes an objective of a loss function, or of the loss in a model's outputs.

Whatever its reduction is, the objective's loss becomes a sum over valid targets. Of three targets
with the losses 1, 2 and 3, one of them ignored:

    reduction "sum"    3.0        as it is
    reduction "none"   1, 2, 0    summed
    reduction "mean"   1.5        times its count, 2: the model's own, or that of `ignore_index`, or
                                  the one that torch's loss functions show; else the samples

Tests: tests/models/test_offers.py, tests/models/test_builders.py
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.batch_parts import logits_of, num_samples, targets_of
from lockstep.models.forward_arguments import Inputs
from lockstep.models.loss_arguments import FurtherArguments, name_of
from lockstep.models.loss_modules import module_of
from lockstep.models.objective import Objective, Observed


def objective_of_loss_fn(
    inputs: Inputs, loss_fn: Callable[..., Tensor], declared: Callable[[Any], int | Tensor] | None
) -> Objective:
    """Return the objective of a loss function of (outputs, targets); `declared` counts targets."""
    count = declared or _count_for(loss_fn)
    objective = _reduced(
        inputs,
        _with_targets(loss_fn),
        str(getattr(loss_fn, "reduction", "mean")),
        count or num_samples,
        observes=count is None,
    )
    return replace(objective, module=module_of(loss_fn), function=name_of(loss_fn))


def objective_of_outputs(
    inputs: Inputs,
    reduction: str,
    declared: Callable[[Any], int | Tensor] | None,
    *,
    must_be_told: bool,
) -> Objective:
    """Return the objective of a model whose forward pass computes the loss."""
    count = declared or num_samples
    objective = _reduced(inputs, _loss_in_outputs, reduction, count, observes=declared is None)
    return replace(objective, in_outputs=True, must_be_told=must_be_told)


def _reduced(
    inputs: Inputs,
    loss: Callable[[Any, Any], Tensor],
    reduction: str,
    count: Callable[[Any], int | Tensor],
    *,
    observes: bool,
) -> Objective:
    """Return an objective whose loss is a sum, whatever its function's reduction is."""
    if reduction == "sum":
        return Objective(inputs, lambda outputs, batch: loss(outputs, batch).float(), count)
    if reduction == "none":
        return Objective(inputs, lambda outputs, batch: loss(outputs, batch).float().sum(), count)
    if reduction in ("mean", "batchmean"):  # nn.KLDivLoss: a sum, divided by the samples

        def one_number(outputs: Any, batch: Any) -> Tensor:
            mean = loss(outputs, batch)
            if not isinstance(mean, Tensor):
                raise _no_tensor(mean)
            if mean.ndim:
                what = f"the loss has the shape {tuple(mean.shape)}, but a mean is one number"
                raise UsageError(
                    what,
                    fix='declare it with reduction = "none" (it is summed), or return one number',
                )
            return mean.float()

        return Objective(
            inputs, one_number, count, is_mean=True, observed=Observed() if observes else None
        )
    raise UsageError(f"a loss with reduction {reduction!r}", fix="use mean, batchmean, sum or none")


def _no_tensor(returned: Any) -> UsageError:
    what = f"the loss function returned {returned!r:.60}, not a tensor"
    fix = "return the loss itself: without .item(), float(…) or .backward(), which the step does"
    return UsageError(what, where="loss_fn", fix=fix)


def _with_targets(loss_fn: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    """Return a loss of (outputs, batch), which takes logits and targets out of them."""
    over_classes = isinstance(loss_fn, nn.CrossEntropyLoss)
    further = FurtherArguments(loss_fn)

    def loss(outputs: Any, batch: Any) -> Tensor:
        """Call the loss function, with [B · T, V] outputs for [B, T, V] where that is meant."""
        outputs = logits_of(outputs)
        targets = targets_of(batch)
        if (
            over_classes
            and isinstance(outputs, Tensor)
            and outputs.shape[:-1] == targets.shape
            and targets.ndim > 1
        ):
            fits_torch = targets.ndim > 2 and outputs.shape[:1] + outputs.shape[2:] == targets.shape
            # [B, T, V] and [B, T], and not torch's [B, C, H, W] and [B, H, W] with equal sizes
            if not fits_torch:
                outputs = outputs.flatten(0, -2)
                targets = targets.flatten()
        return loss_fn(outputs, targets, **further.of(batch))

    return loss


def _count_for(loss_fn: Callable[..., Tensor]) -> Callable[[Any], int | Tensor] | None:
    """Return the count that a loss function of torch's kind implies; None if it implies none."""
    ignored = getattr(loss_fn, "ignore_index", None)
    if ignored is None:
        return None
    weight = getattr(loss_fn, "weight", None)

    def count(batch: Any) -> int | Tensor:
        """Return the number of targets in torch's mean, or the sum of their weights."""
        targets = targets_of(batch)
        if not isinstance(targets, Tensor):
            what = (
                f"no targets for {type(loss_fn).__name__} in a batch of the type"
                f" {type(batch).__name__}"
            )
            if isinstance(batch, tuple | list):
                what += f" with {len(batch)} member{'s' * (len(batch) != 1)}"
            fix = "let a sample be (inputs, targets), or a dict with `inputs` and `targets`"
            raise UsageError(what, where="the samples that the trainer was given", fix=fix)
        if targets.is_floating_point():  # class probabilities: every sample counts
            return num_samples(batch)
        valid: Tensor = targets != ignored
        if weight is not None:  # torch's weighted mean divides by the weights of the targets
            return torch.where(valid, weight.to(targets.device)[targets.clamp(min=0)], 0.0).sum()
        return valid.sum()

    return count


def _loss_in_outputs(outputs: Any, _batch: Any) -> Tensor:
    """Return the loss that a model's outputs hold."""
    if isinstance(outputs, Tensor) and outputs.ndim == 0:
        return outputs
    if isinstance(outputs, dict | Mapping):
        loss = outputs.get("loss")
    else:
        loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, tuple):
        numbers = [member for member in outputs if isinstance(member, Tensor) and not member.ndim]
        loss = numbers[0] if len(numbers) == 1 else None  # (logits, loss), as nanoGPT returns them
    if not isinstance(loss, Tensor):
        what = f"the model returned {type(outputs).__name__}, in which there is no loss"
        fix = (
            'pass a loss_fn, return {"loss": …}, or give the model loss(outputs, batch) and'
            " count(batch)"
        )
        if type(outputs).__module__.startswith("transformers."):
            fix = (
                'models of transformers compute it where the batch has "labels"; or pass a loss_fn'
            )
        raise UsageError(what, fix=fix)
    return loss
