"""`lockstep doctor`, as each rank runs it: gather facts, try things out, compare. Rank 0 has the lines.

    own facts → everybody's, over the store → verdicts → ports → process group → clocks, all-reduce

Ports come before the process group, which needs them: where they are closed, that is said, and nothing waits for them.
"""

import datetime
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.diagnose import measure, network
from lockstep.diagnose.facts import machine_facts, own_facts
from lockstep.diagnose.verdicts import ALL, BAD, CHEAP, Line
from lockstep.environment import rank_facts
from lockstep.errors import LockstepError, UsageError
from lockstep.network import address_towards, interface_of

_SECONDS = 60.0  # that ranks wait for one another


def examine(
    run_directory: Path, say: Callable[[Line], None], *, config: Any = None, device: str = "auto", backend: str = "auto"
) -> bool:
    """Look at everything; every rank calls it.

    Args:
        run_directory: where the run is to write.
        say: takes each line as it is found; called on rank 0 only.
        config: a `Config`, to be compared over ranks; or None.

    Returns:
        on every rank, whether nothing was found that will not work.
    """
    from lockstep import cluster
    from lockstep.config import DistributedConfig

    settings = DistributedConfig(timeout_seconds=_SECONDS, device=device, backend=backend)  # type: ignore[arg-type]
    facts = rank_facts()
    exchange = measure.Exchange(_store(settings), facts.rank, facts.world_size)
    lines: list[Line] = []

    def tell(found: Iterable[Line]) -> None:
        for line in found:
            lines.append(line)
            if exchange.rank == 0:
                say(line)

    own = own_facts(*_of(config)) | machine_facts(run_directory)
    own |= measure.disk(run_directory, exchange, facts.local_rank == 0)
    everybody = exchange.all(own)
    tell(line for verdict in ALL for line in verdict(everybody))
    way, address = _way(exchange, everybody)
    tell(way)
    tell(measure.ports(exchange, address, everybody))
    if not any(line.status == BAD and line.name in ("ports", "meeting point") for line in lines):
        here, error = _join(cluster, settings)
        problems = [problem for problem in exchange.all(error) if problem]
        tell(Line(BAD, "process group", problem) for problem in problems[:1])
        if not problems and here is not None and facts.world_size > 1:
            tell(measure.clocks(everybody))
            tell(measure.all_reduce(here.device, _link(everybody, address)))
        cluster.cleanup()
    verdict: bool = exchange.all(not any(line.status == BAD for line in lines))[0]
    return verdict


def check_in_run(config_text: str, names: Iterable[str]) -> list[Line]:
    """The cheap half, at the start of a run; every rank calls it once it has joined the others.

    Returns:
        what rank 0 should say: ⚠ lines.

    Raises:
        UsageError: on every rank, where config or code differ between ranks: they would not take the same step.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own_facts(config_text, names))
    lines = [line for verdict in CHEAP for line in verdict(everybody)]
    for line in lines:
        if line.status == BAD and line.name in ("config", "code"):
            raise UsageError(line.found, where=f"a comparison of all {len(everybody)} ranks", fix=line.do)
    return [line for line in lines if line.do] if dist.get_rank() == 0 else []


def names_in(config: Any) -> list[str]:
    """`package.module:Name` of everything that a config names."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for part in value.values():
                walk(part)
        elif isinstance(value, list):
            for part in value:
                walk(part)
        elif isinstance(value, str) and ":" in value and value.partition(":")[0].replace(".", "").isidentifier():
            found.append(value)

    walk(config.model_dump(mode="json"))
    return [name for name in found if not name.startswith("hf:")]


def _of(config: Any) -> tuple[str | None, list[str]]:
    return (None, []) if config is None else (config.to_yaml(), names_in(config))


def _store(settings: Any) -> Any:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from lockstep.rendezvous import rendezvous

    facts = rank_facts()
    if facts.launcher == "none":
        return HashStore()
    return rendezvous(settings, facts, datetime.timedelta(seconds=_SECONDS))


def _way(exchange: measure.Exchange, everybody: list[Any]) -> tuple[list[Line], str | None]:
    """Each machine's name and way to rank 0's address; rank 0's lines, and others' that are not good."""
    target = exchange.all(network.meeting_host())[0]
    own = network.own_name() + ([] if target is None else network.way_to(target))
    told: list[Line] = []
    for rank, rows in enumerate(exchange.all([[line.status, line.name, line.found, line.do] for line in own])):
        others = everybody[rank]["local_rank"] == 0 and everybody[rank]["machine"] != everybody[0]["machine"]
        if rank == 0 or others:
            prefix = f"{everybody[rank]['host']} (rank {rank}): " if others else ""
            told += [Line(status, name, prefix + found, do) for status, name, found, do in rows]
    return told, None if target is None else address_towards(target)


def _join(cluster: Any, settings: Any) -> tuple[Any, str | None]:
    try:
        return cluster.setup(settings), None
    except (LockstepError, RuntimeError) as error:
        return None, str(error).splitlines()[0]


def _link(everybody: list[Any], address: str | None) -> float | None:
    if len({one["machine"] for one in everybody}) == 1 or address is None:
        return None
    return network.link_rate(interface_of(address))
