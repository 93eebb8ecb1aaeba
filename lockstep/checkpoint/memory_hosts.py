"""Keep a whole copy of a run in the memory of each of its hosts, so that any of them can be lost.

A copy has one file a rank and part (`memory_writer.py`). Each host has all of them:

    file of a rank of this host                    that rank writes it
    file of a rank of another host,
      whose blocks a rank here holds, too          that rank here writes it from its own: replicas
                                                   send nothing
      whose blocks no single rank here holds       it is sent, as it is: shards of another host
    state, config, manifest                        rank 0 sends them to the first rank of each host

So ranks read what their own host has, and a host that is lost takes nothing with it.

What hosts show may differ by a step when ranks die. `agree_on_copy` finds the newest step that all
of them have.

Tests: tests/checkpoint/test_memory_hosts.py, tests/faults/test_live_hosts.py
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.memory import Holdings, MemoryStorage
from lockstep.checkpoint.ranks import BlockInfo, Ranks
from lockstep.machine.environment import machine_id
from lockstep.process_group.collectives import create_once

Held = dict[str, dict[str, BlockInfo]]  # by part and name: what a rank holds
Share = dict[str, list[str]]  # by part: the names of the blocks that a rank writes
# tags of messages: the length of what rank 0 sends, then that, then files by their order
_LENGTH = 0
_BESIDE = 1
_FIRST_FILE = 2


def host_of(storage: MemoryStorage) -> str:
    """Return a name for the host of this rank: ranks with the same one see the same copies."""
    return f"{machine_id()} {storage.root}"


def leads_host(storage: MemoryStorage, ranks: Ranks) -> bool:
    """Return whether this rank is the first one of its host; every rank calls it.

    Ranks ask each other once.
    """
    failure = "the copies in memory could not be compared"
    return create_once(
        _purpose(storage), lambda: ranks.exchange(failure, lambda: host_of(storage), _firsts)
    )


def _purpose(storage: MemoryStorage) -> Hashable:
    """Return the name under which a world keeps which ranks are the first of their hosts."""
    return "the first rank of each host", str(storage.root)


def _firsts(hosts: Sequence[str]) -> list[bool]:
    return [hosts.index(host) == rank for rank, host in enumerate(hosts)]


@dataclass
class Duties:
    """Names the work of one rank for the copies of other hosts."""

    # (rank of another host, what its file has): this rank writes that file here, from its own
    twins: list[tuple[int, Share]] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)  # its own files, to these ranks
    receives: list[int] = field(default_factory=list)  # the files of these ranks
    # on rank 0: the first ranks of the other hosts; on these: rank 0; elsewhere empty
    beside: list[int] = field(default_factory=list)
    several: bool = False  # there are several hosts


def duties_of(shares: Sequence[Share], held: Sequence[Held], hosts: Sequence[str]) -> list[Duties]:
    """Return what each rank does so that each host has all files.

    Args:
        shares: by rank, what its own files have.
        held: by rank.
        hosts: by rank.
    """
    duties = [Duties(several=len(set(hosts)) > 1) for _ in shares]
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    bytes_of = [0] * len(hosts)
    for owner, share in enumerate(shares):
        for host, there in ranks_of.items():
            if host == hosts[owner]:
                continue
            able = [rank for rank in there if _holds(held[rank], held[owner], share)]
            rank = min(able or there, key=bytes_of.__getitem__)
            bytes_of[rank] += _bytes_of(held[owner], share)
            if able:
                duties[rank].twins.append((owner, share))
            else:
                duties[rank].receives.append(owner)
                duties[owner].sends.append(rank)
    for first, *_ in ranks_of.values():
        if first:
            duties[0].beside.append(first)
            duties[first].beside.append(0)
    return duties


def _holds(mine: Held, theirs: Held, share: Share) -> bool:
    """Return whether a rank holds the very blocks of another one's share."""
    return all(
        mine.get(part, {}).get(name) == theirs[part][name]
        for part, names in share.items()
        for name in names
    )


def _bytes_of(held: Held, share: Share) -> int:
    blocks = (held[part][name] for part, names in share.items() for name in names)
    return sum(torch.Size(block[1]).numel() * dtype.itemsize for _, dtype, block in blocks if block)


