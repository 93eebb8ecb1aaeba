"""Launch options by torchrun's names, and the number of processes they mean. Loads torch inside functions only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from lockstep import cores
from lockstep.errors import UsageError

# Keys of --rdzv-conf: numbers of seconds, except the last two.
RDZV_CONF = (
    "timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout",
    "keep_alive_interval", "keep_alive_max_attempt", "is_host",
)  # fmt: skip


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

    @property
    def nodes(self) -> tuple[int, int]:
        """Fewest and most machines.

        Raises:
            UsageError: `--nnodes` is neither `N` nor `MIN:MAX`.
        """
        low, _, high = self.nnodes.partition(":")
        try:
            fewest, most = int(low), int(high or low)
        except ValueError:
            fewest, most = 0, 0
        if not 1 <= fewest <= most:
            raise UsageError(f"--nnodes {self.nnodes} is neither a number from 1 on nor MIN:MAX", where="--nnodes")
        return fewest, most

    @property
    def several_nodes(self) -> bool:
        """Whether the job may run on more than one machine."""
        return self.nodes[1] > 1

    @property
    def numbered(self) -> bool:
        """Whether machines have the numbers that `--node-rank` gives them."""
        return self.several_nodes and self.rdzv_endpoint is None

    @property
    def processes(self) -> int | None:
        """Processes per machine if a number was given; None means one per GPU.

        Raises:
            UsageError: the value is neither a number from 1 on nor `auto`, `gpu` or `cpu`.
        """
        requested = self.nproc_per_node
        if requested is None or requested in ("auto", "gpu", "cpu"):
            return None
        if not requested.isdecimal() or int(requested) < 1:
            raise UsageError(
                f"--nproc-per-node {requested} is not a number from 1 on, or auto, gpu or cpu",
                where="--nproc-per-node",
                why="GPUs of other makers than those that torch calls cuda are not supported"
                if requested == "xpu"
                else None,
            )
        return int(requested)

    @property
    def patience(self) -> float:
        """Seconds for which machines wait for one another."""
        return self.seconds("timeout", 900.0)

    def seconds(self, name: str, default: float) -> float:
        """Return a number of `--rdzv-conf`.

        Raises:
            UsageError: the value is not a number.
        """
        text = self.rdzv_conf.get(name)
        try:
            return default if text is None else float(text)
        except ValueError:
            raise UsageError(f"--rdzv-conf {name}={text} is no number", where="--rdzv-conf") from None

    @property
    def is_host(self) -> bool | None:
        """Whether this machine hosts the rendezvous, if the user says so; else None."""
        text = self.rdzv_conf.get("is_host")
        if text is None:
            return None
        if text.lower() not in ("1", "true", "yes", "0", "false", "no"):
            raise UsageError(f"--rdzv-conf is_host={text} is neither 1 nor 0", where="--rdzv-conf")
        return text.lower() in ("1", "true", "yes")

    def check(self) -> None:
        """Reject options that cannot work, before anything is started.

        Raises:
            UsageError: naming the option.
        """
        fewest, most = self.nodes
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts} is below 0", where="--max-restarts")
        _ = self.processes
        if self.master_port is not None and not 0 <= self.master_port < 65536:
            raise UsageError(f"--master-port {self.master_port} is no port", where="--master-port")
        if self.master_port == 0 and most > 1:
            raise UsageError(
                "--master-port 0 leaves the choice to the first machine, and the others would not know it",
                where="--master-port",
                fix="--master-port 29500, or any port that is free on the first machine",
            )
        if self.monitor_interval <= 0 or self.shutdown_timeout < 0:
            raise UsageError("--monitor-interval is above 0, and --shutdown-timeout is not below it")
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            raise UsageError(
                f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}",
                where="--node-rank",
                why="machines are numbered from 0",
            )
        if most > 1 and self.rdzv_endpoint is None and self.master_addr is None:
            raise UsageError(
                f"--nnodes {self.nnodes} needs the address where the machines meet",
                fix="on every machine: --rdzv-endpoint HOST:PORT, or --master-addr HOST [--master-port PORT] with"
                " --node-rank 0, 1, …; HOST is the first machine",
            )
        if most > 1 and self.rdzv_endpoint is None and (self.node_rank is None or fewest != most):
            raise UsageError(
                "--master-addr needs --node-rank and a fixed --nnodes",
                fix="number the machines from 0 with --node-rank, or use --rdzv-endpoint HOST:PORT, which numbers them",
            )
        self._check_conf()

    def _check_conf(self) -> None:
        for name in self.rdzv_conf:
            if name not in RDZV_CONF:
                near = get_close_matches(name, RDZV_CONF, 1)
                raise UsageError(
                    f"--rdzv-conf knows no {name}", where="--rdzv-conf",
                    fix=f"write {near[0]}" if near else f"known are {', '.join(RDZV_CONF)}",
                )  # fmt: skip
            if name != "is_host":
                self.seconds(name, 0.0)
        _ = self.is_host


def process_count(
    options: LaunchOptions, *, use_gpus: bool = True, single_reason: str | None = None
) -> tuple[int, str]:
    """Return the number of processes on this machine, and the reason.

    Args:
        use_gpus: False where the config chooses the CPU.
        single_reason: the reason for one process on any hardware, unless the user gave a number.
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
    if requested == "gpu":
        raise UsageError("--nproc-per-node gpu, but no GPU is visible here")
    return 1, f"{'no GPU is visible' if use_gpus else 'on the CPU'}; --nproc-per-node N starts more"


def count_gpus() -> int:
    """Return the number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()
