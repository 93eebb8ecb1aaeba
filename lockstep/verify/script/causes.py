"""Names why ranks of a script don't take the step of one process, and what to write instead, by framework.

Each cause is shown: by what ranks read, drew or started from, or by gradients of one process on each rank's samples
alone, which add up to the ranks' gradient in one way and to the reference's in another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import listed
from lockstep.verify.script.record import (
    ACCELERATE,
    FABRIC,
    LIGHTNING,
    TORCH,
    TRANSFORMERS,
    ScriptRecord,
    Tensors,
    by_rank,
    is_cut,
)

Vector = NDArray[np.float64]
EXACT = 1e-4  # relative difference up to which gradients are taken for equal
_FITS = 1e-3  # relative residual up to which a gradient is a weighted sum of others


@dataclass
class ScriptCause:
    """Why ranks train otherwise than one process.

    Attributes:
        kind: short name.
        text: what is known.
        found_by: what shows it.
        fix: what to write.
        is_error: whether the training is wrong; else it is another by nature.
        column: of the table.
    """

    kind: str
    text: str
    found_by: str
    fix: str = ""
    is_error: bool = True
    column: str = "gradients"


UNKNOWN = "cause not known"
_NORMALISATION = "loss normalisation"
_FIXES: dict[str, dict[str, str]] = {
    "samples": {
        TORCH: "DataLoader(…, sampler=DistributedSampler(data)), and sampler.set_epoch(epoch) each epoch",
        ACCELERATE: "train on the loader that accelerator.prepare(loader) returns",
        FABRIC: "train on the loader that fabric.setup_dataloaders(loader) returns",
        TRANSFORMERS: "return a plain DataLoader from get_train_dataloader, through self.accelerator.prepare",
    },
    "random numbers": {
        TORCH: "torch.manual_seed(seed + rank) after the model is made",
        ACCELERATE: "set_seed(seed, device_specific=True), after the model is made",
        FABRIC: "fabric.seed_everything(seed + fabric.global_rank), after the model is made",
        TRANSFORMERS: "torch.manual_seed(seed + rank) in a callback's on_train_begin",
    },
    "first values": {
        TORCH: "wrap the model in DistributedDataParallel, which broadcasts rank 0's values; or seed all ranks alike",
        ACCELERATE: "train the model that accelerator.prepare(model) returns",
        FABRIC: "train the model that fabric.setup(model, optimizer) returns",
    },
    "learning rate": {
        TORCH: "with the global batch held, leave the factor out: lr=lr, not lr * world_size",
    },
    "learning rate schedule": {
        TORCH: "call scheduler.step() once an optimizer step, and count its steps in optimizer steps",
        ACCELERATE: "leave the schedule out of accelerator.prepare: prepared, it is stepped once for each process; "
        "or count its steps in batches of one process",
    },
    _NORMALISATION: {
        TORCH: "sum the loss, all_reduce the number of targets, and train on loss_sum * world_size / all_targets",
        ACCELERATE: "sum the loss; targets = accelerator.gather(count).sum(); accelerator.backward(loss_sum * "
        "accelerator.num_processes / targets)",
        FABRIC: 'sum the loss; targets = fabric.all_reduce(count, reduce_op="sum"); fabric.backward(loss_sum * '
        "fabric.world_size / targets)",
        TRANSFORMERS: "TrainingArguments(average_tokens_across_devices=True), and a model or compute_loss_func that "
        "divides the summed loss by num_items_in_batch",
    },
    "gradient accumulation": {
        TORCH: "divide each micro-batch's summed loss by the targets of the whole step, not by its own",
        TRANSFORMERS: "let the model or compute_loss_func divide the summed loss by num_items_in_batch",
    },
    "gradient synchronisation": {
        TORCH: "wrap the model in DistributedDataParallel, call the wrapper (not model.module), and leave no_sync() "
        "for the last backward pass of a step",
        ACCELERATE: "call the model that accelerator.prepare(model) returns, and accelerator.backward(loss)",
        FABRIC: "call the model that fabric.setup returns, and fabric.backward(loss) outside of no_backward_sync",
    },
    "sum of gradients": {
        TORCH: "divide by the number of ranks once: DistributedDataParallel averages already",
    },
    "batch statistics": {
        TORCH: "nn.SyncBatchNorm.convert_sync_batchnorm(model), on GPUs, or a normalisation of single samples",
    },
    "clipping": {
        TORCH: "clip once all gradients are there, by their norm over all ranks (FSDP1: model.clip_grad_norm_)",
        ACCELERATE: "accelerator.clip_grad_norm_(model.parameters(), …) where accelerator.sync_gradients",
        FABRIC: "fabric.clip_gradients(model, optimizer, max_norm=…)",
    },
}  # fmt: skip


def fix_for(kind: str, framework: str) -> str:
    """Return what to write, in the framework's words where they are others than torch's."""
    fixes = _FIXES.get(kind, {})
    same = FABRIC if framework == LIGHTNING else framework
    return fixes.get(same, fixes.get(TORCH, ""))


def cause(kind: str, text: str, found_by: str, framework: str, *, is_error: bool = True) -> ScriptCause:
    """Return a cause with the fix for a framework."""
    column = kind if kind in ("samples", "random numbers", "first values") else "gradients"
    return ScriptCause(kind, text, found_by, fix_for(kind, framework), is_error, column)


# ---- what ranks show without a reference ----


def seen_on_ranks(records: Sequence[ScriptRecord]) -> list[ScriptCause]:
    """Return causes that a run of several ranks shows by itself."""
    found = [_same_samples(records), _same_draws(records), _other_first_values(records), _other_precision(records)]
    return [one for one in found if one is not None]


def _same_samples(records: Sequence[ScriptRecord]) -> ScriptCause | None:
    framework, steps = records[0].framework, len(records[0].steps)
    loader = records[0].training_loader
    if loader is not None:
        batches = [record.batches.get(loader, [])[: sum(record.passes)] for record in records]
    else:
        batches = [[rows for step in record.steps for rows in step.inputs] for record in records]
    flat = [[sample for batch in rank for sample in batch] for rank in batches]
    if len(set(flat[0])) < 2:
        return None
    alike = [rank for rank in range(1, len(flat)) if flat[rank] == flat[0]]
    by = "fingerprints of the samples of each rank"
    if alike:
        every = "all ranks" if len(alike) == len(flat) - 1 else f"ranks 0, {', '.join(map(str, alike))}"
        text = f"the loader is not sharded: {every} train on the same {len(flat[0])} samples in {steps} steps"
        return cause("samples", text, by, framework)
    at_once = [set(mine) & set().union(*others) for mine, *others in zip(*batches, strict=False)]
    if twice := sum(map(len, at_once)):
        text = f"{twice} of the {len(flat[0])} samples of rank 0 were another rank's in the same step, too"
        return ScriptCause("samples", text, by, fix_for("samples", framework), is_error=False, column="samples")
    return None


def _same_draws(records: Sequence[ScriptRecord]) -> ScriptCause | None:
    framework, alike = records[0].framework, set()
    draws = [[draw for step in record.steps for draw in step.draws] for record in records]
    for position, mine in enumerate(draws[0]):
        for other in (rank[position] for rank in draws[1:] if position < len(rank)):
            # The states at the end, too: a framework may seed the generators when the forward pass has begun.
            alike |= {name for name in mine.moved if (mine.before[name], mine.after[name]) == other.states_of(name)}
    drawn = sorted({name for rank in draws for draw in rank for name in draw.moved})
    if not drawn:
        return None
    if alike:
        text = (
            f"dropout, or what else draws from {listed(sorted(alike))}'s generator in a forward pass, is drawn alike "
            "on all ranks: samples at the same place of a batch get the same mask, and each its own in one process"
        )
        by = "the generators' states before a forward pass, and after it has moved them, are the same on several ranks"
        return cause("random numbers", text, by, framework)
    text = (
        f"dropout, or what else draws from {listed(drawn)}'s generator in a forward pass, is drawn by each rank on its "
        "own: one process draws other numbers, so the step is equal only up to them"
    )
    return ScriptCause("random numbers", text, "the generators' states", is_error=False, column="random numbers")


def _other_first_values(records: Sequence[ScriptRecord]) -> ScriptCause | None:
    ranks = by_rank([record.first for record in records])
    other = [rank for rank in range(1, len(ranks)) if unequal_names(ranks[rank], ranks[0])]
    if not other:
        return None
    names = unequal_names(ranks[other[0]], ranks[0])
    text = f"ranks start from different weights: {listed(names)} on rank {other[0]} and on rank 0"
    return cause("first values", text, "the parameters before the first step", records[0].framework)


def unequal_names(mine: Tensors, right: Tensors, limit: float = 0.0) -> list[str]:
    """Return the names of tensors that differ by more than a limit, relative to the norm."""
    return [name for name in right if name not in mine or _off(mine[name].numpy(), right[name].numpy()) > limit]


def _off(mine: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    if mine.shape != right.shape:
        return float("inf")
    if np.array_equal(mine, right):
        return 0.0
    return relative(mine.astype(np.float64).ravel(), right.astype(np.float64).ravel())


def relative(mine: Vector, right: Vector) -> float:
    """Return the norm of the difference over the norm of `right`."""
    off = float(np.linalg.norm(mine - right) / max(float(np.linalg.norm(right)), 1e-300))
    return off if off == off else float("inf")


def _other_precision(records: Sequence[ScriptRecord]) -> ScriptCause | None:
    for steps in zip(*(record.steps for record in records), strict=False):
        for rank, step in enumerate(steps):
            if step.dtypes != steps[0].dtypes:
                mine, right = listed(sorted(step.dtypes)), listed(sorted(steps[0].dtypes))
                text = f"rank {rank} computes with {mine}, and rank 0 with {right}"
                return ScriptCause("precision", text, "the dtypes of parameters and of autocast, by rank")
    return None


def replicas_cause(records: Sequence[ScriptRecord], number: int) -> ScriptCause | None:
    """Return the cause if replicas were equal after a step and differ before the next, or an equal step parts them."""
    if any(is_cut(list(step.values.values())) for record in records for step in record.steps):
        return None
    for at in range(number + 1):
        states = [record.steps[at].before for record in records]
        wrong = [name for name in states[0] if any(state.get(name) != states[0][name] for state in states)]
        if wrong and not at:
            return None
        if wrong:
            text = f"{listed(wrong)} were equal on all ranks after step {at}, and differ before step {at + 1} updates"
            fix = "let nothing but the optimizer write weights, or let it write the same on all ranks"
            return ScriptCause("replicas", text, "fingerprints of each rank's parameters", fix, column="weights")
        values = by_rank([record.steps[at].values for record in records])
        gradients = by_rank([record.steps[at].gradients for record in records])
        if any(unequal_names(other, values[0]) for other in values[1:]):
            if any(unequal_names(other, gradients[0]) for other in gradients[1:]):
                return None
            text = f"weights and gradients are equal on all ranks in step {at + 1}, and the updated weights are not"
            return ScriptCause("replicas", text, "parameters and gradients of each rank", column="weights")
    return None


# ---- settings of the optimizer ----


def settings_cause(records: Sequence[ScriptRecord], reference: ScriptRecord) -> ScriptCause | None:
    """Return the cause if a learning rate, or another setting, is another than one process's in some step."""
    framework, ranks = records[0].framework, len(records)
    for number, right in enumerate(reference.steps[: min(len(record.steps) for record in records)]):
        for rank, record in enumerate(records):
            step = record.steps[number]
            for mine, theirs in zip(step.settings, right.settings, strict=False):
                wrong = [key for key in theirs if not _close(mine.get(key), theirs[key])]
                if not wrong:
                    continue
                key = "lr" if "lr" in wrong else wrong[0]
                name = "learning rate" if key == "lr" else key
                text = f"{name} {_short(mine.get(key))} on rank {rank} instead of {_short(theirs[key])}"
                if any(other.steps[number].settings != records[0].steps[number].settings for other in records):
                    text += ": ranks step with different settings"
                    return ScriptCause(name, text, "the settings with which each rank stepped", column="settings")
                by = "the settings with which the optimizer stepped"
                if key != "lr":
                    return ScriptCause(name, text, by, column="settings")
                steps, right_steps = max(step.schedules, default=0), max(right.schedules, default=0)
                if right_steps and steps == right_steps * ranks:
                    text += f": the schedule was stepped {steps} times by then, and {right_steps} times in one process"
                    kind = "learning rate schedule"
                    return ScriptCause(kind, text, by, fix_for(kind, framework), column="settings")
                times = mine["lr"] / theirs["lr"] if theirs["lr"] else 0.0
                if _close(times, float(ranks)):
                    text += f": it is {ranks} ×, scaled by the number of ranks"
                elif _close(times, ranks**0.5):
                    text += f": it is √{ranks} ×, scaled by the root of the number of ranks"
                return ScriptCause(name, text, by, fix_for(name, framework), column="settings")
    return None


