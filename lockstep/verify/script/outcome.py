"""Describes what `lockstep verify SCRIPT` has found for one number of ranks: causes, and what to write instead.

Tests: tests/verify/test_script.py
"""

from dataclasses import dataclass, field

from lockstep.verify.script.record import (
    ACCELERATE,
    FABRIC,
    LIGHTNING,
    LOCKSTEP,
    TORCH,
    TRANSFORMERS,
)

COLUMNS = ("loop", "samples", "random numbers", "first values", "settings", "gradients", "weights")
STEP_COLUMNS = ("gradients", "weights")  # in the order in which a step computes them


@dataclass
class ScriptCause:
    """Why ranks train otherwise than one process."""

    kind: str  # short name
    text: str  # what is known
    found_by: str  # what shows it
    fix: str = ""  # what to write
    is_error: bool = True  # whether the training is wrong; else it is another by nature
    column: str = "gradients"  # of the table
    module: str = ""  # in whose forward pass it begins, if it does in one


UNKNOWN = "cause not known"
NORMALISATION = "loss normalisation"
_FIXES: dict[str, dict[str, str]] = {
    "samples": {
        TORCH: (
            "DataLoader(…, sampler=DistributedSampler(data)), and sampler.set_epoch(epoch) each"
            " epoch"
        ),
        ACCELERATE: "train on the loader that accelerator.prepare(loader) returns",
        FABRIC: "train on the loader that fabric.setup_dataloaders(loader) returns",
        LIGHTNING: (
            "leave use_distributed_sampler=True in Trainer, or give the loader a DistributedSampler"
        ),
        TRANSFORMERS: (
            "return a plain DataLoader from get_train_dataloader, through self.accelerator.prepare"
        ),
    },
    "random numbers": {
        TORCH: "torch.manual_seed(seed + rank) after the model is made",
        ACCELERATE: "set_seed(seed, device_specific=True), after the model is made",
        FABRIC: "fabric.seed_everything(seed + fabric.global_rank), after the model is made",
        LIGHTNING: (
            "seed_everything(seed + self.global_rank) in the LightningModule's on_train_start"
        ),
        TRANSFORMERS: "torch.manual_seed(seed + rank) in a callback's on_train_begin",
    },
    "first values": {
        TORCH: (
            "wrap the model in DistributedDataParallel, which broadcasts rank 0's values; or seed"
            " all ranks alike"
        ),
        ACCELERATE: "train the model that accelerator.prepare(model) returns",
        FABRIC: "train the model that fabric.setup(model, optimizer) returns",
    },
    "learning rate": {
        TORCH: "with the global batch held, leave the factor out: lr=lr, not lr * world_size"
    },
    "learning rate schedule": {
        TORCH: (
            "call scheduler.step() once an optimizer step, and count its steps in optimizer steps"
        ),
        ACCELERATE: (
            "leave the schedule out of accelerator.prepare: prepared, it is stepped once for each"
            " process; or count its steps in batches of one process"
        ),
    },
    NORMALISATION: {
        TORCH: (
            "sum the loss, all_reduce the number of targets, and train on loss_sum * world_size /"
            " all_targets"
        ),
        ACCELERATE: (
            "sum the loss; targets = accelerator.gather(count).sum(); accelerator.backward(loss_sum"
            " * accelerator.num_processes / targets)"
        ),
        FABRIC: (
            'sum the loss; targets = fabric.all_reduce(count, reduce_op="sum");'
            " fabric.backward(loss_sum * fabric.world_size / targets)"
        ),
        LIGHTNING: (
            "sum the loss in training_step; targets = self.all_gather(count).sum(); return loss_sum"
            " * self.trainer.world_size / targets"
        ),
        TRANSFORMERS: (
            "TrainingArguments(average_tokens_across_devices=True), and a model or"
            " compute_loss_func that divides the summed loss by num_items_in_batch"
        ),
    },
    "gradient accumulation": {
        TORCH: (
            "divide each micro-batch's summed loss by the targets of the whole step, not by its own"
        ),
        TRANSFORMERS: (
            "let the model or compute_loss_func divide the summed loss by num_items_in_batch"
        ),
    },
    "gradient synchronisation": {
        TORCH: (
            "wrap the model in DistributedDataParallel, call the wrapper (not model.module), and"
            " leave no_sync() for the last backward pass of a step"
        ),
        ACCELERATE: (
            "call the model that accelerator.prepare(model) returns, and accelerator.backward(loss)"
        ),
        FABRIC: (
            "call the model that fabric.setup returns, and fabric.backward(loss) outside of"
            " no_backward_sync"
        ),
        LIGHTNING: "let training_step return the loss, and Trainer call backward",
    },
    "sum of gradients": {
        TORCH: "divide by the number of ranks once: DistributedDataParallel averages already"
    },
    "batch statistics": {
        TORCH: (
            "nn.SyncBatchNorm.convert_sync_batchnorm(model), on GPUs, or a normalisation of single"
            " samples"
        ),
    },
    "uneven steps": {
        TORCH: (
            "give all ranks equally many batches: DistributedSampler(data, drop_last=True), or the"
            " context torch.distributed.algorithms.join.Join"
        ),
        ACCELERATE: (
            "leave even_batches=True in DataLoaderConfiguration, or"
            " accelerator.join_uneven_inputs([model])"
        ),
    },
    "hang": {
        TORCH: (
            "let all ranks call the same collectives, in the same order, whatever `if rank == 0`"
            " does besides"
        ),
    },
    "clipping": {
        TORCH: (
            "clip once all gradients are there, by their norm over all ranks (FSDP1:"
            " model.clip_grad_norm_)"
        ),
        ACCELERATE: (
            "accelerator.clip_grad_norm_(model.parameters(), …) where accelerator.sync_gradients"
        ),
        FABRIC: "fabric.clip_gradients(model, optimizer, max_norm=…)",
        LIGHTNING: "Trainer(gradient_clip_val=…)",
    },
}


