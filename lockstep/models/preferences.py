"""The loss `dpo`: direct preference optimization, over pairs of answers.

    loss_fn: {name: dpo, args: {beta: 0.1}}
    data: {name: preferences, args: {…}}

Of each pair, the answer that was chosen becomes likelier than it is to a frozen reference, and the
rejected one less likely (Rafailov et al. 2023, arXiv:2305.18290). With log π, the sum of the
log-likelihoods of an answer's tokens:

    margin    (log π(chosen) − log ref(chosen)) − (log π(rejected) − log ref(rejected))
    loss      −log sigmoid(beta · margin), a mean over the pairs of a step

The reference is the model before training. A model with adapters is its own: the reference is
computed without them. Of any other model a frozen copy is kept, in full on each rank that computes
losses; no checkpoint has it, since a run that goes on makes it anew.

A sequence of T tokens holds up to P pairs, as the documents 2p (chosen) and 2p + 1 (rejected):

    input_ids, targets, document_ids    int64 [B, T]
    pairs                               float32 [B, P], 1 where a sequence has a pair of this number

Tests: tests/models/test_preferences.py, tests/parity/test_preferences.py
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.adapters import has_adapters, without_adapters
from lockstep.models.batch_parts import IGNORED_TARGET, logits_of
from lockstep.models.language import LanguageModel

PAIRS = "pairs"  # the part of a batch that says which pairs a sequence has


class DirectPreferences(nn.Module):
    """The loss of direct preference optimization.

    Args:
        beta: how much a margin counts: with a large one the model stays near its reference.
        label_smoothing: the share of pairs that are taken to be labelled wrongly (cDPO).
        reference: the reference model, or the name of one as `model.name` has it; unset: the model
            before training.
    """

    reduction = "sum"  # over pairs

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        reference: nn.Module | str | None = None,
    ) -> None:
        super().__init__()
        if not beta > 0:
            what = f"the beta of dpo is {beta}"
            raise UsageError(what, where="loss_fn.args.beta", fix="write a number above 0")
        if not 0 <= label_smoothing < 0.5:
            what = f"the label_smoothing of dpo is {label_smoothing}"
            fix = "write a share below 0.5"
            raise UsageError(what, where="loss_fn.args.label_smoothing", fix=fix)
        self.beta = beta
        self.label_smoothing = label_smoothing
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
        margins = self.margins(outputs, targets, input_ids, document_ids, pairs)
        self._seen = None
        losses = -(1 - self.label_smoothing) * F.logsigmoid(margins)
        if self.label_smoothing:
            losses = losses - self.label_smoothing * F.logsigmoid(-margins)
        return (losses * pairs).sum()

    def accuracy(
        self,
        outputs: Tensor,
        targets: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        pairs: Tensor,
    ) -> Tensor:
        """Return whether the margin of each pair is above 0, a metric: float32 [pairs]."""
        margins = self.margins(outputs, targets, input_ids, document_ids, pairs)
        return (margins > 0).float()[pairs > 0]

    def margins(
        self,
        outputs: Tensor,
        targets: Tensor,
        input_ids: Tensor,
        document_ids: Tensor,
        pairs: Tensor,
    ) -> Tensor:
        """Return beta times the margin of each pair, [B, P].

        It is above 0 where the chosen answer has gained more likelihood than the rejected one.
        """
        # Once for a batch: where ranks have shards of the reference they compute it together.
        if self._seen is None or self._seen[0] is not input_ids:
            reference = logits_of(self._reference_outputs(input_ids, document_ids))
            self._seen = (input_ids, log_likelihoods(reference, targets))
        ahead = log_likelihoods(outputs, targets) - self._seen[1]
        # [B, T] → the sum of each document, [B, 2 P]; what fills a sequence is none of them.
        count = 2 * pairs.shape[1]
        documents = torch.arange(count, device=document_ids.device)
        of_document = (document_ids[..., None] == documents).to(ahead.dtype)
        sums = (ahead[..., None] * of_document).sum(1)
        margins: Tensor = self.beta * (sums[:, 0::2] - sums[:, 1::2])
        return margins

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
            what = "the reference of dpo is the model without its adapters, and a stage has a part"
            fix = (
                "write distributed.strategy: ddp or fsdp, or name a reference that the last stage"
                " holds in full: loss_fn.args.reference: hf:FOLDER"
            )
            raise UsageError(what, where="distributed.strategy: pipeline", fix=fix)
        with without_adapters(model):
            return model(input_ids, document_ids)


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
