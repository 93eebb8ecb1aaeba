"""What has to be tried out: ports both ways, clocks, the disk, and collectives. Loads torch inside functions.

Ports are tried before there is a process group, through the store alone: a group needs them, and would wait.
"""

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.diagnose.verdicts import BAD, GOOD, WARN, Line
from lockstep.report import words

_TRY_SECONDS = 5.0
_DISK_BYTES = 32 * 2**20
_SIZES = (4096, 65_536, 2**20, 2**24, 2**26)  # bytes of an all-reduce
_BUDGET_SECONDS = 20.0
_SKEW_SECONDS = 1.0


class Exchange:
    """JSON between ranks through a key-value store."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size, self._round = store, rank, world_size, 0

    def all(self, own: Any) -> list[Any]:
        """Every rank's, by rank."""
        self._round += 1
        self._store.set(f"doctor/{self._round}/{self.rank}", json.dumps(own))
        return [json.loads(self._store.get(f"doctor/{self._round}/{rank}")) for rank in range(self.world_size)]


def ports(exchange: Exchange, address: str | None, facts: Sequence[dict[str, Any]]) -> list[Line]:
    """Whether every machine reaches every other at a port that the system picks.

    Args:
        address: this machine's, on the way to the meeting point.
    """
    first = _first_ranks(facts)
    if len(first) == 1:
        return [Line(GOOD, "ports", "one machine: ranks meet over the loopback")]
    me = exchange.rank in first
    listener = _listen(address) if me else None
    places = exchange.all(None if listener is None else [address, listener.getsockname()[1]])
    failed = [rank for rank in first if me and rank != exchange.rank and not _reaches(places[rank])]
    answers = exchange.all(failed)
    if listener is not None:
        listener.close()
    hosts = {rank: f"{facts[rank]['host']} {(places[rank] or ['without an address'])[0]}" for rank in first}
    lines = [
        Line(BAD, "ports", f"{hosts[rank]} does not reach {hosts[other]} on an ephemeral port",
             "open all ports between the machines: NCCL and gloo take any, the meeting port alone is not enough")
        for rank in first for other in answers[rank]
    ]  # fmt: skip
    pairs = len(first) * (len(first) - 1)
    return lines or [Line(GOOD, "ports", f"{len(first)} machines reach one another on ephemeral ports ({pairs} ways)")]


def _first_ranks(facts: Sequence[dict[str, Any]]) -> list[int]:
    """One rank of each machine."""
    seen: dict[str, int] = {}
    for one in facts:
        seen.setdefault(one["machine"], one["rank"])
    return sorted(seen.values())


def _listen(address: str | None) -> socket.socket | None:
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen()
    return listener


def _reaches(place: list[Any] | None) -> bool:
    if place is None:
        return False
    try:
        socket.create_connection((place[0], place[1]), timeout=_TRY_SECONDS).close()
    except OSError:
        return False
    return True


def disk(run_directory: Path, exchange: Exchange, rank_of_machine: bool) -> dict[str, Any]:
    """Bytes a second that this machine writes and syncs there, and whether it sees what rank 0 wrote."""
    found: dict[str, Any] = {}

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            found.setdefault("disk_error", f"{error.strerror}: {error.filename or run_directory}")

    made = not os.path.exists(run_directory)
    mark = run_directory / ".doctor-was-here"
    token = exchange.all(os.urandom(8).hex())[0]
    attempt(lambda: run_directory.mkdir(parents=True, exist_ok=True))
    if exchange.rank == 0:
        attempt(lambda: mark.write_text(token))
    exchange.all(None)
    attempt(lambda: found.update(sees_run_directory=os.path.isfile(mark) and mark.read_text() == token))
    exchange.all(None)
    if exchange.rank == 0:
        attempt(lambda: mark.unlink(missing_ok=True))
    if rank_of_machine:
        attempt(lambda: found.update(disk_speed=_disk_speed(run_directory / f".doctor-{exchange.rank}")))
    exchange.all(None)
    if made:
        with suppress(OSError):  # another rank was faster, or there is something in it
            run_directory.rmdir()
    return found


def _disk_speed(probe: Path) -> float:
    """Bytes a second, of a file that is written, synced and deleted."""
    data = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    try:
        began = time.monotonic()
        with probe.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return _DISK_BYTES / (time.monotonic() - began)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def clocks(facts: Sequence[dict[str, Any]]) -> list[Line]:
    """How far other machines' clocks are from rank 0's. Needs a process group; all ranks call it."""
    import torch
    import torch.distributed as dist

    others = _first_ranks(facts)[1:]
    rank = dist.get_rank()
    best: dict[int, tuple[float, float]] = {}
    for other in others:
        for _ in range(5):
            if rank == 0:
                answer, sent = torch.zeros(1, dtype=torch.float64), time.time()
                dist.send(torch.zeros(1, dtype=torch.float64), other)
                dist.recv(answer, other)
                round_trip = time.time() - sent
                skew = answer.item() - (sent + round_trip / 2)
                best[other] = min(best.get(other, (round_trip, skew)), (round_trip, skew))
            elif rank == other:
                dist.recv(torch.zeros(1, dtype=torch.float64), 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    hosts = {one["rank"]: one["host"] for one in facts}
    lines = [
        Line(WARN, "clocks", f"{hosts[other]}'s clock is {skew:+.3g} s from rank 0's", "run NTP (chrony) on both")
        for other, (_, skew) in best.items() if abs(skew) > _SKEW_SECONDS
    ]  # fmt: skip
    worst = max((abs(skew) for _, skew in best.values()), default=0.0)
    text = "one machine, one clock" if not others else f"within {worst * 1e3:.2g} ms over {len(others) + 1} machines"
    return lines or [Line(GOOD, "clocks", text)]


def all_reduce(device: Any, link: float | None) -> list[Line]:
    """Whether a sum over ranks is right, and how fast it is by message size. All ranks call it.

    Args:
        device: where this rank's tensors live.
        link: bytes a second that the link between machines can do; None: unknown, or one machine.
    """
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    if world == 1:
        return [Line(GOOD, "all-reduce", "one rank: nothing to reduce")]
    expected = float(world * (world + 1) // 2)
    found: list[tuple[int, float, float]] = []
    began = time.monotonic()
    for size in _SIZES:
        value = torch.full((size // 4,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(value)
        wrong = int((value != expected).sum())
        if wrong:
            text = f"{wrong} of {size // 4} sums of {size} bytes are wrong"
            return [Line(BAD, "all-reduce", text, "a faulty card, cable or memory: try pairs of machines")]
        seconds = statistics.median(_timed(value, device) for _ in range(3))
        found.append((size, seconds, 2 * (world - 1) / world * size / seconds))
        spent = torch.tensor([time.monotonic() - began + 4 * seconds * 16])  # the next is up to sixteen times as large
        dist.all_reduce(spent.to(device), dist.ReduceOp.MAX)
        if spent.item() > _BUDGET_SECONDS:
            break
    shown = ", ".join(f"{words.size(size)} {words.seconds(seconds)}" for size, seconds, _ in found)
    fastest = max(rate for _, _, rate in found)
    text = f"right on {world} ranks: {shown}; at best {words.size(fastest)}/s on the bus"
    if link is None:
        return [Line(GOOD, "all-reduce", text)]
    text += f", {fastest / link:.0%} of the link's {words.size(link)}/s"
    do = "see the interface above; other traffic on the link; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
    return [Line(WARN, "all-reduce", text, do) if fastest < 0.5 * link else Line(GOOD, "all-reduce", text)]


def _timed(value: Any, device: Any) -> float:
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.monotonic()
    dist.all_reduce(value)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - began
