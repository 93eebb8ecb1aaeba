"""Writing a checkpoint: all of it or nothing, whatever happens meanwhile.

Everything goes into a folder that is not a checkpoint by its name. Each rank writes and syncs its own files; rank 0
adds the metadata, the state and, last, the manifest; syncs every folder; gives the folder its name in one rename; and
syncs the folder above. Before the rename there is no new checkpoint, after it there is a whole one. Nothing is
overwritten.
"""

import os
import platform
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lockstep.checkpoint.disk import FileFacts, make_directories, sync_directory, write_file
from lockstep.checkpoint.manifest import Manifest, ParameterFacts, verify
from lockstep.checkpoint.names import CONFIG, MANIFEST, MODEL, STATE, Writer, aside_name, step_of
from lockstep.checkpoint.pieces import Part, dtype_name
from lockstep.checkpoint.snapshot import Staged, dump_state
from lockstep.checkpoint.storage import PartWriter, global_plan, local_plan
from lockstep.checkpoint.together import Ranks
from lockstep.checkpoint.untrusted import JSON_LIMIT
from lockstep.errors import RunError, UsageError

_in_flight: set[str] = set()  # tokens of the writers of this process; the sweep of dead writers spares them


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A folder name beside `path` that is no checkpoint's, and that no sweep takes for a dead writer's.

    Whatever is there by that name at the end is removed: after a failure, nothing of the attempt stays.
    """
    writer = Writer.new()
    folder = path.with_name(writer.folder(path.name))
    _in_flight.add(writer.token)
    try:
        yield folder
    finally:
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)  # the rest is swept later; another error is to be told now
        _in_flight.discard(writer.token)


@dataclass(frozen=True)
class _Share:
    """What rank 0 tells each rank: the name of the unfinished folder, and what to write of each part."""

    folder: str
    plans: dict[str, SavePlan]


@dataclass(frozen=True)
class _Written:
    """What each rank tells rank 0: where its blocks lie, and the facts of its files (path inside the checkpoint)."""

    results: dict[str, list[WriteResult]]
    files: dict[str, FileFacts]


def commit(path: Path, step: int, staged: Staged, config_yaml: str, ranks: Ranks) -> Path:
    """Write a staged snapshot to `path`, which must not exist yet; every rank of `ranks` calls it.

    Raises:
        UsageError: there is something at `path` already (a damaged checkpoint is moved aside), or ranks disagree.
        RunError: the disk refused; the same error on every rank, and nothing of the attempt stays.
    """
    with ExitStack() as stack:
        main: MainRank | None = None
        if ranks.is_main:
            main = MainRank(path, stack.enter_context(unfinished(path)), step, staged.state, config_yaml)
        share = ranks.exchange(
            not_written(step),
            lambda: ({part: (local_plan(p), p.aliases) for part, p in staged.parts.items()}, staged.groups),
            lambda plans: on_main(main).open(plans),
        )
        ranks.judge(
            not_written(step),
            lambda: _write_share(path.with_name(share.folder), share, staged.parts),
            lambda written: on_main(main).close(written),
        )
    return path


def not_written(step: int) -> str:
    """What fails where a save fails."""
    return f"the checkpoint of step {step} was not written"


def on_main(main: "MainRank | None") -> "MainRank":
    """Rank 0's side of a save; the others never ask for it."""
    assert main is not None, "only rank 0 decides"
    return main


def _write_share(folder: Path, share: _Share, parts: Mapping[str, Part]) -> _Written:
    if not folder.is_dir():
        raise RunError(
            f"{folder} was made by rank 0, but this rank does not see it",
            why="the folder of checkpoints is not shared between the hosts",
            fix="choose an --output-dir on a file system that all hosts mount",
        )
    results: dict[str, list[WriteResult]] = {}
    files: dict[str, FileFacts] = {}
    for part, plan in share.plans.items():
        writer = PartWriter(folder / part)
        results[part] = writer.write(plan, parts.get(part, Part()))
        files |= {f"{part}/{name}": facts for name, facts in writer.facts.items()}
    return _Written(results, files)


