"""The loss `dpo`: direct preference optimization, over pairs of answers.

    loss_fn: {name: dpo, args: {beta: 0.1}}
    data: {name: preferences, args: {…}}

Of each pair, the answer that was chosen becomes likelier than it is to a frozen reference, and the
rejected one less likely (Rafailov et al. 2023, arXiv:2305.18290). With log π, the sum of the
log-likelihoods of an answer's tokens:

    margin    (log π(chosen) − log ref(chosen)) − (log π(rejected) − log ref(rejected))
    loss      −log sigmoid(beta · margin), a mean over the pairs of a step

Other losses of a margin are chosen by `loss_type`; with m = beta · margin and ε = label_smoothing:

    sigmoid         −(1 − ε) · log sigmoid(m) − ε · log sigmoid(−m)
    robust          (−(1 − ε) · log sigmoid(m) + ε · log sigmoid(−m)) / (1 − 2ε)  arXiv:2403.00409
    sigmoid_norm    −log sigmoid(beta · margin of means over tokens)              arXiv:2411.15124
    hinge           max(0, 1 − m)                                                 arXiv:2305.10425
    ipo             (margin of means over tokens − 1 / (2 · beta))²               arXiv:2310.12036

To each of them `nll_weight` adds the negative log-likelihood of the chosen answer, a mean over its
tokens (arXiv:2404.19733).

The reference is the model before training. A model with adapters is its own: the reference is
computed without them. Of any other model a frozen copy is kept, in full on each rank that computes
losses; no checkpoint has it, since a run that goes on makes it anew.

A sequence of T tokens holds up to P pairs, as the documents 2p (chosen) and 2p + 1 (rejected):

    input_ids, targets, document_ids    int64 [B, T]
    pairs                               float32 [B, P], 1 where a sequence has a pair of this number

Tests: tests/models/test_preferences.py, tests/parity/test_preferences.py
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.checks_distributed import DPO_ON_PARTS
from lockstep.config.checks_pairs import ADAPTERS_IN_STAGES
from lockstep.errors import UsageError, did_you_mean, refuse
from lockstep.models.adapters import has_adapters, without_adapters
from lockstep.models.batch_parts import IGNORED_TARGET, logits_of
from lockstep.models.language import LanguageModel

PAIRS = "pairs"  # the part of a batch that says which pairs a sequence has
_SMOOTHED = ("sigmoid", "robust")  # what label_smoothing is an argument of
LOSS_TYPES = (*_SMOOTHED, "sigmoid_norm", "hinge", "ipo")


@dataclass(frozen=True)
class _AnswerSums:
    """Holds sums over the tokens of the answers of a batch, [B, 2 P]; chosen, rejected, in turn.

    Attributes:
        likelihoods: the log-likelihoods of the tokens.
        ahead: these, less those of the reference.
        counts: the number of the tokens; 1 where a sequence has no pair of this number.
    """

    likelihoods: Tensor
    ahead: Tensor
    counts: Tensor

    def margins(self) -> Tensor:
        """Return by how much more the chosen answers have gained than the rejected ones, [B, P]."""
        return self.ahead[:, 0::2] - self.ahead[:, 1::2]

    def margins_of_means(self) -> Tensor:
        """Return the same of means over the tokens of each answer, [B, P]."""
        means = self.ahead / self.counts
        return means[:, 0::2] - means[:, 1::2]

    def chosen_losses(self) -> Tensor:
        """Return the negative log-likelihood of each chosen answer, a mean over its tokens."""
        return -(self.likelihoods / self.counts)[:, 0::2]


class DirectPreferences(nn.Module):
    """The loss of direct preference optimization.

    Args:
        beta: how much a margin counts: with a large one the model stays near its reference.
        label_smoothing: the share of pairs that are taken to be labelled wrongly (cDPO).
        loss_type: one of `LOSS_TYPES`, the loss of a margin.
        nll_weight: how much the negative log-likelihood of the chosen answer counts beside it.
        reference: the reference model, or the name of one as `model.name` has it; unset: the model
            before training.
    """

    reduction = "sum"  # over pairs

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        nll_weight: float = 0.0,
        reference: nn.Module | str | None = None,
    ) -> None:
        super().__init__()
        check_arguments(beta, label_smoothing, loss_type, nll_weight, reference)
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.loss_type = loss_type
        self.nll_weight = nll_weight
        self.reference: nn.Module | None = None
        self._is_given = reference is not None
        if reference is not None:
            named = _named(reference) if isinstance(reference, str) else reference
            self.reference = _frozen(named)
        # In a tuple, so that its parameters are not this module's.
        self._adapted: tuple[nn.Module, ...] = ()
        # What the reference says of a batch that a metric has seen, until its loss is computed.
        self._seen: tuple[Tensor, Tensor] | None = None

    def bind_model(self, model: nn.Module) -> None:
        """Take the reference from the model that is to be trained, before it is placed.

        Raises:
            UsageError: it is not a causal language model, or has no values that could be copied.
        """
        if not isinstance(model, LanguageModel):
            what = (
                f"the loss dpo compares likelihoods of texts, and {type(model).__name__} is not a"
                " causal language model"
            )
            fix = "name one: model.name: hf:FOLDER"
            raise UsageError(what, where="loss_fn", fix=fix)
        if self._is_given:
            return
        self._adapted = (model,) if has_adapters(model) else ()
        self.reference = None if self._adapted else _frozen(_copied(model))

    def forward(
        self,
        outputs: Tensor,
        targets: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        pairs: Tensor,
    ) -> Tensor:
        """Return the sum of the losses of all pairs.

        Args:
            outputs: the model's logits, [B, T, V].
            targets: [B, T], as the rest of the batch.
        """
        sums = self._sums(outputs, targets, input_ids, document_ids, pairs)
        self._seen = None
        losses = self._of_margins(sums)
        if self.nll_weight:
            losses = losses + self.nll_weight * sums.chosen_losses()
        return (losses * pairs).sum()

    def _of_margins(self, sums: _AnswerSums) -> Tensor:
        """Return the loss of each pair's margin, [B, P]."""
        if self.loss_type == "ipo":
            return (sums.margins_of_means() - 1 / (2 * self.beta)).square()
        if self.loss_type == "sigmoid_norm":
            return -F.logsigmoid(self.beta * sums.margins_of_means())
        margins = self.beta * sums.margins()
        if self.loss_type == "hinge":
            return (1 - margins).relu()
        smoothing = self.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(margins)
        if not smoothing:
            return losses
        of_others = smoothing * F.logsigmoid(-margins)
        if self.loss_type == "robust":
            return (losses + of_others) / (1 - 2 * smoothing)
        return losses - of_others

    def accuracy(
        self,
        outputs: Tensor,
        targets: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        pairs: Tensor,
    ) -> Tensor:
        """Return whether the margin of each pair is above 0, a metric: float32 [pairs]."""
        margins = self._sums(outputs, targets, input_ids, document_ids, pairs).margins()
        return (margins > 0).float()[pairs > 0]

    def _sums(
        self,
        outputs: Tensor,
        targets: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        pairs: Tensor,
    ) -> _AnswerSums:
        """Return the sums over the answers of a batch."""
        if input_ids.shape != document_ids.shape:
            refuse([DPO_ON_PARTS])
        # Once for a batch: where ranks have shards of the reference they compute it together.
        if self._seen is None or self._seen[0] is not input_ids:
            reference = logits_of(self._reference_outputs(input_ids, document_ids))
            self._seen = (input_ids, log_likelihoods(reference, targets))
        likelihoods = log_likelihoods(outputs, targets)
        # [B, T] → the sum of each document, [B, 2 P]; what fills a sequence is none of them.
        count = 2 * pairs.shape[1]
        documents = torch.arange(count, device=document_ids.device)
        of_document = (document_ids[..., None] == documents).to(likelihoods.dtype)

        def summed(values: Tensor) -> Tensor:
            return (values[..., None] * of_document).sum(1)

        counts = summed((targets != IGNORED_TARGET).to(likelihoods.dtype)).clamp(min=1)
        ahead = summed(likelihoods - self._seen[1])
        return _AnswerSums(summed(likelihoods), ahead, counts)

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of pairs."""
        if PAIRS not in batch:
            what = f"the loss dpo is one over pairs, and a batch has {', '.join(map(str, batch))}"
            fix = "write data: {name: preferences, args: …}, whose rows have two answers"
            raise UsageError(what, where="data.name", fix=fix)
        return batch[PAIRS].sum()

    @torch.no_grad()
    def _reference_outputs(self, input_ids: Tensor, document_ids: Tensor) -> Any:
        """Return what the reference makes of a batch.

        Raises:
            UsageError: there is none, or a rank has only a stage of it.
        """
        if self.reference is not None:
            self.reference.to(input_ids.device)
            return self.reference(input_ids, document_ids)
        if not self._adapted:
            what = "the loss dpo has no reference yet"
            fix = "hand it to a Trainer, or name one: DirectPreferences(reference=model)"
            raise UsageError(what, where="loss_fn", fix=fix)
        (model,) = self._adapted
        if any(parameter.is_meta for parameter in model.parameters()):
            refuse([ADAPTERS_IN_STAGES])
        with without_adapters(model):
            return model(input_ids, document_ids)


def _is_within(value: Any, limit: float) -> bool:
    """Return whether a value is a number from 0 to below a limit."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < limit


