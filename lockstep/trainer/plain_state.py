"""Takes the plain model's `state_dict` from a placed model, and loads it into one.

It also handles what a checkpoint holds of the model beside its tensors.

A model may give its `state_dict` a form of its own (`lockstep.parallel.state_form`).

Tests: tests/trainer/test_own_loop.py, tests/checkpoint/test_own_forms.py
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep import checkpoint
from lockstep.models.hf_folder import description_of
from lockstep.parallel.parallel_model import ParallelModel

_MODULE_STATE = "module_state"  # in a checkpoint's state: what `get_extra_state` returns, by module


def plain_state_dict(placed: ParallelModel) -> dict[str, Any]:
    """Return the plain model's `state_dict`, whole, on the CPU of rank 0, and {} on others.

    All ranks call it.
    """
    whole = checkpoint.gather(placed.kept(), placed.named_aliases)
    if placed.form is None:
        return whole
    placed.form.load_extra(_module_state(placed))  # of stages on other ranks
    return placed.form.written(whole) if whole else {}


def load_plain_state_dict(placed: ParallelModel, state: Mapping[str, Any]) -> None:
    """Load a plain model's `state_dict`, of which rank 0's counts; all ranks call it.

    Raises:
        UsageError: on every rank; it is another model's.
    """
    form = placed.form
    if form is None:
        checkpoint.scatter(state, placed.kept(), placed.named_aliases)
        return
    ranks = checkpoint.Ranks()
    failure = "the model was not loaded"
    whole = dict[str, Tensor]()

    def read() -> dict[str, Any]:
        of_loss = {name: value for name, value in state.items() if name in placed.loss_names}
        whole.update(
            form.read({name: value for name, value in state.items() if name not in of_loss})
        )
        whole.update(of_loss)
        return form.extra_state([form.root])

    extra = ranks.broadcast(failure, read)
    checkpoint.scatter(whole, placed.kept(), placed.named_aliases)
    form.load_extra(extra)


def load_imported(placed: ParallelModel, path: checkpoint.Checkpoint) -> dict[str, Any] | None:
    """Load weights of another trainer into a model that has a form of its own.

    Return the checkpoint's state.

    None, and nothing is loaded, where names and values are the model's own, as in the checkpoint of
    a run.
    """
    if placed.form is None or "imported_from" not in checkpoint.read_state(path).get(
        "metadata", {}
    ):
        return None
    weights = dict[str, Any]()
    ranks = checkpoint.Ranks()
    ranks.run(
        "the weights could not be read",
        lambda: weights.update(checkpoint.weights(path) if ranks.is_main else {}),
    )
    load_plain_state_dict(placed, weights)
    return checkpoint.read_state(path)


def state_of_model(placed: ParallelModel) -> dict[str, Any]:
    """Return what a checkpoint holds of the model beside its tensors; all ranks call it."""
    state: dict[str, Any] = {}
    if placed.loss_names:
        state[checkpoint.LOSS_NAMES] = placed.loss_names
    described = None if placed.root is None else description_of(placed.root)
    if described is not None:
        state[checkpoint.HUGGING_FACE] = described
    if placed.form is not None:
        state[checkpoint.OWN_FORM] = placed.form.modules
        state[_MODULE_STATE] = _module_state(placed)
    return state


def load_state_of_model(placed: ParallelModel, state: Mapping[str, Any]) -> None:
    """Give the model what `state_of_model` returned."""
    if placed.form is not None:
        placed.form.load_extra(state.get(_MODULE_STATE, {}))


def _module_state(placed: ParallelModel) -> dict[str, Any]:
    """Return name → what `get_extra_state` returns, of the whole model."""
    form = placed.form
    if form is None or not form.extra:
        return {}

    def merged(ranks: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
        states = dict(ranks[0][0])
        for _, here in reversed(ranks):
            states |= here
        return states

    mine = form.extra_state([form.root]), form.extra_state(placed.parts)
    return checkpoint.Ranks().all_reduce(
        "the state of modules was not gathered", lambda: mine, merged
    )
