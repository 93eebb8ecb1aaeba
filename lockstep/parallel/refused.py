"""Models that no strategy can place: wrapped already, without shapes, or with gradients that can't be summed."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from lockstep.errors import UsageError, listed


def refuse_parameters(model: nn.Module, *, sharded: bool, reproducible: bool) -> None:
    """Refuse parameters that do not exist yet, and gradients that this layout can't sum.

    Raises:
        UsageError: naming them, with what to write instead.
    """
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UsageError(
            f"{listed(lazy)} has no shape yet: a lazy module makes its parameters at its first forward pass",
            why="they are laid over the ranks before that",
            fix="call the model once before it is handed over: model(*inputs of one batch)",
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"{name or type(model).__name__} makes sparse gradients",
                why="gradients are summed over micro-batches and ranks, and clipped, as dense tensors",
                fix=f"write {type(module).__name__}(…, sparse=False)",
            )
    of_complex = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if of_complex and (sharded or reproducible):
        raise UsageError(
            f"the parameter {listed(of_complex)} is complex",
            where="distributed.strategy: fsdp" if sharded else "distributed.reproducible",
            why="gradients are cut and summed there as real numbers",
            fix="keep it real, with a last dim of 2, and take torch.view_as_complex(…) of it in forward; "
            "or write strategy: ddp and reproducible: false",
        )


def refuse_wrapped(model: nn.Module) -> None:
    """A model that is wrapped already would be reduced twice.

    Raises:
        UsageError: with the line to delete.
    """
    if isinstance(model, DistributedDataParallel | DataParallel):
        name = type(model).__name__
        raise UsageError(
            f"the model is already wrapped in {name}",
            why="Lockstep places it, and would synchronise it twice",
            fix=f"delete the line model = {name}(model, …) and pass the model itself",
        )
