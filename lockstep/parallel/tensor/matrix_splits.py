"""Which matrices lie side by side in the weights of a model, for optimizers that update matrices.

A weight of queries, keys and values of two heads of width 3, for inputs of width 6, is [18, 6]:

    layers    (0, (6, 6, 6))                 three matrices [6, 6]
    heads     (0, (3, 3, 3, 3, 3, 3))        six matrices [3, 6]

A layer of the library `transformers` that is transposed, [6, 18], is split along dim 1.

Tests: tests/test_muon.py
"""

from torch import nn

from lockstep.errors import UsageError
from lockstep.models.hf_layers import is_transposed
from lockstep.parallel.facts import ModelFacts

Splits = dict[str, tuple[int, tuple[int, ...]]]


def splits_of(facts: ModelFacts, how: str) -> Splits:
    """Return name of a weight → (dim, sizes), of those that hold several matrices.

    What they hold is read from the plan by which the model is cut over ranks.

    Args:
        how: `layers`, or `heads`, which splits queries, keys and values further.

    Raises:
        UsageError: the model does not say what its weights hold.
    """
    try:
        plan = facts.tensor_plan
    except UsageError as error:
        fix = "leave split out, or give the model tensor_plan() (docs/how_to/tensor.md)"
        where = "training.optimizer_args.split"
        what = f"{type(facts.model).__name__} does not say what its weights hold"
        raise UsageError(what, where=where, why=error.what, fix=fix) from None

    splits: Splits = {}
    for name, module, attribute, way in plan.layers:
        weight = getattr(module, attribute or "weight", None)
        by_heads = way in ("heads", "fused_heads")
        fused = way in ("fused", "fused_heads")
        if not (by_heads or fused) or not isinstance(weight, nn.Parameter) or weight.ndim != 2:
            continue
        dim = 1 if is_transposed(module) else 0
        sizes: tuple[int, ...] = (weight.shape[dim],)
        if fused:
            sizes = tuple(getattr(module, "fused_sizes", sizes))
        if by_heads and how == "heads":
            width = plan.heads[name][1]
            sizes = (width,) * (weight.shape[dim] // width)
        if len(sizes) > 1:
            splits[facts.names[id(weight)]] = (dim, sizes)
    return splits