def _close(mine: object, right: object) -> bool:
    if isinstance(mine, int | float) and isinstance(right, int | float):
        return abs(mine - right) <= 1e-6 * max(abs(mine), abs(right))
    return mine == right


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


# ---- gradients ----


@dataclass
class GradientEvidence:
    """Gradients of one step, as vectors.

    Attributes:
        names: (name, number of elements), in the vectors' order.
        ranks: of each rank, or once if ranks hold parts of it.
        reference: of one process with all samples.
        parts: of one process with each rank's samples alone.
        limit: relative difference that rounding explains.
    """

    names: list[tuple[str, int]]
    ranks: list[Vector]
    reference: Vector
    parts: list[Vector]
    limit: float = EXACT

    def same(self, mine: Vector, right: Vector) -> bool:
        """Return whether two gradients are equal up to rounding."""
        return relative(mine, right) <= max(self.limit, EXACT)

    def by_name(self, mine: Vector, right: Vector) -> list[str]:
        """Return the names of the parameters whose gradients differ."""
        found, begin = [], 0
        for name, size in self.names:
            piece = slice(begin, begin + size)
            if not self.same(mine[piece], right[piece]):
                found.append(name)
            begin += size
        return found


def weights_of(parts: Sequence[Vector], right: Vector) -> Vector | None:
    """Return the weights with which vectors add up to another, or None if they don't, or not in one way alone."""
    matrix = np.stack(list(parts), axis=1)
    weights, _, rank, _ = np.linalg.lstsq(matrix, right, rcond=1e-6)
    if rank < len(parts) or relative(matrix @ weights, right) > _FITS:
        return None
    return np.asarray(weights, dtype=np.float64)


