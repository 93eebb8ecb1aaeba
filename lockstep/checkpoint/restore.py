"""Load a checkpoint in any layout of ranks: verify, compare strictly, fill the tensors in place.

The state of an optimizer is stored by canonical parameter names, as in `layers.0.weight//exp_avg`;
options of the groups and plain numbers are JSON. Nothing depends on the order of parameters or on
their number per rank.

Tests: tests/checkpoint/test_round_trip.py, tests/checkpoint/test_optimizers.py,
tests/checkpoint/test_ranks.py, tests/parity/test_change_of_topology.py
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.fetch import Fetch, FetchedLocation, Ranges, deal_rest, fetched
from lockstep.checkpoint.manifest import (
    GROUPS_KEY,
    LOSS_NAMES,
    MODEL,
    DamagedError,
    Manifest,
    damaged_error,
    dtype_of,
    problems_of_files,
    read_manifest,
    read_state,
)
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.read import LocalReader, PartReader, ShardedReader, open_part
from lockstep.checkpoint.snapshot import Snapshot, TensorBlock, TensorInfo, as_json, blocks_of
from lockstep.checkpoint.storage import Checkpoint, Location
from lockstep.errors import UsageError, listed

SEPARATOR = "//"
_AS_BUILT = "build the optimizer as it was built for the run that saved"
_FAILURE = "the checkpoint {} could not be loaded"
_STEP = "step"  # torch's optimizers keep it on CPU, unless one of these options is on
_STEP_ON_DEVICE = ("capturable", "fused")
# These options choose kernels and do not change the update. The running optimizer keeps its own,
# because the stored ones may not be available: shards have no fused SGD, and a run on a CPU may
# continue one on a GPU.
_KERNEL_OPTIONS = ("foreach", "fused", "capturable")


def load(
    path: Checkpoint,
    snapshot: Snapshot,
    *,
    only: Collection[str] | None = None,
    is_verified: bool = False,
) -> dict[str, Any]:
    """Fill the snapshot's tensors, in place, from a checkpoint; every rank calls it.

    The ranks, the mesh and the placements may differ from those that saved. Nothing is changed
    before every checksum was compared (each rank reads a share of the files) and every name, shape
    and dtype agrees. `only` lists the parts to load, such as `["model"]`; if None, all, and both
    sides must have the same ones. With `is_verified` the ranks have compared all checksums just now
    (`resume_point`), and do not again. Every rank gets the checkpoint's `state`, with the
    optimizers' groups under "optimizer_groups".

    A UsageError is raised if there is no checkpoint, or it has other names, shapes, dtypes or ties
    than the snapshot, and a DamagedError for a file that is not what was written.
    """
    ranks = Ranks()
    checkpoint = fetched(path)
    failure = _FAILURE.format(checkpoint)
    near = checkpoint if isinstance(checkpoint, FetchedLocation) else None
    verified: Manifest | None = None
    if near is not None:
        verified = near.held.manifest
    elif not is_verified:
        verified = verify_together(checkpoint, ranks)
    targets: dict[str, _Target] = {}
    fetches: list[Fetch] = []  # one, of a checkpoint far away

    def describe() -> _Described:
        manifest = verified or read_manifest(checkpoint)
        targets.update(_targets(checkpoint, manifest, snapshot, only))
        for target in targets.values():
            if isinstance(target.reader, LocalReader) and not checkpoint.storage.in_memory:
                target.reader.check_topology(target.blocks, target.owner, ranks)
        infos = {part: target.info() for part, target in targets.items()}
        needed = {} if near is None else _needed(targets.values())
        for fetch in fetches:
            fetch.begin(needed)
        return _Described(infos, snapshot.aliases, needed)

    def compare(ranks: list[_Described]) -> list[Ranges]:
        """Compare, on rank 0, what all ranks hold with what the checkpoint has.

        Return, by rank, what is read of a checkpoint far away for its checksums alone.
        """
        described = [rank.infos for rank in ranks]
        # each stage of a pipeline knows the tied names of its own parameters
        aliases = {name: others for rank in ranks for name, others in rank.aliases.items()}
        stored = {part: target.reader.stored.info() for part, target in targets.items()}
        spare = set(read_state(checkpoint).get(LOSS_NAMES, ()))
        if MODEL in stored and not any(spare & infos[MODEL].keys() for infos in described):
            # whoever samples or evaluates needs no loss function
            stored[MODEL] = {
                name: info for name, info in stored[MODEL].items() if name not in spare
            }
        # a file may have tied weights twice
        for alias in _equal_aliases(targets.get(MODEL), aliases):
            del stored[MODEL][alias]
        _compare(checkpoint, stored, described, aliases)
        if near is None or is_verified:
            return [{} for _ in ranks]
        return deal_rest(near.held.manifest, near.held.files, [rank.needed for rank in ranks])

    def fill() -> dict[str, Any]:
        for target in targets.values():
            rest = dict(target.blocks)
            # each pass reads a stored name once; a parameter that is here twice takes two passes
            while rest:
                now = {target.owner.get(name, name): name for name in reversed(rest)}
                target.reader.read_into({kept: rest.pop(name) for kept, name in now.items()})
        return read_state(checkpoint)

    if near is None:
        ranks.exchange(failure, describe, compare)
        return ranks.run(failure, fill)
    held = near.held
    with held.fetching() as fetch:
        fetches.append(fetch)
        rest = ranks.exchange(failure, describe, compare)
        found = ranks.all_reduce(failure, lambda: [*fetch.problems(), *held.check(rest)], list)
    # several ranks may need the same bytes
    if problems := {problem for share in found for problem in share}:
        raise damaged_error(checkpoint, sorted(problems))
    return ranks.run(failure, fill)


def verify_together(checkpoint: Location, ranks: Ranks) -> Manifest:
    """Compare every checksum of a checkpoint, with a share of the files on each rank.

    All ranks raise one error.
    """
    failure = _FAILURE.format(checkpoint)
    read: list[Manifest] = []

    def verify_share() -> list[str]:
        manifest = read_manifest(checkpoint)
        read.append(manifest)
        by_size = sorted(manifest.files, key=lambda path: (manifest.files[path].size, path))
        # in memory each host has files of its own, of which sizes are compared, and little is read
        mine = by_size if checkpoint.storage.in_memory else by_size[ranks.rank :: ranks.size]
        return problems_of_files(checkpoint, manifest, mine, thorough=True)

    shares = ranks.all_reduce(failure, verify_share, list)
    if problems := [problem for share in shares for problem in share]:
        raise damaged_error(checkpoint, problems)
    return read[0]


_Infos = dict[str, TensorInfo]  # by name


@dataclass(frozen=True)
class _Described:
    """The tensors that one rank holds, and the bytes of the files that it needs."""

    infos: dict[str, _Infos]  # by part
    aliases: Mapping[str, Sequence[str]]
    needed: Ranges


@dataclass
class _Target:
    reader: PartReader
    blocks: dict[str, TensorBlock]  # this rank's, by their names in the snapshot
    owner: dict[str, str] = field(default_factory=dict)  # alias → canonical name, as stored

    def info(self) -> _Infos:
        return {self.owner.get(name, name): block.info for name, block in self.blocks.items()}


def _needed(targets: Iterable[_Target]) -> Ranges:
    """Return the bytes of the files that this rank's blocks are read from."""
    needed: Ranges = {}
    for target in targets:
        blocks = {target.owner.get(name, name): block for name, block in target.blocks.items()}
        needed |= target.reader.needed(blocks)
    return needed


