"""The errors of ranks whose data call units in ways that one order of gathers can't have.

Each is the same on all ranks that raise it. `joins`: whether ranks join units that their data leave
out, which stages of a pipeline can't.

Tests: tests/parallel/fsdp/test_fsdp_order.py
"""

import torch

from lockstep.errors import UsageError

_EVERYWHERE = "call it on every rank, in one order, and multiply by 0 what is not wanted"
_FIX = f"{_EVERYWHERE}; or write strategy: ddp and ddp.find_unused_parameters: true"
_SHARDED = "distributed.strategy: fsdp"


def not_joined(unit: str, *, joins: bool) -> UsageError:
    """Return the error of ranks that call a unit, or not, in a way that can't be joined."""
    what = (
        f"the data of some ranks leave out a call of {unit}, which others make, or make it in"
        " another order"
    )
    if joins:
        why = (
            "FSDP gathers a unit from all ranks at once; a rank can join in for a unit that is"
            " called once in a pass, outside of checkpoints that are reentrant, and has no units"
            " inside"
        )
    else:
        why = (
            "FSDP gathers a unit from all ranks at once; in a stage of a pipeline, whose passes"
            " overlap, a rank can't join in for it"
        )
    return _of_calls(what, why, joins=joins)


def unexpected(unit: str, *, joins: bool) -> UsageError:
    """Return the error of a rank that calls a unit where the order does not have it."""
    what = f"this rank's forward pass calls {unit} where no rank's did before, and others don't now"
    why = "FSDP gathers a unit from all ranks at once, in one order, which the first step has set"
    return _of_calls(what, why, joins=joins)


def _of_calls(what: str, why: str, *, joins: bool) -> UsageError:
    if joins:
        return UsageError(what, where=_SHARDED, why=why, fix=_FIX)
    fix = f"{_EVERYWHERE}; or write distributed.strategy: fsdp"
    return UsageError(what, where="distributed.strategy: pipeline", why=why, fix=fix)


def too_old(unit: str) -> UsageError:
    """Return the error of ranks that could join with a newer torch."""
    what = f"the data of some ranks leave out {unit}, which those of others need"
    why = (
        f"FSDP gathers a unit from all ranks at once, and that of torch {torch.__version__} takes"
        " no zeros for the gradients of a rank that leaves it out"
    )
    return UsageError(what, where=_SHARDED, why=why, fix=f"install torch 2.13 or newer; or {_FIX}")


def not_recomputed(unit: str) -> UsageError:
    """Return the error of ranks whose checkpoints recompute other units."""
    what = (
        f"a checkpoint of the model's own recomputes {unit} in the backward pass, and the data of"
        " some ranks leave out a call of that checkpoint's"
    )
    why = (
        "FSDP gathers all units of a checkpoint over several units once more, from all ranks at"
        " once"
    )
    fix = (
        "recompute one unit at a time, checkpoint(unit, x, use_reentrant=False), or let Lockstep do"
        f" it: write training.gradient_checkpointing: full; or {_FIX}"
    )
    return UsageError(what, where=_SHARDED, why=why, fix=fix)
