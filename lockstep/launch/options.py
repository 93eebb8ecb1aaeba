"""Launch options by torchrun's names.

The number of processes follows from them, and where the machines of a job meet.

Machines with `--node-rank` register here before torch's rendezvous, which only counts: a missing
machine, and two that claim one number, are reported by name. Loads torch inside functions only.

Tests: tests/launch/test_options.py, tests/launch/test_examples.py
"""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from lockstep.errors import LockstepError, RunError, UsageError, first_line
from lockstep.machine import cores
from lockstep.machine.network import DEFAULT_PORT, interface_of, is_here, is_loopback, port_in_use

# Keys of --rdzv-conf: numbers of seconds, except the last two.
RDZV_CONF = (
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "is_host",
)


@dataclass(frozen=True)
class LaunchOptions:
    """Options about processes and machines, by torchrun's names."""

    nproc_per_node: str | None = None
    nnodes: str = "1"
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0
    role: str = "rank"
    local_addr: str | None = None
    monitor_interval: float = 0.1
    shutdown_timeout: int = 30
    fresh_processes: bool = False

    @property
    def nodes(self) -> tuple[int, int]:
        """Fewest and most machines. Raises UsageError: `--nnodes` is neither `N` nor `MIN:MAX`."""
        low, _, high = self.nnodes.partition(":")
        try:
            fewest = int(low)
            most = int(high or low)
        except ValueError:
            fewest = most = 0
        if not 1 <= fewest <= most:
            raise UsageError(
                f"--nnodes {self.nnodes} is neither a number from 1 on nor MIN:MAX",
                where="--nnodes",
            )
        return fewest, most

    @property
    def several_nodes(self) -> bool:
        return self.nodes[1] > 1

    @property
    def numbered(self) -> bool:
        return self.several_nodes and self.rdzv_endpoint is None

    @property
    def processes(self) -> int | None:
        """Processes per machine if a number was given; None: one per GPU.

        Raises UsageError: it is neither.
        """
        requested = self.nproc_per_node
        if requested is None or requested in ("auto", "gpu", "cpu", "xpu"):
            return None
        if not requested.isdecimal() or int(requested) < 1:
            text = f"--nproc-per-node {requested} is not a number from 1 on, or auto, gpu or cpu"
            raise UsageError(text, where="--nproc-per-node")
        return int(requested)

    @property
    def patience(self) -> float:
        return self.seconds("timeout", 900.0)

    def seconds(self, name: str, default: float) -> float:
        """Return a number of `--rdzv-conf`. Raises UsageError: the value is not a number."""
        text = self.rdzv_conf.get(name)
        try:
            return default if text is None else float(text)
        except ValueError:
            raise UsageError(
                f"--rdzv-conf {name}={text} is not a number", where="--rdzv-conf"
            ) from None

    @property
    def is_host(self) -> bool | None:
        """Return whether this machine hosts the rendezvous, if the user says so; else None."""
        text = self.rdzv_conf.get("is_host")
        if text is None:
            return None
        if text.lower() not in ("1", "true", "yes", "0", "false", "no"):
            raise UsageError(f"--rdzv-conf is_host={text} is neither 1 nor 0", where="--rdzv-conf")
        return text.lower() in ("1", "true", "yes")

    def check(self) -> None:
        """Reject options that cannot work, before anything is started.

        Raises UsageError: naming the option.
        """
        _, most = self.nodes
        if self.max_restarts < 0:
            raise UsageError(
                f"--max-restarts {self.max_restarts} is below 0", where="--max-restarts"
            )
        _ = self.processes
        if self.master_port is not None and not 0 <= self.master_port < 65536:
            raise UsageError(
                f"--master-port {self.master_port} is not a port", where="--master-port"
            )
        if self.master_port == 0 and most > 1:
            text = (
                "--master-port 0 leaves the choice to the first machine, and the others would not"
                " know it"
            )
            fix = "--master-port 29500, or any port that is free on the first machine"
            raise UsageError(text, where="--master-port", fix=fix)
        if self.monitor_interval <= 0 or self.shutdown_timeout < 0:
            raise UsageError(
                "--monitor-interval is above 0, and --shutdown-timeout is not below it"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            text = f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}"
            raise UsageError(text, where="--node-rank", why="machines are numbered from 0")
        self._check_meeting()
        for name in self.rdzv_conf:
            if name not in RDZV_CONF:
                near = get_close_matches(name, RDZV_CONF, 1)
                fix = f"write {near[0]}" if near else f"known are {', '.join(RDZV_CONF)}"
                raise UsageError(f"--rdzv-conf knows no {name}", where="--rdzv-conf", fix=fix)
            if name != "is_host":
                self.seconds(name, 0.0)
        _ = self.is_host

    def _check_meeting(self) -> None:
        """Reject options that do not say where machines meet, or say it to a single one."""
        fewest, most = self.nodes
        endpoint = self.rdzv_endpoint
        meeting_host = None if endpoint is None else endpoint.rsplit(":", 1)[0].strip("[]")
        meetings = [
            ("--master-addr", self.master_addr, self.master_addr, "--nnodes N and --node-rank N"),
            ("--rdzv-endpoint", endpoint, meeting_host, "--nnodes N"),
        ]
        for flag, given, host, others in meetings:
            if most == 1 and host and not is_here(host):
                what = f"{flag} {given} means nothing to one machine (--nnodes {self.nnodes})"
                raise UsageError(what, where=flag, fix=f"add {others}, or leave it out")
        if most > 1 and self.rdzv_endpoint is None and self.master_addr is None:
            fix = (
                "on every machine: --rdzv-endpoint HOST:PORT, or --master-addr HOST [--master-port"
                " PORT] with --node-rank 0, 1, …; HOST is the first machine"
            )
            raise UsageError(
                f"--nnodes {self.nnodes} needs the address where the machines meet", fix=fix
            )
        if most > 1 and self.rdzv_endpoint is None and (self.node_rank is None or fewest != most):
            fix = (
                "number the machines from 0 with --node-rank, or use --rdzv-endpoint HOST:PORT,"
                " which numbers them"
            )
            raise UsageError("--master-addr needs --node-rank and a fixed --nnodes", fix=fix)


