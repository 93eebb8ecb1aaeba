"""Load a checkpoint in any layout of ranks: verify, compare strictly, fill the tensors in place.

    verify_together, or fetch.py     every checksum, with a share of the files on each rank
    _Loading.describe                what each rank holds, and what it reads into it (targets.py)
    _Loading.compare                 rank 0 refuses what does not fit (fit.py)
    _Loading.fill                    nothing was changed before

The state of an optimizer is in optimizer_state.py.

Tests: tests/checkpoint/test_round_trip.py, tests/checkpoint/test_optimizers.py,
tests/checkpoint/test_ranks.py, tests/parity/test_change_of_topology.py
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.checkpoint.fetch import FetchedLocation, HeldBytes, Ranges, deal_rest, fetched
from lockstep.checkpoint.fit import require_fit
from lockstep.checkpoint.manifest import (
    LOSS_NAMES,
    MODEL,
    DamagedError,
    Manifest,
    damaged_error,
    problems_of_files,
    read_manifest,
    read_state,
)
from lockstep.checkpoint.posix import locate
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.read import LocalReader, open_part
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.storage import Checkpoint, Location
from lockstep.checkpoint.targets import (
    RestoreTarget,
    TensorInfos,
    equal_aliases,
    needed_ranges,
    targets_of,
)

_FAILURE = "the checkpoint {} could not be loaded"


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
    if isinstance(checkpoint, FetchedLocation):
        loading = _Loading(checkpoint, snapshot, only, ranks, checkpoint.held.manifest)
        loading.verify_while_compared(checkpoint.held, failure, shares_rest=not is_verified)
    else:
        manifest = None if is_verified else verify_together(checkpoint, ranks)
        loading = _Loading(checkpoint, snapshot, only, ranks, manifest)
        ranks.all_reduce(failure, loading.describe, loading.compare)
    return ranks.run(failure, loading.fill)


class _Loading:
    """One rank's part in a load: it describes its tensors, and fills them once they fit.

    Args:
        checkpoint: what is loaded.
        snapshot: the tensors of this rank.
        only: the parts to load; None: all.
        ranks: that load together.
        manifest: of the checkpoint, if it was read and verified; else None.
    """

    def __init__(
        self,
        checkpoint: Location,
        snapshot: Snapshot,
        only: Collection[str] | None,
        ranks: Ranks,
        manifest: Manifest | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._snapshot = snapshot
        self._only = only
        self._ranks = ranks
        self._manifest = manifest
        self._targets: dict[str, RestoreTarget] = {}  # by part

    def verify_while_compared(self, held: HeldBytes, failure: str, *, shares_rest: bool) -> None:
        """Bring what this rank needs of a checkpoint far away here, while ranks compare it.

        Args:
            held: takes the bytes, and compares their checksums.
            failure: what other exceptions are explained by.
            shares_rest: whether the ranks also read, for its checksums, what none of them needs.
        """
        with held.fetching() as fetch:

            def describe() -> _Described:
                described = self.describe()
                needed = needed_ranges(self._targets.values())
                fetch.begin(needed)
                return replace(described, needed=needed)

            def compare(described: list[_Described]) -> list[Ranges]:
                self.compare(described)
                if not shares_rest:
                    return [{} for _ in described]
                needed = [rank.needed for rank in described]
                return deal_rest(held.manifest, held.files, needed)

            rest = self._ranks.exchange(failure, describe, compare)
            found = self._ranks.all_reduce(
                failure, lambda: [*fetch.problems(), *held.check(rest)], list
            )
        # several ranks may need the same bytes
        problems = {problem for share in found for problem in share}
        if problems:
            raise damaged_error(self._checkpoint, sorted(problems))

    def describe(self) -> "_Described":
        """Find what is to be read into which tensors, and return what this rank holds."""
        checkpoint = self._checkpoint
        manifest = self._manifest or read_manifest(checkpoint)
        self._targets = targets_of(checkpoint, manifest, self._snapshot, self._only)
        for target in self._targets.values():
            if isinstance(target.reader, LocalReader) and not checkpoint.storage.in_memory:
                target.reader.check_topology(target.blocks, target.owner, self._ranks)
        infos = {part: target.info() for part, target in self._targets.items()}
        return _Described(infos, self._snapshot.aliases)

    def compare(self, described: list["_Described"]) -> None:
        """Refuse, on rank 0, a checkpoint that has not what all ranks hold together."""
        # each stage of a pipeline knows the tied names of its own parameters
        aliases = {name: others for rank in described for name, others in rank.aliases.items()}
        stored = {part: target.reader.stored.info() for part, target in self._targets.items()}
        of_loss = set(read_state(self._checkpoint).get(LOSS_NAMES, ()))
        if MODEL in stored:
            # Whoever samples or evaluates needs no loss function.
            if not any(of_loss & rank.infos[MODEL].keys() for rank in described):
                model = stored[MODEL].items()
                stored[MODEL] = {name: info for name, info in model if name not in of_loss}
            # a file may have tied weights twice
            for alias in equal_aliases(self._targets[MODEL], aliases):
                del stored[MODEL][alias]
        require_fit(self._checkpoint, stored, [rank.infos for rank in described], aliases)

    def fill(self) -> dict[str, Any]:
        """Read the values into this rank's tensors, and return the checkpoint's state."""
        for target in self._targets.values():
            rest = dict(target.blocks)
            # each pass reads a stored name once; a parameter that is here twice takes two passes
            while rest:
                now = {target.owner.get(name, name): name for name in reversed(rest)}
                target.reader.read_into({kept: rest.pop(name) for kept, name in now.items()})
        return read_state(self._checkpoint)


@dataclass(frozen=True)
class _Described:
    """The tensors that one rank holds, and the bytes of the files that it needs."""

    infos: dict[str, TensorInfos]  # by part
    aliases: Mapping[str, Sequence[str]]
    needed: Ranges = field(default_factory=dict)  # of a checkpoint far away


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
