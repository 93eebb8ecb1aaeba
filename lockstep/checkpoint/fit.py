"""Refuses a checkpoint whose tensors are not those that the ranks hold, and says what to do.

Tests: tests/checkpoint/test_round_trip.py, tests/checkpoint/test_ranks.py
"""

from collections.abc import Mapping, Sequence

from lockstep.checkpoint.manifest import MODEL, read_state
from lockstep.checkpoint.storage import Location
from lockstep.checkpoint.targets import TensorInfos
from lockstep.errors import UsageError, listed


def require_fit(
    checkpoint: Location,
    stored: dict[str, TensorInfos],
    ranks: list[dict[str, TensorInfos]],
    ties: Mapping[str, Sequence[str]],
) -> None:
    """Refuse names that only one side has, or that have another shape or dtype; on rank 0."""
    names_by_kind: dict[str, set[str]] = {
        "missing in the checkpoint": set(),
        "only in the checkpoint": set(),
        "of another shape": set(),
        "of another dtype": set(),
    }
    missing, unexpected, shapes, dtypes = names_by_kind.values()
    for part, kept in stored.items():
        prefix = "" if part == MODEL else f"{part}: "
        held = [item for rank in ranks for item in rank.get(part, {}).items()]
        unexpected |= {prefix + name for name in kept.keys() - {name for name, _ in held}}
        for name, (shape, dtype) in held:
            if name not in kept:
                missing.add(prefix + name)
                continue
            stored_shape, stored_dtype = kept[name]
            if shape != stored_shape:
                shapes.add(f"{prefix}{name} (stored {list(stored_shape)}, wanted {list(shape)})")
            if dtype != stored_dtype:
                dtypes.add(f"{prefix}{name} (stored {stored_dtype}, wanted {dtype})")
    differing = [
        f"{kind}: {listed(sorted(names))}" for kind, names in names_by_kind.items() if names
    ]
    if differing:
        fix = (
            "build the model and the optimizer from the config beside the checkpoint's state,"
            " config.yaml; to start a new run there, --resume never (in Python resume='never')"
            " sets the old checkpoints aside; or choose another --output-dir (in Python"
            " output_dir=…)"
        )
        fix = _to_import_again(checkpoint, missing, unexpected, ties) or fix
        raise UsageError(f"{checkpoint} does not fit this model", why="; ".join(differing), fix=fix)


def _to_import_again(
    checkpoint: Location, missing: set[str], unexpected: set[str], ties: Mapping[str, Sequence[str]]
) -> str | None:
    """Return how imported weights become those of the model; None if they are a run's own."""
    if "imported_from" not in read_state(checkpoint).get("metadata", {}):
        return None
    for prefix in {
        name.removesuffix(wanted)
        for wanted in missing
        for name in unexpected
        if name.endswith(wanted)
    }:
        if prefix and all(prefix + name in unexpected for name in missing):
            return (
                f"import the weights again with --prefix {prefix} (in Python import_weights(…,"
                f" prefix={prefix!r}))"
            )
    for name, others in ties.items():
        # of the shape that both have, and with other values
        if not missing and unexpected <= set(others):
            what = (
                f"{name} and {listed(sorted(unexpected))} are one parameter in the model, with two"
                " values in the file"
            )
            return f"{what}: delete one of these names from the weights, and import them again"
    return (
        "import weights with these very names and shapes; or load what fits before the Trainer is"
        " made: model.load_state_dict(lockstep.checkpoint.weights(PATH), strict=False)"
    )