def process_count(
    options: LaunchOptions, *, use_gpus: bool = True, single_reason: str | None = None
) -> tuple[int, str]:
    """Return the number of processes here, and the reason.

    `single_reason`: why it is one on any hardware.
    """
    if options.processes is not None:
        return options.processes, "as asked"
    requested = options.nproc_per_node
    if single_reason is not None and requested is None:
        return 1, single_reason
    if requested == "cpu":
        return len(cores.allowed()), "one for each core"
    gpus = count_gpus() if use_gpus else 0
    if gpus:
        return gpus, "one for each visible GPU"
    if requested in ("gpu", "xpu"):
        raise UsageError(
            f"--nproc-per-node {requested}, but no GPU is visible here", fix="--nproc-per-node 1"
        )
    return 1, f"{'no GPU is visible' if use_gpus else 'on the CPU'}; --nproc-per-node N starts more"


def count_gpus() -> int:
    """Return the number of GPUs that torch sees.

    They are of the type that `distributed.device: auto` takes.
    """
    from lockstep.machine import accelerator

    return accelerator.count()


_NAME_SECONDS = 30.0  # a name may be registered after the machine starts, as in Kubernetes
_POLL_SECONDS = 0.2


def endpoint(options: LaunchOptions) -> str:
    """Return the HOST:PORT of the rendezvous."""
    if options.rdzv_endpoint is not None:
        _, colon, port = options.rdzv_endpoint.rpartition(":")
        return (
            options.rdzv_endpoint
            if colon and port.isdigit()
            else f"{options.rdzv_endpoint}:{DEFAULT_PORT}"
        )
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

    Raises UsageError: it does not resolve in time.
    """
    deadline = time.monotonic() + min(patience, _NAME_SECONDS)
    logged = False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                text = f"{host} does not resolve on this machine ({socket.gethostname()})"
                fix = (
                    "use the IP address of the first machine, or put its name into DNS or"
                    " /etc/hosts here"
                )
                raise UsageError(text, why=error.strerror, fix=fix) from None
        if not logged:
            log(f"waiting for the name {host} to resolve")
        logged = True
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic()) + 0.01))


def register_machine(registry: Any, options: LaunchOptions, log: Callable[[str], None]) -> None:
    """Register this machine under its `--node-rank`, and wait for all others.

    The `registry` is a store.

    Raises UsageError: two machines claim one number. RunError: a machine did not come.
    """
    number = options.node_rank or 0
    name = socket.gethostname()
    try:
        if registry.add(f"claims/{number}", 1) > 1:
            other = registry.get(f"machine/{number}").decode()
            what = f"two machines claim --node-rank {number}: {other} and {name}"
            fix = "give each machine a number of its own, from 0"
            registry.set("failed", f"{what}\n{fix}")
            raise UsageError(what, where="--node-rank", fix=fix)
        registry.set(f"machine/{number}", name)
        _wait_for_all(registry, options, log)
    except LockstepError as error:
        if number == 0:
            registry.set("failed", f"{error.what}\n{error.fix}")
            # time for the others to read it: the store ends with this process
            time.sleep(5 * _POLL_SECONDS)
        raise


def _wait_for_all(registry: Any, options: LaunchOptions, log: Callable[[str], None]) -> None:
    """Wait until every machine has arrived. Raises RunError: one did not within `patience`."""
    patience = options.patience
    deadline = time.monotonic() + patience
    logged = None
    while True:
        if registry.check(["failed"]):
            what, fix = registry.get("failed").decode().split("\n")
            raise UsageError(what, fix=fix) if "claim" in what else RunError(what, fix=fix)
        missing = [
            number
            for number in range(options.nodes[1])
            if not registry.check([f"machine/{number}"])
        ]
        if not missing:
            return
        names = (
            f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {options.nnodes}"
        )
        if missing != logged:
            log(f"waiting for {names} (--node-rank) at {endpoint(options)}")
        logged = missing
        if time.monotonic() > deadline:
            fix = (
                "start the same command there, with that --node-rank; see that the address and the"
                " port are the same on all machines, and can be reached: `lockstep doctor` on all"
                " of them"
            )
            where = f"--node-rank {', '.join(map(str, missing))}"
            raise RunError(
                f"{names} did not come to {endpoint(options)} within {patience:g} s",
                where=where,
                fix=fix,
            )
        time.sleep(_POLL_SECONDS)


def hosts_rendezvous(options: LaunchOptions) -> bool:
    """Return whether this machine hosts the rendezvous.

    An option says so, or its number, or its interfaces.

    What the machine's own hostname resolves to is not used: it may be wrong in a container.
    """
    if options.is_host is not None:
        return options.is_host
    if options.node_rank is not None or not options.several_nodes:
        return (options.node_rank or 0) == 0
    host = rendezvous_host(options)
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {str(each[4][0]).partition("%")[0] for each in infos}
    return any(is_loopback(address) or interface_of(address) is not None for address in addresses)


def explain(error: Exception, options: LaunchOptions) -> LockstepError:
    """Return torch's error of a failed rendezvous as a Lockstep error."""
    if isinstance(error, LockstepError):
        return error
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    cause = error.__cause__
    text = text if cause is None else f"{text} ({first_line(cause)})"
    where = endpoint(options)
    if "EADDRINUSE" in text:
        host, _, port = where.rpartition(":")
        return port_in_use(host, int(port))
    if "Rendezvous" in text or "Dist" in text or "Timeout" in text:
        fix = (
            f"start the same command on all {options.nnodes} machines, check that {where} can be"
            " reached from each, and in a container or a network namespace pass --rdzv-conf"
            " is_host=1 on the one that hosts it"
        )
        return RunError(
            f"the machines did not meet at {where}", where=socket.gethostname(), why=text, fix=fix
        )
    return RunError(f"the launcher failed: {text}")
