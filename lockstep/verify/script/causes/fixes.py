"""Says what to write instead of what is wrong in a script.

It uses the words of the framework whose loop the script runs.

Tests: tests/verify/test_script.py
"""

from collections.abc import Sequence

from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.record import ACCELERATE, FABRIC, LIGHTNING, TORCH, TRANSFORMERS

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


def script_cause(
    kind: str,
    text: str,
    found_by: str,
    framework: str,
    *,
    is_error: bool = True,
    parameters: Sequence[str] = (),
) -> Cause:
    """Return a cause with the fix for a framework, and the parameters that it is about.

    The kind of the cause decides its column in the table.
    """
    column = kind if kind in ("samples", "random numbers", "first values") else "gradients"
    return Cause(
        kind,
        text,
        [found_by],
        is_error,
        fix=fix_for(kind, framework),
        column=column,
        parameters=list(parameters),
    )
