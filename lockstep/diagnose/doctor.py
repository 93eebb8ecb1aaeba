"""Runs the checks of `lockstep doctor` on each rank; rank 0 collects the findings.

Ports are checked through the store alone, before the process group, which would time out where they
are closed.
"""

import datetime
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from lockstep.diagnose import BAD, GOOD, WARN, Finding
from lockstep.diagnose.verdicts import ALL, CHEAP, equality, machine_facts, own_facts
from lockstep.errors import LockstepError, UsageError, first_line
from lockstep.machine.environment import rank_facts
from lockstep.machine.network import address_towards, interface_of
from lockstep.report import units
from lockstep.run_directory.run_files import create_file

_TRY_SECONDS = 5.0
_DISK_BYTES = 32 * 2**20
_SIZES = (4096, 65_536, 2**20, 2**24, 2**26)  # bytes of an all-reduce
_BUDGET_SECONDS = 20.0
_SKEW_SECONDS = 1.0
_SECONDS = 60.0  # how long ranks wait for one another


class RankExchange:
    """Exchanges JSON values between ranks through a key-value store."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._round = 0

    def all(self, own: Any) -> list[Any]:
        """Return every rank's value, by rank."""
        self._round += 1
        self._store.set(f"doctor/{self._round}/{self.rank}", json.dumps(own))
        return [
            json.loads(self._store.get(f"doctor/{self._round}/{rank}"))
            for rank in range(self.world_size)
        ]


def _route_to(host: str) -> list[Finding]:
    """Check that `host`, where the machines meet, has an address, and find the route to it."""
    try:
        addresses = sorted(
            {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        )
    except OSError as error:
        return [
            Finding(
                BAD,
                "rendezvous",
                f"{host} does not resolve here: {error}",
                "use its IP address, or put the name into DNS or /etc/hosts of this machine",
            )
        ]
    own = address_towards(host)
    if own is None:
        return [
            Finding(
                BAD,
                "rendezvous",
                f"there is no route to {host} ({', '.join(addresses)})",
                "`ip route get ADDRESS`; is the interface up?",
            )
        ]
    name = interface_of(own)
    rate = _link_rate(name)
    speed = f", {rate * 8 / 1e6:,.0f} Mbit/s" if rate else ""
    found = f"{host} is {', '.join(addresses)}; the route is {own} on {name or '?'}{speed}"
    return [Finding(GOOD, "rendezvous", found)]


def _link_rate(interface: str | None) -> float | None:
    """Return the bytes per second of an interface.

    None if it has no speed (a virtual one, the loopback).
    """
    if interface is None or not Path(f"/sys/class/net/{interface}/device").exists():
        return None
    with suppress(OSError, ValueError):
        megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text())
        return megabits * 1e6 / 8 if megabits > 0 else None
    return None


def ports(
    exchange: RankExchange, address: str | None, facts: Sequence[dict[str, Any]]
) -> list[Finding]:
    """Check that every machine reaches every other at a port that the system picks.

    `address` is this machine's.
    """
    first = _first_ranks(facts)
    if len(first) == 1:
        return [Finding(GOOD, "ports", "one machine: ranks meet over the loopback")]
    listener = None
    if exchange.rank in first and address is not None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
    listeners = exchange.all(None if listener is None else [address, listener.getsockname()[1]])
    others = [rank for rank in first if rank != exchange.rank] if exchange.rank in first else []
    answers = exchange.all([rank for rank in others if not _reaches(listeners[rank])])
    if listener is not None:
        listener.close()
    hosts = {
        rank: f"{facts[rank]['host']} {(listeners[rank] or ['without an address'])[0]}"
        for rank in first
    }
    lines = [
        Finding(
            BAD,
            "ports",
            f"{hosts[rank]} does not reach {hosts[other]} on an ephemeral port",
            "open all ports between the machines: NCCL and gloo use any, the rendezvous port alone"
            " is not enough",
        )
        for rank in first
        for other in answers[rank]
    ]
    found = (
        f"{len(first)} machines reach one another on ephemeral ports"
        f" ({len(first) * (len(first) - 1)} ways)"
    )
    return lines or [Finding(GOOD, "ports", found)]


def _first_ranks(facts: Sequence[dict[str, Any]]) -> list[int]:
    return sorted({one["machine"]: one["rank"] for one in reversed(facts)}.values())


def _reaches(listener: list[Any] | None) -> bool:
    if listener is not None:
        with (
            suppress(OSError),
            socket.create_connection((listener[0], listener[1]), timeout=_TRY_SECONDS),
        ):
            return True
    return False