def _targets(
    checkpoint: Location, manifest: Manifest, snapshot: Snapshot, only: Collection[str] | None
) -> dict[str, _Target]:
    """Return what to read into which tensors, for each part; refuse what does not fit."""
    tensors = snapshot.tensors()
    wanted = {part for part in (*manifest.parts, *tensors) if only is None or part in only}
    stray = [f"{part}: not in the checkpoint" for part in sorted(wanted - set(manifest.parts))]
    stray += [
        f"{part}: only in the checkpoint"
        for part in sorted(wanted & set(manifest.parts) - tensors.keys())
    ]
    if stray:
        raise UsageError(
            f"{checkpoint} holds other parts than were to be loaded", why=listed(stray)
        )
    targets = {
        part: _Target(open_part(checkpoint, manifest, part), blocks_of(tensors[part]))
        for part in sorted(wanted)
    }
    if MODEL in targets:
        ties = {alias: name for name, info in manifest.parameters.items() for alias in info.aliases}
        targets[MODEL].owner = ties | _stored_under_aliases(targets[MODEL], snapshot.aliases)
        _check_ties(
            checkpoint, targets[MODEL], {a for others in snapshot.aliases.values() for a in others}
        )
    return targets


def _stored_under_aliases(model: _Target, aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return name → alias for tied weights that another trainer's file has under an alias."""
    stored = model.reader.stored.info()
    return {
        name: next(other for other in others if other in stored)
        for name, others in aliases.items()
        if name not in stored and any(other in stored for other in others)
    }


def _check_ties(checkpoint: Location, model: _Target, declared: Collection[str]) -> None:
    """Refuse tensors that are tied only in the checkpoint or only in the model."""
    in_memory: dict[tuple[object, ...], str] = {}
    stored: dict[str, str] = {}
    for name, block in model.blocks.items():
        if not block.tensor.numel():
            continue
        kept = model.owner.get(name, name)
        first = in_memory.setdefault(block.memory, name)
        if model.owner.get(first, first) != kept:
            fix = (
                "untie them before loading, or build the model as it was built for the run that"
                " saved"
            )
            raise UsageError(
                f"{first} and {name} are tied in the model, but two parameters in {checkpoint}",
                fix=fix,
            )
        other = stored.setdefault(kept, name)
        if model.blocks[other].memory != block.memory and not {name, other} & set(declared):
            what = f"{other} and {name} are two parameters in the model, but tied in {checkpoint}"
            raise UsageError(what, fix="tie them before loading: training would pull them apart")


def _equal_aliases(model: _Target | None, aliases: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of tied weights that are stored separately with equal values."""
    equal: list[str] = []
    if model is None or not isinstance(model.reader, ShardedReader):
        return equal
    stored = model.reader.stored.info()
    for name, others in aliases.items():
        for other in others:
            if name in stored and stored.get(other) == stored[name] and other not in model.owner:
                shape, dtype = stored[name]
                both = {each: torch.empty(shape, dtype=dtype_of(dtype)) for each in (name, other)}
                model.reader.read_into(
                    {each: TensorBlock.full(tensor) for each, tensor in both.items()}
                )
                equal += [other] if torch.equal(both[name], both[other]) else []
    return equal


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


def _compare(
    checkpoint: Location,
    stored: dict[str, _Infos],
    ranks: list[dict[str, _Infos]],
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
        unexpected |= {
            prefix + name
            for name in kept.keys() - {name for rank in ranks for name in rank.get(part, {})}
        }
        for name, (shape, dtype) in (item for rank in ranks for item in rank.get(part, {}).items()):
            if name not in kept:
                missing.add(prefix + name)
                continue
            stored_shape, stored_dtype = kept[name]
            if shape != stored_shape:
                shapes.add(f"{prefix}{name} (stored {list(stored_shape)}, wanted {list(shape)})")
            if dtype != stored_dtype:
                dtypes.add(f"{prefix}{name} (stored {stored_dtype}, wanted {dtype})")
    if differing := [
        f"{kind}: {listed(sorted(names))}" for kind, names in names_by_kind.items() if names
    ]:
        fix = (
            "build the model and the optimizer from the config beside the checkpoint's state,"
            " config.yaml; to start a new run there, --resume never (in Python resume='never')"
            " sets the old checkpoints aside; or choose another --output-dir (in Python"
            " output_dir=…)"
        )
        fix = _to_import_again(checkpoint, missing, unexpected, ties) or fix
        raise UsageError(f"{checkpoint} does not fit this model", why="; ".join(differing), fix=fix)


def unreadable(path: Checkpoint) -> list[str]:
    """Return why a checkpoint with correct checksums can't be read.

    The contents of its tensors are not read.
    """
    checkpoint = locate(path)
    try:
        manifest = read_manifest(checkpoint)
        for part in manifest.parts:
            open_part(checkpoint, manifest, part)
        read_state(checkpoint)
    except DamagedError as error:
        return [f"{error.where}: {error.why}"]
    return []


def optimizer_state(
    optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of an optimizer, for a `Snapshot`.

    `names` has the canonical name by the id of each parameter.

    These are the tensors, `"<parameter>//<key>"` → tensor, which share the optimizer's memory, and
    the rest as JSON: `{"groups": [{"params": [names], "options": {…}}], "values": {parameter: {key:
    number}}}`. A UsageError is raised for a parameter without a name, and a value that is neither a
    tensor nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        params = [_name(parameter, names) for parameter in group["params"]]
        options = {
            k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"
        }
        groups.append({"params": params, "options": as_json(options, "an option of the optimizer")})
        for name, parameter in zip(params, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}{SEPARATOR}{key}"] = value
                else:
                    values.setdefault(name, {})[key] = as_json(
                        value, f"the optimizer's {key!r} of {name}"
                    )
    return tensors, {"groups": groups, "values": values}


def optimizers_in(path: Checkpoint) -> list[str]:
    """Return the names of the optimizers with a state in a checkpoint."""
    parts = (part.partition("/") for part in read_manifest(path).parts)
    return sorted(name for kind, _, name in parts if kind == "optimizer")


def optimizer_targets(
    path: Checkpoint, name: str, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return empty tensors, by canonical name, for the stored state of one optimizer.

    They are for the parameters of this rank.

    A state tensor with the shape of its parameter gets the device, mesh and placements of the
    parameter; any other (`step`) is a plain tensor on CPU. The dtype is the stored one.
    """
    checkpoint = locate(path)
    targets = {}
    for full, stored in open_part(
        checkpoint, read_manifest(checkpoint), f"optimizer/{name}"
    ).stored.tensors.items():
        of, _, key = full.rpartition(SEPARATOR)
        dtype = stored.properties.dtype
        if of in parameters and key != _STEP and stored.size == parameters[of].shape:
            targets[full] = torch.empty_like(parameters[of], dtype=dtype, requires_grad=False)
        elif of in parameters:
            targets[full] = torch.empty(stored.size, dtype=dtype)
    return targets


def add_missing_groups(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], path: Checkpoint, name: str
) -> None:
    """Add the parameter groups that the run that saved had added later.

    Nothing is added unless the optimizer's own groups are the first of those in the checkpoint.
    Parameters that were frozen until then train from now on.
    """
    names = {id(parameter): each for each, parameter in parameters.items()}
    stored = [group["params"] for group in read_state(path)[GROUPS_KEY][name]["groups"]]
    own = [
        [names.get(id(parameter)) for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
    stored_here = [[each for each in group if each in parameters] for group in stored]
    if len(stored_here) > len(own) and stored_here[: len(own)] == own:
        for group in stored_here[len(own) :]:
            optimizer.add_param_group(
                {"params": [parameters[each].requires_grad_() for each in group]}
            )


def restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, Any],
) -> None:
    """Give an optimizer the state that `load` has read.

    A UsageError is raised if the optimizer has other groups.

    It takes over the `tensors` of `optimizer_targets`. The stored `groups` may list parameters of
    other ranks too; `names` has the canonical name by the id of each parameter of this rank.
    """
    stored_groups = groups["groups"]
    if len(stored_groups) != len(optimizer.param_groups):
        what = (
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint"
            f" {len(stored_groups)}"
        )
        raise UsageError(what, fix=_AS_BUILT)
    home = {name: i for i, group in enumerate(stored_groups) for name in group["params"]}
    for i, group in enumerate(optimizer.param_groups):
        for name in (_name(parameter, names) for parameter in group["params"]):
            if home.get(name) != i:
                where = f"in group {home[name]}" if name in home else "in none"
                what = f"{name} is in group {i} of the optimizer, and {where} in the checkpoint"
                raise UsageError(what, fix=_AS_BUILT)
    for group, stored in zip(
        optimizer.param_groups,
        (stored_group["options"] for stored_group in stored_groups),
        strict=True,
    ):
        for key, value in stored.items():
            current = group.get(key)
            if key in _KERNEL_OPTIONS:
                continue
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value
    values: Mapping[str, Mapping[str, Any]] = groups["values"]
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        parameter, _, key = full.rpartition(SEPARATOR)
        by_parameter.setdefault(parameter, {})[key] = tensor
    for group in optimizer.param_groups:
        on_device = any(group.get(option) for option in _STEP_ON_DEVICE)
        for parameter in group["params"]:
            name = _name(parameter, names)
            state: dict[str, Any] = {**values.get(name, {})}
            for key, tensor in by_parameter.get(name, {}).items():
                state[key] = (
                    tensor if key == _STEP and not on_device else tensor.to(parameter.device)
                )
            optimizer.state[parameter] = state
            if not state:
                del optimizer.state[parameter]


def _name(parameter: Tensor, names: Mapping[int, str]) -> str:
    """Return the canonical name of a parameter that an optimizer holds."""
    if id(parameter) not in names:
        what = (
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model does"
            " not have"
        )
        why = (
            "it was made before the model was placed, or from another model: what it updates is not"
            " trained on"
        )
        raise UsageError(what, why=why)
    return names[id(parameter)]