def fix_for(kind: str, framework: str) -> str:
    """Return what to write, in the framework's words where they are others than torch's."""
    fixes = _FIXES.get(kind, {})
    return fixes.get(framework, fixes.get(TORCH, ""))


def cause(
    kind: str, text: str, found_by: str, framework: str, *, is_error: bool = True
) -> ScriptCause:
    """Return a cause with the fix for a framework."""
    column = kind if kind in ("samples", "random numbers", "first values") else "gradients"
    return ScriptCause(kind, text, found_by, fix_for(kind, framework), is_error, column)


@dataclass
class ScriptDifference:
    """The first difference: `aspect` is a column, `relative` its size."""

    step: int
    aspect: str
    name: str
    relative: float
    rank: int | None = None


@dataclass
class ScriptOutcome:
    """Steps of a script on a number of ranks, compared with one process."""

    ranks: int
    steps: int = 0  # number of steps that were compared
    framework: str = TORCH  # whose loop it is
    # that is left when draws, first values and settings are equal
    first: ScriptDifference | None = None
    parts: dict[str, float] = field(default_factory=dict)  # parameter → size of its difference
    rounding: float = 0.0  # the largest difference of a gradient that is none
    causes: list[ScriptCause] = field(default_factory=list)  # of this and of other differences
    notices: list[str] = field(default_factory=list)  # what the comparison takes for granted
    failed: str = ""  # the error, if the script could not be run
    not_judged: str = ""  # why gradients and weights can't be compared; empty: they were

    @property
    def passed(self) -> bool:
        """Return whether the ranks train what one process trains, but for what is other by nature."""
        return (
            not self.failed
            and not self.not_judged
            and not any(found.is_error for found in self.causes)
        )

    def mark(self, column: str) -> str:
        """Return the table's sign for a column."""
        if self.failed or self.framework == LOCKSTEP:
            return "-"
        if column not in STEP_COLUMNS:
            found = [one for one in self.causes if one.column == column]
            return "✓" if not found else "✗" if any(one.is_error for one in found) else "≈"
        if self.not_judged:
            return "?"
        found = [one for one in self.causes if one.column in STEP_COLUMNS]
        if not found:
            return "✓"
        first = self.first.aspect if self.first is not None else STEP_COLUMNS[0]
        if STEP_COLUMNS.index(column) < STEP_COLUMNS.index(first):
            return "✓"
        return "✗" if any(one.is_error for one in found) else "≈"
