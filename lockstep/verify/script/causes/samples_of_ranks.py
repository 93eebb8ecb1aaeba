"""Finds ranks that train on each other's samples, or that lack those of a model they share.

A rank's samples are known by their fingerprints, batch by batch. Of two ranks that read batches of
two samples each in two steps:

    rank 0: a b | c d     rank 1: a b | c d     the loader is not sharded
    rank 0: a b | c d     rank 1: c f | d a     each takes its part of an order of its own
    rank 0: a b | c d     rank 1: b e | f g     b is drawn by both in one step
    rank 0: a b | c d     rank 1: e f | g h     as it should be

Tests: tests/verify/test_samples_of_ranks.py, tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.fixes import fix_for, script_cause
from lockstep.verify.script.observed.draws import drawn_apart
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.world import World

_MANY = 0.15  # of an epoch's samples; half as much as two ranks with other orders share
_ONE_ORDER = "shuffle with one seed on all ranks, as seed + epoch, and take order[rank::world_size]"
_BY_SAMPLES = "fingerprints of the samples of each rank"


def _batches_read(record: ScriptRecord, loader: int | None) -> list[list[str]]:
    """Return the samples of each batch of a training loader that the steps have used.

    Without a loader the rows of the model's inputs.
    """
    if loader is not None:
        return record.batches_trained_on(loader)
    return [rows for step in record.steps for rows in step.inputs]


def _loaders_of(record: ScriptRecord) -> list[int | None]:
    """Return the training loaders; None alone, where samples come from none."""
    return [*record.training_loaders] or [None]


def is_cut_by_script(world: World) -> bool:
    """Return whether all units read the same batches but give the model other parts of them."""
    leaders = world.leaders
    loaders = leaders[0].training_loaders
    if not loaders or len(leaders) == 1:
        return False
    batches = [[_batches_read(record, loader) for loader in loaders] for record in leaders]
    inputs = [[step.elements for step in record.steps] for record in leaders]
    reads_the_same = all(of_rank == batches[0] for of_rank in batches)
    has_same_inputs = all(of_rank == inputs[0] for of_rank in inputs)
    if not reads_the_same or has_same_inputs or not any(inputs[0]):
        return False
    if not drawn_apart([record.draws for record in leaders]):
        return True
    # Ranks that add noise of their own have other inputs, too, and as many rows as they read.
    rows = max((len(rows) for step in leaders[0].steps for rows in step.inputs), default=0)
    return rows < max((len(batch) for read in batches[0] for batch in read), default=0)


# ---- ranks that share a model ----


def other_samples(world: World) -> Cause | None:
    """Return a cause if ranks that share a model read other samples."""
    for unit in world.units:
        for loader in _loaders_of(world.records[unit[0]]):
            cause = _other_samples_of(world, unit, loader)
            if cause is not None:
                return cause
    return None


def _other_samples_of(world: World, unit: Sequence[int], loader: int | None) -> Cause | None:
    """Return a cause if ranks that share a model read other samples of a loader."""
    right = _batches_read(world.records[unit[0]], loader)
    for rank in unit[1:]:
        # A stage of a pipeline may read nothing, or less than the first.
        record = world.records[rank]
        is_read = loader is None or loader in record.batches
        mine = _batches_read(record, loader) if is_read else []
        pairs = enumerate(zip(mine, right, strict=False))
        differing = [number for number, (batch, of_first) in pairs if batch != of_first]
        if not differing:
            continue
        text = (
            f"ranks {unit[0]} and {rank} share a model, and read other samples in batch"
            f" {differing[0] + 1}: each computes its part of the layers for samples of its own"
        )
        fix = (
            "give ranks that share a model the same samples: DistributedSampler(data,"
            " num_replicas=data-parallel size, rank=data-parallel rank)"
        )
        return Cause("samples", text, [_BY_SAMPLES], fix=fix, column="samples")
    return None


# ---- ranks that share out the samples ----


@dataclass(frozen=True)
class _ReadSamples:
    """The samples of a loader that each rank has trained on."""

    loader: int | None  # None: the rows that the model was given, where the loop has no loader
    leaders: Sequence[ScriptRecord]  # one rank of each that share a model
    first_ranks: list[int]  # their numbers
    batches: list[list[list[str]]]  # of each of them: fingerprints, batch by batch
    samples: list[list[str]]  # the same in one row

    @classmethod
    def of(cls, world: World, loader: int | None) -> "_ReadSamples":
        """Return what the ranks of a run have read of a loader."""
        batches = [_batches_read(record, loader) for record in world.leaders]
        samples = [[sample for batch in of_rank for sample in batch] for of_rank in batches]
        first_ranks = [unit[0] for unit in world.units]
        return cls(loader, world.leaders, first_ranks, batches, samples)

    @property
    def lengths(self) -> tuple[int, int]:
        """The samples that rank 0's loader reads an epoch, and those that its data have."""
        return self.leaders[0].lengths.get(-1 if self.loader is None else self.loader, (0, 0))

    @property
    def common(self) -> set[str]:
        """The samples of rank 0 that another rank has read, too."""
        return set(self.samples[0]) & set().union(*self.samples[1:])

    @property
    def is_within_epoch(self) -> bool:
        """True if all was read in one epoch, as far as is known, and nothing twice on a rank."""
        in_epoch, _ = self.lengths
        repeats = any(len(set(samples)) < len(samples) for samples in self.samples)
        return not repeats and (not in_epoch or len(self.samples[0]) <= in_epoch)

    def error(self, text: str, by: str = _BY_SAMPLES, fix: str | None = None) -> Cause:
        """Return the cause that is this mistake, with the line that makes the loader."""
        record = self.leaders[0]
        cause = script_cause("samples", text, by, record.framework)
        if fix is not None:
            cause = replace(cause, fix=fix)
        if self.loader is not None:
            cause.place_at(record.lines.loaders.get(self.loader, ""))
        return cause


