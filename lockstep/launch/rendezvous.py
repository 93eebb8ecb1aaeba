"""Finds the machines of a job: where they meet, which are missing, and why a rendezvous failed.

Machines with `--node-rank` register here before torch's rendezvous, which only counts: a missing machine, and two that
claim one number, are reported by name. Loads torch inside functions only.
"""

import socket
import time
from collections.abc import Callable
from typing import Any

from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.launch.options import LaunchOptions
from lockstep.network import DEFAULT_PORT, interface_of, is_loopback

_NAME_SECONDS = 30.0  # a name may be registered after the machine starts, as in Kubernetes
_POLL_SECONDS = 0.2


def endpoint(options: LaunchOptions) -> str:
    """Return the HOST:PORT of the rendezvous."""
    if options.rdzv_endpoint is not None:
        _, colon, port = options.rdzv_endpoint.rpartition(":")
        return options.rdzv_endpoint if colon and port.isdigit() else f"{options.rdzv_endpoint}:{DEFAULT_PORT}"
    default = DEFAULT_PORT if options.several_nodes else 0
    return f"{options.master_addr or '127.0.0.1'}:{options.master_port or default}"


def rendezvous_host(options: LaunchOptions) -> str:
    """Return the HOST of the rendezvous; an IPv6 address has no brackets."""
    return endpoint(options).rsplit(":", 1)[0].strip("[]")


def run_id(options: LaunchOptions) -> str:
    """Return the job's name at the rendezvous."""
    return options.rdzv_id or "lockstep"


def wait_for_name(host: str, patience: float, log: Callable[[str], None]) -> None:
    """Wait until the name resolves on this machine.

    Raises:
        UsageError: it does not resolve in time.
    """
    deadline, logged = time.monotonic() + min(patience, _NAME_SECONDS), False
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
        if not logged:
            log(f"waiting for the name {host} to resolve")
        logged = True
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic()) + 0.01))


def register_machine(registry: Any, options: LaunchOptions, log: Callable[[str], None]) -> None:
    """Register this machine under its `--node-rank`, and wait until all machines are registered.

    Args:
        registry: a store for this alone.

    Raises:
        UsageError: two machines claim one number.
        RunError: a machine did not come.
    """
    number = options.node_rank or 0
    try:
        _claim_number(registry, number, socket.gethostname())
        _wait_for_all(registry, options, log)
    except LockstepError as error:
        if number == 0:
            registry.set("failed", f"{error.what}\n{error.fix}")
            time.sleep(5 * _POLL_SECONDS)  # time for the others to read it: the store ends with this process
        raise


def _claim_number(registry: Any, number: int, name: str) -> None:
    if registry.add(f"claims/{number}", 1) > 1:
        other = registry.get(f"machine/{number}").decode()
        what = f"two machines claim --node-rank {number}: {other} and {name}"
        fix = "give each machine a number of its own, from 0"
        registry.set("failed", f"{what}\n{fix}")
        raise UsageError(what, where="--node-rank", fix=fix)
    registry.set(f"machine/{number}", name)


def _wait_for_all(registry: Any, options: LaunchOptions, log: Callable[[str], None]) -> None:
    patience = options.patience
    deadline, logged = time.monotonic() + patience, None
    while True:
        if registry.check(["failed"]):
            what, fix = registry.get("failed").decode().split("\n")
            raise UsageError(what, fix=fix) if "claim" in what else RunError(what, fix=fix)
        missing = [number for number in range(options.nodes[1]) if not registry.check([f"machine/{number}"])]
        if not missing:
            return
        names = f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {options.nnodes}"
        if missing != logged:
            log(f"waiting for {names} (--node-rank) at {endpoint(options)}")
        logged = missing
        if time.monotonic() > deadline:
            raise RunError(
                f"{names} did not come to {endpoint(options)} within {patience:g} s",
                where=f"--node-rank {', '.join(map(str, missing))}",
                fix="start the same command there, with that --node-rank; see that the address and the port are the"
                " same on all machines, and can be reached: `lockstep doctor` on all of them",
            )
        time.sleep(_POLL_SECONDS)


def is_host(options: LaunchOptions) -> bool:
    """Return whether this machine hosts the rendezvous.

    `--rdzv-conf is_host` or the machine's number decides; else the host is the machine with the address on one of its
    interfaces. What the machine's own hostname resolves to is not used: it may be wrong in a container.
    """
    if options.is_host is not None:
        return options.is_host
    if options.node_rank is not None or not options.several_nodes:
        return (options.node_rank or 0) == 0
    host = rendezvous_host(options)
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {str(place[4][0]).partition("%")[0] for place in places}
    return any(is_loopback(address) or interface_of(address) is not None for address in addresses)


def explain(error: Exception, options: LaunchOptions) -> LockstepError:
    """Return torch's error of a failed rendezvous as a Lockstep error."""
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