def disk(run_directory: Path, exchange: RankExchange, rank_of_machine: bool) -> dict[str, Any]:
    """Measure this machine's write speed in bytes per second.

    It is also checked that the machine sees the file of rank 0.
    """
    found: dict[str, Any] = {}

    def attempt(work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            found.setdefault("disk_error", f"{error.strerror}: {error.filename or run_directory}")

    made = not os.path.exists(run_directory)
    token = exchange.all(os.urandom(8).hex())[0]
    mark = run_directory / f".doctor-{token}"
    attempt(lambda: run_directory.mkdir(parents=True, exist_ok=True))
    if exchange.rank == 0:
        attempt(lambda: create_file(mark, token))
    exchange.all(None)
    attempt(
        lambda: found.update(sees_run_directory=os.path.isfile(mark) and mark.read_text() == token)
    )
    exchange.all(None)
    if exchange.rank == 0:
        attempt(lambda: mark.unlink(missing_ok=True))
    if rank_of_machine:
        attempt(
            lambda: found.update(
                disk_speed=_disk_speed(run_directory / f".doctor-{token}-{exchange.rank}")
            )
        )
    exchange.all(None)
    if made:
        with suppress(OSError):  # another rank was faster, or the folder is not empty
            run_directory.rmdir()
    return found


def _disk_speed(probe: Path) -> float:
    """Return the bytes per second of a file that is written, synced and deleted."""
    data = os.urandom(2**20) * (_DISK_BYTES // 2**20)
    try:
        began = time.monotonic()
        with probe.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return _DISK_BYTES / (time.monotonic() - began)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def clocks(facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """Compare other machines' clocks with rank 0's; all ranks of a process group call it."""
    import torch
    import torch.distributed as dist

    others = _first_ranks(facts)[1:]
    rank = dist.get_rank()
    best: dict[int, tuple[float, float]] = {}
    for other in others:
        for _ in range(5):
            if rank == 0:
                answer = torch.zeros(1, dtype=torch.float64)
                sent = time.time()
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
        Finding(
            WARN,
            "clocks",
            f"{hosts[other]}'s clock is {skew:+.3g} s from rank 0's",
            "run NTP (chrony) on both",
        )
        for other, (_, skew) in best.items()
        if abs(skew) > _SKEW_SECONDS
    ]
    worst = max((abs(skew) for _, skew in best.values()), default=0.0)
    text = (
        "one machine, one clock"
        if not others
        else f"within {worst * 1e3:.2g} ms over {len(others) + 1} machines"
    )
    return lines or [Finding(GOOD, "clocks", text)]


def axes(config: Any, facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """Check that the sizes of the axes fit the ranks.

    Axes that send in every layer have to stay on a machine.
    """
    from lockstep.strategy import AUTO, resolve

    if config is None or config.distributed.strategy == AUTO:
        return []
    machines = [one["machine"] for one in facts]
    try:
        layout = resolve(config.distributed, len(facts), machines.count(machines[0]))
    except UsageError as error:
        return [Finding(BAD, "axes", error.what, error.fix or "")]
    for axis, along, stride in layout.strides():
        size = along * stride
        groups = [machines[start : start + size] for start in range(0, len(machines), size)]
        if any(len(set(group)) > 1 for group in groups):
            found = f"{size} ranks that exchange activations in every layer lie on several machines"
            return [
                Finding(
                    WARN,
                    "axes",
                    found,
                    f"write an {axis}_size that divides {machines.count(machines[0])}",
                )
            ]
    return [Finding(GOOD, "axes", str(layout))]


def all_reduce(device: Any, link: float | None) -> list[Finding]:
    """Check that a sum over ranks is right, and measure its speed by message size.

    All ranks call it.

    `link` is the bytes per second of the link between machines; None: unknown, or one machine.
    """
    import torch
    import torch.distributed as dist

    from lockstep.machine import accelerator

    world = dist.get_world_size()
    if world == 1:
        return [Finding(GOOD, "all-reduce", "one rank: nothing to reduce")]

    def timed(value: torch.Tensor) -> float:
        accelerator.synchronize(device)
        began = time.monotonic()
        dist.all_reduce(value)
        accelerator.synchronize(device)
        return time.monotonic() - began

    expected = float(world * (world + 1) // 2)
    found: list[tuple[int, float, float]] = []
    began = time.monotonic()
    for size in _SIZES:
        value = torch.full((size // 4,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(value)
        wrong = int((value != expected).sum())
        if wrong:
            text = f"{wrong} of {size // 4} sums of {size} bytes are wrong"
            return [
                Finding(
                    BAD, "all-reduce", text, "a faulty card, cable or memory: try pairs of machines"
                )
            ]
        seconds = statistics.median(timed(value) for _ in range(3))
        found.append((size, seconds, 2 * (world - 1) / world * size / seconds))
        # the next size is up to 16 times as large
        spent = torch.tensor([time.monotonic() - began + 4 * seconds * 16])
        dist.all_reduce(spent.to(device), dist.ReduceOp.MAX)
        if spent.item() > _BUDGET_SECONDS:
            break
    shown = ", ".join(f"{units.size(size)} {units.seconds(seconds)}" for size, seconds, _ in found)
    fastest = max(rate for _, _, rate in found)
    text = f"right on {world} ranks: {shown}; at best {units.size(fastest)}/s on the bus"
    if link is None:
        return [Finding(GOOD, "all-reduce", text)]
    text += f", {fastest / link:.0%} of the link's {units.size(link)}/s"
    do = (
        "see the interface above; other traffic on the link; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"
    )
    return [Finding.warn_unless(fastest >= 0.5 * link, "all-reduce", text, do)]


def examine(run_directory: Path, show: Callable[[Finding], None], config: Any) -> bool:
    """Run all checks on every rank, where the run will write; return on each whether none failed.

    `show` receives each finding at once, on rank 0 only; a `config`, if any, is compared between
    ranks.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from lockstep.config import DistributedConfig
    from lockstep.process_group import cluster
    from lockstep.process_group.rendezvous import rendezvous

    devices = {} if config is None else config.distributed.model_dump(include={"device", "backend"})
    settings = DistributedConfig(timeout_seconds=_SECONDS, **devices)
    facts = rank_facts()
    patience = datetime.timedelta(seconds=_SECONDS)
    store: Any = HashStore() if facts.launcher == "none" else rendezvous(settings, facts, patience)
    exchange = RankExchange(store, facts.rank, facts.world_size)
    lines: list[Finding] = []

    def report(found: Iterable[Finding]) -> None:
        for finding in found:
            lines.append(finding)
            if exchange.rank == 0:
                show(finding)

    own = (
        own_facts()
        if config is None
        else own_facts(config.to_yaml(), names_in(config), device=settings.device)
    )
    own |= machine_facts(run_directory) | disk(run_directory, exchange, facts.local_rank == 0)
    everybody = exchange.all(own)
    report(line for verdict in ALL for line in verdict(everybody))
    report(axes(config, everybody))
    route, address = _route(exchange, everybody)
    report(route)
    report(ports(exchange, address, everybody))
    if not any(line.status == BAD and line.name in ("ports", "rendezvous") for line in lines):
        here = None
        error = None
        try:
            here = cluster.setup(settings)
        except (LockstepError, RuntimeError) as problem:
            error = first_line(problem)
        problems = [problem for problem in exchange.all(error) if problem]
        report(Finding(BAD, "process group", problem) for problem in problems[:1])
        if not problems and here is not None and facts.world_size > 1:
            report(clocks(everybody))
            several = len(_first_ranks(everybody)) > 1
            link = _link_rate(interface_of(address)) if several and address is not None else None
            report(all_reduce(here.device, link))
        cluster.cleanup()
    verdict: bool = exchange.all(not any(line.status == BAD for line in lines))[0]
    return verdict


def check_in_run(config: Any) -> list[Finding]:
    """Run the checks that cost nothing, on every rank at the start of a run.

    Return what rank 0 should log.

    Raises UsageError: on every rank, if config or code differ between ranks: they would take
    different steps.
    """
    import torch.distributed as dist

    from lockstep.process_group.objects import all_gather_objects

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    # as JSON, which takes a fraction of the time of YAML
    text = json.dumps(config.to_dict(), default=str)
    own = own_facts(text, names_in(config), device=config.distributed.device)
    everybody = all_gather_objects(own)
    is_main = dist.get_rank() == 0
    # the others don't log what rank 0 finds, too
    lines = [line for verdict in (CHEAP if is_main else (equality,)) for line in verdict(everybody)]
    for line in lines:
        if line.status == BAD and line.name in ("config", "code"):
            raise UsageError(
                line.found, where=f"a comparison of all {len(everybody)} ranks", fix=line.do
            )
    return [line for line in lines if line.do] if is_main else []


def names_in(config: Any) -> list[str]:
    """Return `package.module:Name` of all that a config names."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                walk(part)
        elif (
            isinstance(value, str)
            and ":" in value
            and value.partition(":")[0].replace(".", "").isidentifier()
        ):
            found.append(value)

    walk(config.model_dump(mode="json"))
    return [name for name in found if not name.startswith("hf:")]


def _route(exchange: RankExchange, everybody: list[Any]) -> tuple[list[Finding], str | None]:
    """Return the findings about each machine's name and route to rank 0.

    The address of this machine's side comes with them.
    """
    # of rank 0; None: nobody launched this process
    target = exchange.all(os.environ.get("MASTER_ADDR"))[0]
    name = socket.gethostname()  # gloo gives its address to peers, unless an interface is set
    try:
        own = [Finding(GOOD, "own name", f"{name} is {socket.getaddrinfo(name, None)[0][4][0]}")]
    except OSError:
        do = "put it into /etc/hosts; until then Lockstep passes the interface to gloo"
        own = [Finding(WARN, "own name", f"{name} does not resolve here", do)]
    own += [] if target is None else _route_to(target)
    findings: list[Finding] = []
    for one, rows in zip(everybody, exchange.all([astuple(line) for line in own]), strict=True):
        others = one["local_rank"] == 0 and one["machine"] != everybody[0]["machine"]
        if one["rank"] == 0 or others:
            prefix = f"{one['host']} (rank {one['rank']}): " if others else ""
            findings += [
                Finding(status, name, prefix + found, do) for status, name, found, do in rows
            ]
    return findings, None if target is None else address_towards(target)