def same_samples(world: World) -> Cause | None:
    """Return a cause if ranks read samples of each other, of any loader that is trained on."""
    if len(world.leaders) == 1 or is_cut_by_script(world):
        return None
    by_loader = [_same_samples_of(world, loader) for loader in _loaders_of(world.leaders[0])]
    causes = [cause for cause in by_loader if cause is not None]
    causes.sort(key=lambda cause: not cause.is_error)
    return next(iter(causes), None)


def _same_samples_of(world: World, loader: int | None) -> Cause | None:
    """Return a cause if ranks read samples of each other, of one loader; or without any."""
    read = _ReadSamples.of(world, loader)
    if len(set(read.samples[0])) < 2:
        return None
    return (
        _all_the_same(read)
        or _complete_epochs(read)
        or _parts_of_other_orders(read)
        or _parts_of_other_passes(read)
        or _drawn_twice_in_a_step(read)
    )


def _all_the_same(read: _ReadSamples) -> Cause | None:
    """Return a cause if another rank has read exactly what rank 0 has."""
    mine, *others = read.samples
    alike = [
        rank for rank, samples in zip(read.first_ranks[1:], others, strict=True) if samples == mine
    ]
    if not alike:
        return None
    ranks = "all ranks" if len(alike) == len(others) else f"ranks 0, {', '.join(map(str, alike))}"
    steps = len(read.leaders[0].steps)
    begin = (
        "the loop gives ranks no samples of their own"
        if read.loader is None
        else "the loader is not sharded"
    )
    return read.error(f"{begin}: {ranks} train on the same {len(mine)} samples in {steps} steps")


def _complete_epochs(read: _ReadSamples) -> Cause | None:
    """Return a cause if each rank goes through all data, in an order of its own."""
    in_epoch, in_data = read.lengths
    is_replacing = read.loader in read.leaders[0].replacing
    if is_replacing or not _have_same_data(read.leaders, read.loader):
        return None
    if in_epoch * len(read.leaders) <= 1.5 * in_data:
        return None
    text = (
        f"the loader is not sharded: each rank reads {in_epoch} samples an epoch, in an order of"
        f" its own, of {in_data}"
    )
    return read.error(text, "the lengths of the loader and of its data")