def _explains(weights: Vector, parts: Sequence[Vector], right: Vector) -> bool:
    """Return whether weights leave a tenth at most of what the mean leaves: else the difference is another."""
    matrix = np.stack(list(parts), axis=1)
    return relative(matrix @ weights, right) <= 0.1 * relative(matrix.mean(axis=1), right)


_BY_PARTS = "gradients of one process on each rank's samples alone"


def gradient_cause(evidence: GradientEvidence, framework: str) -> ScriptCause | None:
    """Return why ranks have another gradient than one process; None if batches are coupled, or nothing is shown."""
    parts, ranks = evidence.parts, len(evidence.parts)
    mean: Vector = sum(parts, np.zeros_like(parts[0])) / ranks
    first = evidence.ranks[0]
    if any(not evidence.same(other, first) for other in evidence.ranks[1:]):
        return _unsynchronised(evidence, framework)
    if evidence.same(first, mean):
        return _unevenly_weighed(evidence, framework)
    for right, text in (
        (mean * ranks, f"the gradient is the sum over ranks, {ranks} × the mean that one process has"),
        (mean / ranks, f"the gradient is divided by the number of ranks twice: 1/{ranks} of the mean"),
    ):
        if evidence.same(first, right):
            return cause("sum of gradients", text, f"{_BY_PARTS}: added up so, they are the ranks' gradient", framework)
    weights = weights_of(parts, first)
    if weights is None:
        return None
    said = ", ".join(f"{weight:.3g}" for weight in np.round(weights, 6) + 0.0)
    only = [rank for rank, part in enumerate(parts) if evidence.same(first, part)]
    kind, text = "weights of ranks", f"the ranks' gradients count {said}, and 1/{ranks} each in one process"
    if only:
        kind, text = "gradient synchronisation", f"all ranks use rank {only[0]}'s gradient alone"
    return cause(kind, text, f"{_BY_PARTS}: added up so, they are the ranks' gradient", framework)