class MainRank:
    """Rank 0's side: opens the unfinished folder, shares out the work, and commits."""

    def __init__(self, path: Path, folder: Path, step: int, state: dict[str, Any], config_yaml: str) -> None:
        self.path, self.folder, self.step, self.state, self.config_yaml = path, folder, step, state, config_yaml
        self.metadata: dict[str, Metadata] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}
        self.groups: dict[str, dict[str, Any]] = {}

    def open(
        self, ranks: list[tuple[dict[str, tuple[SavePlan, dict[str, tuple[str, ...]]]], dict[str, Any]]]
    ) -> list[_Share]:
        """Decide who writes what, and make the folders for it."""
        names = sorted({part for parts, _ in ranks for part in parts}, key=lambda part: (part != MODEL, part))
        shares: list[dict[str, SavePlan]] = [{} for _ in ranks]
        for part in names:
            plans = [parts[part][0] if part in parts else SavePlan([]) for parts, _ in ranks]
            _check_ranks_agree(plans)
            shared, self.metadata[part] = global_plan(plans, self.folder / part)
            for share, plan in zip(shares, shared, strict=True):
                share[part] = plan
        known = self.metadata[MODEL].state_dict_metadata
        self.aliases = merge_aliases([parts[MODEL][1] for parts, _ in ranks if MODEL in parts], known)
        self.groups = merge_groups([groups for _, groups in ranks])
        self.make_folders(names)
        return [_Share(self.folder.name, plans) for plans in shares]

    def make_folders(self, parts: list[str]) -> None:
        """The unfinished folder, and one in it for each part."""
        self._make_way()
        make_directories(self.path.parent)
        self.folder.mkdir()
        for part in parts:
            (self.folder / part).mkdir(parents=True)

    def _make_way(self) -> None:
        if not os.path.lexists(self.path):
            return
        if step_of(self.path.name) is None or not verify(self.path):
            raise UsageError(
                f"{self.path} exists already, and a checkpoint is never overwritten",
                fix="resume from it, or move it away",
            )
        self.path.rename(self.path.with_name(aside_name(self.step)))  # damaged: kept, but no longer in the way

    def close(self, written: list[_Written]) -> None:
        """Add metadata, state and manifest; then let the checkpoint exist."""
        files = {path: facts for rank in written for path, facts in rank.files.items()}
        for part, metadata in self.metadata.items():
            writer = PartWriter(self.folder / part)
            writer.finish(metadata, [rank.results[part] for rank in written])
            files |= {f"{part}/{name}": facts for name, facts in writer.facts.items()}
        self.seal(files, self._parameters(), list(self.metadata))

    def seal(
        self, files: dict[str, FileFacts], parameters: dict[str, ParameterFacts], parts: list[str],
        ranks: int | None = None,
    ) -> None:  # fmt: skip
        """Add state, config and manifest, and give the folder its name, once all that is in it is on disk."""
        files[STATE] = write_file(self.folder / STATE, _bounded(STATE, dump_state(self.state, self.groups)))
        files[CONFIG] = write_file(self.folder / CONFIG, self.config_yaml.encode())
        manifest = Manifest(self.step, files, parameters, tuple(parts), _versions(), ranks)
        write_file(self.folder / MANIFEST, _bounded(MANIFEST, manifest.to_bytes()))
        inside = {self.folder / part for part in parts}
        for folder in sorted(inside | {path.parent for path in inside} | {self.folder}, reverse=True):
            sync_directory(folder)
        self.folder.rename(self.path)
        sync_directory(self.path.parent)

    def _parameters(self) -> dict[str, ParameterFacts]:
        stored = self.metadata[MODEL].state_dict_metadata
        return {name: _facts(tensor, self.aliases.get(name, ())) for name, tensor in stored.items()}


def is_in_flight(token: str) -> bool:
    """Whether a writer of this process, by its token, is still at work."""
    return token in _in_flight


def _bounded(name: str, data: bytes) -> bytes:
    """What a reader will take.

    Raises:
        UsageError: it would refuse so much.
    """
    if len(data) > JSON_LIMIT:
        raise UsageError(
            f"{name} of the checkpoint would have {len(data) >> 20} MiB, and {JSON_LIMIT >> 20} MiB are read at most",
            fix="keep large data in tensors, in `extra`, or in a file of your own",
        )
    return data


def _facts(tensor: object, aliases: tuple[str, ...]) -> ParameterFacts:
    assert isinstance(tensor, TensorStorageMetadata)
    return ParameterFacts(tuple(tensor.size), dtype_name(tensor.properties.dtype), aliases)


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version()}


def _check_ranks_agree(plans: list[SavePlan]) -> None:
    seen: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for plan in plans:
        for item in plan.items:
            assert item.tensor_data is not None
            mine = (tuple(item.tensor_data.size), item.tensor_data.properties.dtype)
            first = seen.setdefault(item.index.fqn, mine)
            if first != mine:
                raise UsageError(
                    f"ranks disagree about {item.index.fqn}: {_say(first)} on one, {_say(mine)} on another",
                    why="a name means one tensor, whichever ranks hold it",
                )


def _say(facts: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{dtype_name(facts[1])}{list(facts[0])}"


def merge_aliases(ranks: list[dict[str, tuple[str, ...]]], names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The further names of each tensor over all ranks.

    Args:
        names: the canonical ones.

    Raises:
        UsageError: what is a further name on one rank is a tensor of its own on another.
    """
    merged: dict[str, tuple[str, ...]] = {}
    for aliases in ranks:
        for name, others in aliases.items():
            merged[name] = tuple(dict.fromkeys((*merged.get(name, ()), *others)))
    for name, others in merged.items():
        if both := [other for other in others if other in names]:
            raise UsageError(
                f"{name} and {both[0]} are one parameter on one rank and two on another",
                fix="tell the snapshot: aliases={canonical name: (further names,)} on every rank",
            )
    return merged


def merge_groups(ranks: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The parameter groups of each optimizer over all ranks, which may hold different parameters of a group.

    Raises:
        UsageError: ranks have different options for a group.
    """
    merged: dict[str, dict[str, Any]] = {}
    for groups in ranks:
        for name, mine in groups.items():
            whole = merged.setdefault(name, {"groups": [], "values": {}})
            whole["values"] |= mine["values"]
            for i, group in enumerate(mine["groups"]):
                if i == len(whole["groups"]):
                    whole["groups"].append({"params": [], "options": group["options"]})
                if whole["groups"][i]["options"] != group["options"]:
                    raise UsageError(
                        f"group {i} of optimizer {name!r} has different options on different ranks",
                        fix="make the optimizer alike on every rank: options must not depend on the rank",
                    )
                known = whole["groups"][i]["params"]
                known += [param for param in group["params"] if param not in set(known)]
    return merged