class Exchange:
    """Brings a copy's files to the hosts that lack them; every rank has one for each folder.

    Args:
        duties: this rank's.
        group: of all ranks, on Gloo.
    """

    def __init__(self, duties: Duties, group: dist.ProcessGroup | None) -> None:
        self._duties = duties
        self._group = group
        self._own: list[Tensor] = []  # the bytes of this rank's files, in the order of their names
        self._received: dict[int, list[Tensor]] = {}  # the same of others, by their ranks

    def keep_own(self, contents: list[Tensor]) -> None:
        """Note where the bytes of this rank's own files are, in the order of their names."""
        self._own = contents

    def make(self, storage: MemoryStorage, draft: str, sizes: Sequence[Mapping[str, int]]) -> None:
        """Make the files that others will send.

        Args:
            storage: where they lie.
            draft: the name of the copy there.
            sizes: by rank, bytes of its files.
        """
        for owner in self._duties.receives:
            self._received[owner] = [
                torch.frombuffer(storage.make_mapped(draft, file, size), dtype=torch.uint8)
                for file, size in sorted(sizes[owner].items())
            ]

    def run(self, beside: Mapping[str, bytes] | None) -> dict[str, bytes] | None:
        """Send and receive files; return the files beside tensors on the first rank of a host.

        Every rank calls it, also one that could not write its part. None: this rank gets none, or
        rank 0 has none.

        Args:
            beside: on rank 0, the files beside tensors; None: it could not write them.
        """
        works = [
            dist.isend(content, to, self._group, _FIRST_FILE + number)
            for to in self._duties.sends
            for number, content in enumerate(self._own)
        ]
        works += [
            dist.irecv(content, owner, self._group, _FIRST_FILE + number)
            for owner, contents in self._received.items()
            for number, content in enumerate(contents)
        ]
        received = None
        if dist.get_rank(self._group) == 0:
            texts = {name: data.decode() for name, data in (beside or {}).items()}
            data = bytearray(json.dumps(texts).encode() if texts else b"")
            length = torch.tensor([len(data)])
            content = torch.frombuffer(data, dtype=torch.uint8) if data else None
            for to in self._duties.beside:
                works.append(dist.isend(length, to, self._group, _LENGTH))
                if content is not None:
                    works.append(dist.isend(content, to, self._group, _BESIDE))
        elif self._duties.beside:
            received = self._receive_beside()
        for work in works:
            if work is not None:  # this rank is in the group
                work.wait()
        return received

    def _receive_beside(self) -> dict[str, bytes] | None:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, 0, self._group, _LENGTH)
        if not length.item():
            return None
        content = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.recv(content, 0, self._group, _BESIDE)
        texts: dict[str, str] = json.loads(content.numpy().tobytes())
        return {name: text.encode() for name, text in texts.items()}


def agree_on_copy(
    storage: MemoryStorage, ranks: Ranks, recorded_step: Callable[[], int]
) -> int | None:
    """Return the newest step whose copy each host has, and show it; None: there is none.

    Every rank calls it. Later copies are deleted: some host lacks them.

    Args:
        storage: where this rank's host has its copies.
        ranks: all of them.
        recorded_step: returns the last step of the run's records; rank 0 asks.
    """
    failure = "the copies in memory could not be compared"

    def decide(by_rank: list[tuple[str, Holdings]]) -> list[tuple[int | None, bool]]:
        step = _common(list(dict(by_rank).values()), recorded_step())
        return [(step, first) for first in _firsts([host for host, _ in by_rank])]

    step, is_first = ranks.exchange(failure, lambda: (host_of(storage), storage.holdings()), decide)
    leads = create_once(_purpose(storage), lambda: is_first)

    def show() -> None:
        if leads and step is not None:
            storage.adopt(step, is_complete=True)
            storage.delete_after(step)

    ranks.run(failure, show)
    return step


def _common(hosts: Sequence[Holdings], recorded: int) -> int | None:
    """Return the newest step of which all hosts have a complete copy that counts.

    A copy counts once its step is recorded: where a host shows it, it is. A host that has not
    noted that a copy is complete has it all the same if another one has: that was noted after all
    ranks had said so.
    """
    complete = set().union(*(host.complete for host in hosts))
    shown = set().union(*(host.shown for host in hosts))
    common = set.intersection(*({*host.complete, *(complete & host.unread)} for host in hosts))
    return max((step for step in common if step in shown or step <= recorded), default=None)
