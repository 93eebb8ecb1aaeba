"""Runs the checks of `lockstep doctor` on each rank; rank 0 collects the findings.

    own facts → all ranks' facts, over the store → verdicts → ports → process group → clocks, all-reduce

Ports are checked before the process group, which needs them: if they are closed, that is reported without a timeout.
"""

import datetime
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lockstep.diagnose import measure
from lockstep.diagnose.facts import machine_facts, own_facts
from lockstep.diagnose.verdicts import ALL, BAD, CHEAP, Finding
from lockstep.environment import rank_facts
from lockstep.errors import LockstepError, UsageError
from lockstep.network import address_towards, interface_of

_SECONDS = 60.0  # how long ranks wait for one another


def examine(
    run_directory: Path,
    show: Callable[[Finding], None],
    *,
    config: Any = None,
    device: str = "auto",
    backend: str = "auto",
) -> bool:
    """Run all checks; every rank calls it.

    Args:
        run_directory: where the run will write.
        show: receives each finding at once; called on rank 0 only.
        config: a `Config`, to be compared between ranks; or None.
        device, backend: as in the config's `distributed`.

    Returns:
        on every rank, whether no check failed.
    """
    from lockstep import cluster
    from lockstep.config import DistributedConfig

    settings = DistributedConfig(timeout_seconds=_SECONDS, device=device, backend=backend)  # type: ignore[arg-type]
    facts = rank_facts()
    exchange = measure.RankExchange(_store(settings), facts.rank, facts.world_size)
    lines: list[Finding] = []

    def report(found: Iterable[Finding]) -> None:
        for finding in found:
            lines.append(finding)
            if exchange.rank == 0:
                show(finding)

    own = own_facts(*_config_facts(config)) | machine_facts(run_directory)
    own |= measure.disk(run_directory, exchange, facts.local_rank == 0)
    everybody = exchange.all(own)
    report(line for verdict in ALL for line in verdict(everybody))
    route, address = _route(exchange, everybody)
    report(route)
    report(measure.ports(exchange, address, everybody))
    if not any(line.status == BAD and line.name in ("ports", "rendezvous") for line in lines):
        here, error = _join(cluster, settings)
        problems = [problem for problem in exchange.all(error) if problem]
        report(Finding(BAD, "process group", problem) for problem in problems[:1])
        if not problems and here is not None and facts.world_size > 1:
            report(measure.clocks(everybody))
            report(measure.all_reduce(here.device, _link(everybody, address)))
        cluster.cleanup()
    verdict: bool = exchange.all(not any(line.status == BAD for line in lines))[0]
    return verdict


def check_in_run(config_text: str, names: Iterable[str]) -> list[Finding]:
    """Run the checks that cost nothing, at the start of a run; every rank calls it after joining the process group.

    Returns:
        the findings that rank 0 should log, all warnings.

    Raises:
        UsageError: on every rank, if config or code differ between ranks: they would take different steps.
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
    """Return `package.module:Name` of all that a config names."""
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


def _config_facts(config: Any) -> tuple[str | None, list[str]]:
    return (None, []) if config is None else (config.to_yaml(), names_in(config))


def _store(settings: Any) -> Any:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from lockstep.rendezvous import rendezvous

    facts = rank_facts()
    if facts.launcher == "none":
        return HashStore()
    return rendezvous(settings, facts, datetime.timedelta(seconds=_SECONDS))


def _route(exchange: measure.RankExchange, everybody: list[Any]) -> tuple[list[Finding], str | None]:
    """Return the findings about each machine's name and route to rank 0, and the address of this machine's side."""
    target = exchange.all(measure.rendezvous_host())[0]
    own = measure.own_name() + ([] if target is None else measure.route_to(target))
    findings: list[Finding] = []
    for rank, rows in enumerate(exchange.all([[line.status, line.name, line.found, line.do] for line in own])):
        others = everybody[rank]["local_rank"] == 0 and everybody[rank]["machine"] != everybody[0]["machine"]
        if rank == 0 or others:
            prefix = f"{everybody[rank]['host']} (rank {rank}): " if others else ""
            findings += [Finding(status, name, prefix + found, do) for status, name, found, do in rows]
    return findings, None if target is None else address_towards(target)


def _join(cluster: Any, settings: Any) -> tuple[Any, str | None]:
    try:
        return cluster.setup(settings), None
    except (LockstepError, RuntimeError) as error:
        return None, str(error).splitlines()[0]


def _link(everybody: list[Any], address: str | None) -> float | None:
    if len({one["machine"] for one in everybody}) == 1 or address is None:
        return None
    return measure.link_rate(interface_of(address))
