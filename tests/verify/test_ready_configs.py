"""Every config that ships passes `verify`; at its full size nobody waits for it, so models are made
small.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

import lockstep.config
from lockstep.config import config_from, load_config
from lockstep.launch.spawn import spawn_again
from lockstep.strategy import SINGLE, parse_topology
from lockstep.verify import Outcome
from lockstep.verify import proof as package
from lockstep.verify.proof import default_against
from lockstep.verify.subject import Case, Spec, VerifyJob
from lockstep.verify.worker import settings_of
from tests.test_ready_configs import READY, SMALL, small

TRAINERS = sorted(Path(lockstep.config.__file__).parent.glob("trainers/*.yaml"))
IN_CI = {"hf_gpt2_fsdp": "fsdp:2"}
STEPS = 2
START = partial(spawn_again, preload=["tests.preloaded"])

# config, overrides, topologies; none: those of the default
Wanted = tuple[Path, list[str], list[str]]


def verified(wanted: list[Wanted], folder: Path) -> dict[str, Outcome]:
    """`config topology` → what verify finds, in one launch for each number of ranks."""
    jobs: dict[int, list[tuple[str, VerifyJob]]] = defaultdict(list)
    references: list[tuple[Spec, tuple[Case, ...], Path]] = []
    for path, overrides, topologies in wanted:
        config = load_config(path, overrides)
        against = topologies or default_against(config)
        spec, _ = package.spec_of(config, None, against, STEPS)
        place = folder / path.parent.name / path.stem
        place.mkdir(parents=True)
        case = Case(steps=STEPS)
        references.append((spec, (case,), place))
        for topology in against:
            jobs[parse_topology(topology)[1]].append(
                (f"{path.stem} {topology}", VerifyJob(spec, topology, place, (case,)))
            )
    package.record(references, START)
    found = {}
    for together in jobs.values():
        outcomes = package.compare([job for _, job in together], START, print)
        found |= {name: outcome for (name, _), outcome in zip(together, outcomes, strict=True)}
    return found


def failures(found: dict[str, Outcome]) -> list[str]:
    return [
        f"{name}: {o.failed or o.first} {o.causes}" for name, o in found.items() if not o.passed
    ]


def test_some_configs_that_ship_pass(tmp_path: Path) -> None:
    found = verified([(p, small(p), [IN_CI[p.stem]]) for p in READY if p.stem in IN_CI], tmp_path)
    assert set(found) == {f"{name} {topology}" for name, topology in IN_CI.items()}
    assert not failures(found)
    assert all(outcome.steps == STEPS for outcome in found.values())


def test_each_topology_of_every_config_is_a_config() -> None:
    """The reference, too: one process has no ranks over which experts could be spread."""
    for path in (*READY, *TRAINERS):
        config = load_config(path, small(path) if path in READY else [])
        for topology in (SINGLE, *default_against(config)):
            changed = config_from(settings_of(topology), config)
            assert changed.distributed.strategy == parse_topology(topology)[0]["strategy"]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_config_that_ships_passes(tmp_path: Path) -> None:
    wanted: list[Wanted] = [(path, small(path), []) for path in READY]
    model = [f"model.args.{key}={value}" for key, value in SMALL["transformer"].items()]
    rest = [
        "training.max_steps=2",
        "training.warmup_steps=1",
        "training.batch_size=2",
        "training.global_batch_size=8",
    ]
    common = [
        "model.name=transformer",
        *model,
        "data.name=python-docs",
        "data.args.block_size=32",
        *rest,
    ]
    # of one process; the others are verified on several ranks by default
    own = {"single": "single", "dp": "dp"}
    for path in TRAINERS:
        wanted.append((path, common, [own[path.stem]] if path.stem in own else []))
    found = verified(wanted, tmp_path)
    for name, outcome in found.items():
        print(
            name,
            "passed" if outcome.passed else "FAILED",
            outcome.failed or outcome.first,
            outcome.causes,
        )
    assert len(found) >= 2 * len(READY) + len(TRAINERS)
    assert not failures(found)
