"""Where machines meet, who is missing there, and what is wrong when they don't.

Machines that are numbered (`--node-rank`) call the roll before torch's rendezvous, which only counts: a machine that
does not come and two that claim one number are named. Loads torch inside functions only.
"""

import datetime
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError, RunError, UsageError

if TYPE_CHECKING:
    from lockstep.launch.local import LaunchOptions

DEFAULT_PORT = 29500
_NAME_SECONDS = 30.0  # a name may come later than the machine that asks for it, as in Kubernetes
_LOOK_SECONDS = 0.2


def endpoint(options: "LaunchOptions") -> str:
    """HOST:PORT where the machines meet."""
    if options.rdzv_endpoint is not None:
        _, colon, port = options.rdzv_endpoint.rpartition(":")
        return options.rdzv_endpoint if colon and port.isdigit() else f"{options.rdzv_endpoint}:{DEFAULT_PORT}"
    if options.several_nodes or options.master_port is not None:
        return f"{options.master_addr or '127.0.0.1'}:{options.master_port or DEFAULT_PORT}"
    return "localhost:0"


def meeting_host(options: "LaunchOptions") -> str:
    """HOST of it; an IPv6 address without its brackets."""
    return endpoint(options).rsplit(":", 1)[0].strip("[]")


def meeting_point(options: "LaunchOptions", say: Callable[[str], None]) -> Any:
    """Wait until the machines can meet: the name resolves, and all that are numbered are there.

    Returns:
        what must be held while they meet; None where nothing was opened.

    Raises:
        UsageError: the name does not resolve; two machines claim one number.
        RunError: a machine did not come.
    """
    if not options.several_nodes:
        return None
    patience = float(options.rdzv_conf.get("timeout", 900))
    _wait_for_name(meeting_host(options), min(patience, _NAME_SECONDS), say)
    return None if options.rdzv_endpoint is not None else _call_the_roll(options, patience, say)


def _wait_for_name(host: str, seconds: float, say: Callable[[str], None]) -> None:
    deadline, told = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{host} does not resolve on this machine ({socket.gethostname()})",
                    why=error.strerror,
                    fix="use the IP address of the first machine, or put its name into DNS or /etc/hosts here",
                ) from None
        if not told:
            say(f"waiting for the name {host} to resolve")
        told = True
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic()) + 0.01))


def _call_the_roll(options: "LaunchOptions", patience: float, say: Callable[[str], None]) -> Any:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    number, port = options.node_rank or 0, int(endpoint(options).rsplit(":", 1)[1])
    server = TCPStore(
        meeting_host(options), port, None, number == 0, datetime.timedelta(seconds=patience),
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip
    roll = PrefixStore(f"lockstep/roll/{options.rdzv_id}", server)
    try:
        _answer(roll, number, socket.gethostname())
        _wait_for_all(roll, options, patience, say)
    except LockstepError as error:
        if number == 0:
            roll.set("failed", f"{error.what}\n{error.fix}")
            time.sleep(5 * _LOOK_SECONDS)  # the others read it here, and this process takes it along
        raise
    return server


def _answer(roll: Any, number: int, name: str) -> None:
    if roll.add(f"claims/{number}", 1) > 1:
        other = roll.get(f"machine/{number}").decode()
        what = f"two machines claim --node-rank {number}: {other} and {name}"
        fix = "give each machine a number of its own, from 0"
        roll.set("failed", f"{what}\n{fix}")
        raise UsageError(what, where="--node-rank", fix=fix)
    roll.set(f"machine/{number}", name)


def _wait_for_all(roll: Any, options: "LaunchOptions", patience: float, say: Callable[[str], None]) -> None:
    deadline, told = time.monotonic() + patience, None
    while True:
        if roll.check(["failed"]):
            what, fix = roll.get("failed").decode().split("\n")
            raise UsageError(what, fix=fix) if "claim" in what else RunError(what, fix=fix)
        missing = [number for number in range(options.nodes[1]) if not roll.check([f"machine/{number}"])]
        if not missing:
            return
        names = f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {options.nnodes}"
        if missing != told:
            say(f"waiting for {names} (--node-rank) at {endpoint(options)}")
        told = missing
        if time.monotonic() > deadline:
            raise RunError(
                f"{names} did not come to {endpoint(options)} within {patience:g} s",
                where=f"--node-rank {', '.join(map(str, missing))}",
                fix="start the same command there, with that --node-rank; see that the address and the port are the"
                " same on all machines, and can be reached: `lockstep doctor` on all of them",
            )
        time.sleep(_LOOK_SECONDS)


def is_host(options: "LaunchOptions") -> bool | None:
    """Whether this machine hosts the meeting point; None: the library will find out by itself.

    It compares the endpoint with what the host's name resolves to. In a network namespace or a container that may be
    nothing of the kind, or the name may not resolve, for which the library dies. An address that a socket can be bound
    to is this machine's.
    """
    if options.node_rank is not None:
        return options.node_rank == 0
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    host = meeting_host(options)
    try:
        if _matches_machine_hostname(host):
            return None  # the library finds the same, and copes with several agents on one machine
        own_name_resolves = True
    except OSError:
        own_name_resolves = False
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return None if own_name_resolves else False
    return True


def explained(error: Exception, options: "LaunchOptions") -> LockstepError:
    """What the library raises when machines don't meet, in words."""
    if isinstance(error, LockstepError):
        return error
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    cause = error.__cause__
    text = text if cause is None else f"{text} ({str(cause).splitlines()[0]})"
    where = endpoint(options)
    if "EADDRINUSE" in text:
        return UsageError(
            f"port {where.rsplit(':', 1)[1]} is in use on this machine",
            where=where,
            why="another run is there, or an earlier one has not gone yet",
            fix="choose another --master-port; on one machine leave it out, and a free one is found",
        )
    if "Rendezvous" in text or "Dist" in text or "Timeout" in text:
        return RunError(
            f"the machines did not meet at {where}",
            why=text,
            fix=f"start the same command on all {options.nnodes} machines, check that {where} can be reached from each,"
            " and in a container or a network namespace pass --rdzv-conf is_host=1 on the one that hosts it",
        )
    return RunError(f"the launcher failed: {text}")
