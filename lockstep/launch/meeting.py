"""Where machines meet, who is missing there, and what is wrong when they don't.

Machines that are numbered (`--node-rank`) call the roll before torch's rendezvous, which only counts: a machine that
does not come and two that claim one number are named. Loads torch inside functions only.
"""

import socket
import time
from collections.abc import Callable
from typing import Any

from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.launch.options import LaunchOptions
from lockstep.network import DEFAULT_PORT, interface_of, is_loopback

_NAME_SECONDS = 30.0  # a name may come later than the machine that asks for it, as in Kubernetes
_LOOK_SECONDS = 0.2


def endpoint(options: LaunchOptions) -> str:
    """HOST:PORT where the machines meet."""
    if options.rdzv_endpoint is not None:
        _, colon, port = options.rdzv_endpoint.rpartition(":")
        return options.rdzv_endpoint if colon and port.isdigit() else f"{options.rdzv_endpoint}:{DEFAULT_PORT}"
    default = DEFAULT_PORT if options.several_nodes else 0
    return f"{options.master_addr or '127.0.0.1'}:{options.master_port or default}"


def meeting_host(options: LaunchOptions) -> str:
    """HOST of it; an IPv6 address without its brackets."""
    return endpoint(options).rsplit(":", 1)[0].strip("[]")


def run_id(options: LaunchOptions) -> str:
    """What this job is called where machines meet."""
    return options.rdzv_id or "lockstep"


def wait_for_name(host: str, patience: float, say: Callable[[str], None]) -> None:
    """Wait until the name resolves on this machine.

    Raises:
        UsageError: it does not.
    """
    deadline, told = time.monotonic() + min(patience, _NAME_SECONDS), False
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


def call_the_roll(roll: Any, options: LaunchOptions, say: Callable[[str], None]) -> None:
    """Wait until all machines that are numbered are there.

    Args:
        roll: a store for this alone.

    Raises:
        UsageError: two machines claim one number.
        RunError: a machine did not come.
    """
    number = options.node_rank or 0
    try:
        _answer(roll, number, socket.gethostname())
        _wait_for_all(roll, options, say)
    except LockstepError as error:
        if number == 0:
            roll.set("failed", f"{error.what}\n{error.fix}")
            time.sleep(5 * _LOOK_SECONDS)  # the others read it here, and this process takes it along
        raise


def _answer(roll: Any, number: int, name: str) -> None:
    if roll.add(f"claims/{number}", 1) > 1:
        other = roll.get(f"machine/{number}").decode()
        what = f"two machines claim --node-rank {number}: {other} and {name}"
        fix = "give each machine a number of its own, from 0"
        roll.set("failed", f"{what}\n{fix}")
        raise UsageError(what, where="--node-rank", fix=fix)
    roll.set(f"machine/{number}", name)


def _wait_for_all(roll: Any, options: LaunchOptions, say: Callable[[str], None]) -> None:
    patience = options.patience
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


def is_host(options: LaunchOptions) -> bool:
    """Whether this machine hosts the meeting point.

    The user says so, or its number does; else an address that one of its interfaces has is this machine's. What its own
    name resolves to does not count: in a network namespace or a container that may be nothing of the kind.
    """
    if options.is_host is not None:
        return options.is_host
    if options.node_rank is not None or not options.several_nodes:
        return (options.node_rank or 0) == 0
    host = meeting_host(options)
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {str(place[4][0]).partition("%")[0] for place in places}
    return any(is_loopback(address) or interface_of(address) is not None for address in addresses)


def explained(error: Exception, options: LaunchOptions) -> LockstepError:
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
