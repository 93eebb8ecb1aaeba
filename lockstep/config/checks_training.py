"""Contradictions in how a config trains: its optimizer, its sizes, its length.

Tests: tests/config/test_checks.py, tests/test_errors.py
"""

from collections.abc import Iterator

from lockstep.config.schema import Config, StepConfig
from lockstep.config.schema_training import TrainingConfig
from lockstep.errors import Contradiction, UsageError

# Optimizers of torch that fail on parameters of which each rank holds a part, and why.
NEED_WHOLE_PARAMETERS = {
    "torch.optim:Rprop": "it writes into a parameter by a mask, which torch can't do on a part",
    "torch.optim:Adafactor": "its norms are those of whole parameters",
}

ON_PARTS = (
    "take AdamW, or another optimizer that updates each element on its own; or strategy: ddp,"
    " where each rank holds whole parameters"
)


def optimizer_contradictions(config: StepConfig) -> Iterator[Contradiction]:
    """Yield arguments of the optimizer that a setting is for: they would win over it unseen."""
    training = config.training
    set_by = {"lr": "learning_rate"}
    if training.weight_decay is not None:
        set_by["weight_decay"] = "weight_decay"
    for argument, setting in set_by.items():
        if argument in training.optimizer_args:
            keys = (f"training.optimizer_args.{argument}", f"training.{setting}")
            value = training.optimizer_args[argument]
            fix = f"leave the argument out, and write training.{setting}: {value}"
            what = f"the optimizer's {argument} is set twice, and the argument would win"
            yield Contradiction(keys, what, fix)


def size_contradictions(config: Config) -> Iterator[Contradiction]:
    """Yield contradictions between the sizes and the lengths of a run."""
    training = config.training
    if training.max_steps is not None and training.num_train_epochs is not None:
        yield Contradiction(
            ("training.max_steps", "training.num_train_epochs"),
            f"the run can't end both after {training.max_steps} steps and after"
            f" {training.num_train_epochs} epochs",
            "keep one of the two and write null for the other",
        )
    # In Python the batch size may still come from a DataLoader; `lockstep.data.adopt` then makes
    # this comparison.
    from_loader = config.model.name is None and "batch_size" not in training.model_fields_set
    if training.global_batch_size is not None and not from_loader:
        yield from _global_batch(training, training.global_batch_size)
    if training.lr_scaling != "none" and training.base_batch_size is None:
        yield Contradiction(
            ("training.lr_scaling", "training.base_batch_size"),
            f"lr_scaling: {training.lr_scaling} needs the global batch that learning_rate was"
            " chosen for",
            "write base_batch_size, or lr_scaling: none",
        )


def _global_batch(training: TrainingConfig, global_batch: int) -> Iterator[Contradiction]:
    """Yield what does not divide a step's samples: batch_size, or with it the accumulation."""
    size = training.batch_size
    accumulation = training.accumulation
    if global_batch % size:
        quotient, rest = divmod(global_batch, size)
        below = f"{quotient * size} or " if quotient else ""
        fitting_sizes = ", ".join(map(str, divisors(global_batch, size)))
        yield Contradiction(
            ("training.global_batch_size", "training.batch_size"),
            f"global_batch_size is not a multiple of batch_size: {global_batch} = {quotient} ×"
            f" {size} + {rest}",
            f"write global_batch_size {below}{(quotient + 1) * size}, or a batch_size that divides"
            f" {global_batch}: {fitting_sizes}",
        )
    elif global_batch % (size * accumulation):
        quotient, rest = divmod(global_batch, size * accumulation)
        yield Contradiction(
            ("training.gradient_accumulation_steps", "training.global_batch_size"),
            f"no number of ranks makes batch_size {size} × gradient_accumulation_steps"
            f" {accumulation} × data-parallel size = global_batch_size {global_batch}:"
            f" {global_batch} = {quotient} × {size * accumulation} + {rest}",
            "leave gradient_accumulation_steps out, since it follows from global_batch_size; or, to"
            " keep it, write training.global_batch_size=null",
        )


def require_equation(training: TrainingConfig, ranks: int, batch_size: int | None = None) -> None:
    """Refuse a `gradient_accumulation_steps` that contradicts `global_batch_size`.

    `batch_size` is that of the data, if they decide it. Raises UsageError: with the equation.
    """
    size = batch_size or training.batch_size
    accumulation = training.accumulation
    global_batch = training.global_batch_size
    product = size * accumulation * ranks
    if (
        global_batch is None
        or training.gradient_accumulation_steps is None
        or product == global_batch
    ):
        return
    follows, rest = divmod(global_batch, size * ranks)
    here = f" (here: {follows})" if not rest else ""
    raise UsageError(
        f"batch_size {size} × gradient_accumulation_steps {accumulation} × data-parallel size"
        f" {ranks} = {product}, and global_batch_size is {global_batch}",
        where="training.gradient_accumulation_steps, training.global_batch_size",
        fix=(
            f"leave gradient_accumulation_steps out, since it follows from global_batch_size{here};"
            f" or, to keep it, write training.global_batch_size={product}"
        ),
    )


def divisors(number: int, near: int) -> list[int]:
    """Return up to three divisors of a number, those nearest to `near`, ascending."""
    all_of_them = (d for d in range(1, min(number, 2 * near) + 1) if number % d == 0)
    return sorted(sorted(all_of_them, key=lambda d: abs(d - near))[:3])