def check_arguments(
    beta: Any = 0.1,
    label_smoothing: Any = 0.0,
    loss_type: Any = "sigmoid",
    nll_weight: Any = 0.0,
    reference: Any = None,
) -> None:
    """Refuse arguments of `DirectPreferences` that it can't follow; nothing is built."""
    where = "loss_fn.args"
    for key, value, is_fit, fix in (
        ("beta", beta, beta != 0 and _is_within(beta, math.inf), "write a number above 0"),
        (
            "label_smoothing",
            label_smoothing,
            _is_within(label_smoothing, 0.5),
            "write a share below 0.5",
        ),
        ("nll_weight", nll_weight, _is_within(nll_weight, math.inf), "write 0 or more"),
    ):
        if not is_fit:
            what = f"dpo can't use the {key} {value!r}"
            raise UsageError(what, where=f"{where}.{key}", fix=fix)
    if loss_type not in LOSS_TYPES:
        what = f"dpo has no loss_type {loss_type!r}{did_you_mean(str(loss_type), LOSS_TYPES)}"
        fix = f"write one of {', '.join(LOSS_TYPES)}"
        raise UsageError(what, where=f"{where}.loss_type", fix=fix)
    if label_smoothing and loss_type not in _SMOOTHED:
        what = f"label_smoothing beside loss_type: {loss_type}, which has no labels to smooth"
        fix = f"leave it out, or write loss_type: {' or '.join(_SMOOTHED)}"
        raise UsageError(what, where=f"{where}.label_smoothing", fix=fix)
    if not isinstance(reference, nn.Module | str | None):
        what = f"the reference of dpo is {reference!r:.60}"
        fix = "write a model as model.name has it: reference: hf:FOLDER"
        raise UsageError(what, where=f"{where}.reference", fix=fix)


def log_likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-likelihood of each target, float32 [B, T]; 0 where a target does not count."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED_TARGET,
        reduction="none",
    )
    return -losses.view(targets.shape)


def _named(name: str) -> nn.Module:
    """Return the model of a name, as `model.name` has it."""
    from lockstep.config.schema_training import ModelConfig
    from lockstep.models import build_model

    with torch.device("cpu"):
        return build_model(ModelConfig(name=name))


def _frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def _copied(model: LanguageModel) -> nn.Module:
    """Return a copy of a model with its values."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return copy.deepcopy(model)
    if hasattr(model, "stored_weights"):
        from lockstep.models.hf import with_values

        return with_values(model)
    what = "the reference of dpo is the model before training, and this one has no values yet"
    why = f"{type(model).__name__} is not read from a folder: its first values are drawn"
    fix = "train a model of a folder, model.name: hf:FOLDER, or name loss_fn.args.reference"
    raise UsageError(what, where="loss_fn", why=why, fix=fix)