def _parts_of_other_orders(read: _ReadSamples) -> Cause | None:
    """Return a cause if each rank takes its part of an order that no other rank has.

    Then they have more samples in common than there are ranks, and still no rank has read one of
    its own twice.
    """
    mine = set(read.samples[0])
    if not read.is_within_epoch or len(read.common) <= len(read.samples):
        return None
    if not _goes_by_an_order(read.leaders[0], read.loader):
        return None
    steps = len(read.leaders[0].steps)
    return read.error(
        f"ranks read each other's samples: {len(read.common)} of the {len(mine)} samples of rank 0"
        f" are another rank's in these {steps} steps, though no rank has read one twice: each takes"
        " its part of an order of its own, and others are read by nobody",
        fix=_ONE_ORDER,
    )


def _parts_of_other_passes(read: _ReadSamples) -> Cause | None:
    """Return a cause if complete passes of the ranks overlap, and leave samples out.

    The steps may have read none of these yet. Samples that fill up the last batches are read twice,
    and those that do not fill one are left out: neither is many.
    """
    in_data = read.lengths[1]
    if read.loader is None or read.loader in read.leaders[0].replacing or not in_data:
        return None
    if not _have_same_data(read.leaders, read.loader):
        return None
    of_ranks = [record.orders.get(read.loader, []) for record in read.leaders]
    if any(len(passes) != len(of_ranks[0]) for passes in of_ranks):
        return None
    for number, passes in enumerate(zip(*of_ranks, strict=True)):
        parts = [set(each.positions) for each in passes]
        is_drawn_anew = any(
            len(part) < len(each.positions) * (1 - _MANY)
            for part, each in zip(parts, passes, strict=True)
        )
        if is_drawn_anew or not all(each.is_complete for each in passes):
            continue
        total = sum(map(len, parts))
        union = len(set().union(*parts))
        enough = _MANY * in_data
        if total - union > enough and min(total, in_data) - union > enough:
            text = (
                f"ranks read each other's samples: of the {in_data} of epoch {number + 1},"
                f" {total - union} are read by more than one rank, and {in_data - union} by nobody:"
                " each takes its part of an order of its own"
            )
            by = "the positions that each rank's sampler gives in an epoch"
            return read.error(text, by, _ONE_ORDER)
    return None


def _drawn_twice_in_a_step(read: _ReadSamples) -> Cause | None:
    """Return a remark if ranks have read a sample in the same step, as chance allows.

    Or ranks of a stream in another step, before any has read one of its own twice: too few to tell
    whether each draws its samples, or goes through an order of its own.
    """
    twice = 0
    for mine, *others in zip(*read.batches, strict=False):
        twice += len(set(mine) & set().union(*others))
    where = "in the same step, too"
    is_stream = read.loader is not None and not read.lengths[0]
    if not twice and is_stream and read.is_within_epoch:
        twice = len(read.common)
        where = "in another step: with more --steps it shows whether each has an order of its own"
    if not twice:
        return None
    text = f"{twice} of the {len(read.samples[0])} samples of rank 0 were another rank's {where}"
    fix = fix_for("samples", read.leaders[0].framework)
    return Cause("samples", text, [_BY_SAMPLES], is_error=False, fix=fix, column="samples")


def _have_same_data(leaders: Sequence[ScriptRecord], loader: int | None) -> bool:
    """Return whether the loader of each rank goes through the same data, and not its own part."""
    if loader is None or leaders[0].lengths.get(loader, (0, 0))[1] == 0:
        return False
    return all(record.data.get(loader) == leaders[0].data.get(loader) for record in leaders)


def _goes_by_an_order(record: ScriptRecord, loader: int | None) -> bool:
    """Return whether a rank goes through an order of samples, and does not draw each by itself.

    Ranks that draw crops of a text, or samples with replacement, meet now and then by chance.
    """
    if loader is None:
        return any(draw.is_permutation for draw in record.draws)
    return loader not in record.replacing