def _unsynchronised(evidence: GradientEvidence, framework: str) -> ScriptCause | None:
    own = len(evidence.ranks) == len(evidence.parts)
    apart = sorted({name for rank in evidence.ranks[1:] for name in evidence.by_name(rank, evidence.ranks[0])})
    wrong = {
        name
        for mine, part in zip(evidence.ranks, evidence.parts, strict=False)
        for name in evidence.by_name(mine, part)
    }
    if not own or wrong & set(apart):
        return None
    all_of_them = len(apart) == len(evidence.names)
    what = "gradients are not synchronised" if all_of_them else f"the gradient of {listed(apart)} is not synchronised"
    text = f"{what}: each rank's optimizer uses the gradient of its own samples"
    return cause("gradient synchronisation", text, f"{_BY_PARTS}: each is that rank's gradient", framework)


def _unevenly_weighed(evidence: GradientEvidence, framework: str) -> ScriptCause | None:
    weights = weights_of(evidence.parts, evidence.reference)
    ranks = len(evidence.parts)
    if weights is None or min(weights) < 0 or not _explains(weights, evidence.parts, evidence.reference):
        return None
    said = ", ".join(f"{weight:.3f}" for weight in weights)
    text = (
        "each rank's loss is a mean over its own targets, and ranks have unequal numbers of them: one process weighs "
        f"the ranks' samples by {said}, and their average by {', '.join([f'{1 / ranks:.3f}'] * ranks)}"
    )
    by = f"{_BY_PARTS}: their mean is the ranks' gradient; weighed by {said} they are the gradient of one process"
    return cause(_NORMALISATION, text, by, framework)


def accumulation_cause(
    step: Vector, whole: Vector, micro_batches: Sequence[Vector], framework: str
) -> ScriptCause | None:
    """Return the cause if a step is its micro-batches' mean gradient, and the whole batch weighs them otherwise."""
    weights = weights_of(micro_batches, whole)
    mean: Vector = sum(micro_batches, np.zeros_like(step)) / len(micro_batches)
    if (
        weights is None
        or min(weights) < 0
        or relative(step, mean) > EXACT
        or not _explains(weights, micro_batches, whole)
    ):
        return None
    said = ", ".join(f"{weight:.3f}" for weight in weights)
    text = (
        "the step is a mean of its micro-batches' means, which have unequal numbers of targets: the whole batch weighs "
        f"them by {said}; so the step depends on how its samples are cut, on one process, too"
    )
    by = f"the step's samples in one batch: weighed by {said}, the micro-batches' gradients are its gradient"
    return cause("gradient accumulation", text, by, framework)
