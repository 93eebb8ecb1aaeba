"""Compares two configs that should be the same training, A and B, in one process each.

Each step of B begins with A's state, as that of a topology does with the reference's. Where it
differs, each key whose values differ is put into A by itself: what then differs from A is a cause,
if B without these keys takes A's steps.

    A                     B                      A with this key of B     cause
    training.lr: 1e-3     training.lr: 2e-3      other values             training.lr
    monitor.log_steps: 1  monitor.log_steps: 9   the same steps

Tests: tests/verify/test_pair.py
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config import Config, config_from
from lockstep.config.keys import all_keys
from lockstep.errors import RunError, UsageError, listed
from lockstep.strategy import SINGLE
from lockstep.verify.comparison_result import UNKNOWN, Cause, Outcome
from lockstep.verify.configs import Start, outcomes_of, record
from lockstep.verify.proof import spec_of
from lockstep.verify.script.pairs.losses import PairedLosses
from lockstep.verify.subject import MAIN, Case, Spec, VerifyJob
from lockstep.verify.trace import Trace

# What stands around steps, or says where they run.
_NOT_TRAINED = ("checkpoint", "data.workers", "distributed", "monitor")
_LOSSES = "losses"  # case
_BY = "A with this key of B takes other steps, and B without it takes A's"


def compare_configs(
    a: Config, b: Config, steps: int, folder: Path, start: Start, report: Callable[[str], None]
) -> Outcome:
    """Compare what B trains with what A trains."""
    specs = [spec_of(config, None, [SINGLE], steps)[0] for config in (a, b)]
    steps = min(spec.steps for spec in specs)
    right, mine = (replace(spec, steps=steps) for spec in specs)
    main = Case(steps=steps)
    report(f"A: {steps} steps in one process")
    record([(right, (main,), folder)], start)
    report(f"B: {steps} steps in one process")
    (outcome,) = outcomes_of([VerifyJob(mine, SINGLE, folder, (main,))], start)
    outcome.name = "B"
    if outcome.first is None and not outcome.failed:
        return outcome
    outcome.causes.extend(_causes(right, mine, folder, main, start, report))
    return outcome


def losses_of_configs(
    a: Config, b: Config, steps: int, folder: Path, start: Start, report: Callable[[str], None]
) -> tuple[PairedLosses, list[str]]:
    """Return the losses of A, and of B with A's seed, and what B was given.

    Samples, first values and dropout follow from the seed.
    """
    given = []
    if a.training.seed != b.training.seed:
        b = config_from({"training.seed": a.training.seed}, b)
        given.append("training.seed")
    case = Case(_LOSSES, steps=steps)
    losses = []
    for name, config in (("A", a), ("B", b)):
        spec, _ = spec_of(config, None, [SINGLE], steps)
        own = folder / name
        own.mkdir()
        report(f"{name}: {steps} steps in one process")
        (missing,) = record([(spec, (case,), own)], start)
        if missing:
            raise RunError(f"{name} can't be trained: {missing[_LOSSES]}", fix="train it alone")
        trace = Trace(own / _LOSSES)
        losses.append([trace.facts(step).loss for step in range(spec.steps)])
    shortest = min(map(len, losses))
    return PairedLosses(losses[1][:shortest], losses[0][:shortest]), given


def _causes(
    right: Spec,
    mine: Spec,
    folder: Path,
    main: Case,
    start: Start,
    report: Callable[[str], None],
) -> list[Cause]:
    """Return the keys that make A take other steps, if B without them takes A's."""
    keys = other_keys(right.config, mine.config)
    report(f"looking for the cause among {len(keys)} keys that differ")
    jobs = []
    tried = []
    for number, (key, (_, value)) in enumerate(keys.items()):
        own = folder / f"key-{number}"
        own.mkdir()
        (own / MAIN).symlink_to(folder / MAIN)
        try:
            spec = replace(right, config=config_from({key: value}, right.config))
        except UsageError:  # it goes with another key of B
            continue
        tried.append(key)
        jobs.append(VerifyJob(spec, SINGLE, own, (main,)))
    # One launch holds them all.
    outcomes = outcomes_of(jobs, start) if jobs else []
    wrong = [
        key
        for key, outcome in zip(tried, outcomes, strict=True)
        if outcome.failed or outcome.first is not None
    ]
    by_itself = bool(wrong) and _is_undone(right, mine, keys, wrong, folder, main, start)
    if not by_itself:
        wrong = list(keys)
    texts = {key: f"{_shown(keys[key][0])} in A, and {_shown(keys[key][1])} in B" for key in wrong}
    if by_itself:
        return [Cause(key, text, [_BY]) for key, text in texts.items()]
    if not keys:
        text = "the two are the same config: a step is not the same twice"
        return [Cause(UNKNOWN, text, ["the keys of both"])]
    text = f"no key makes it by itself; {listed([f'{k}: {t}' for k, t in texts.items()], 8)}"
    return [Cause("several keys", text, ["the keys of both"])]


def _is_undone(
    right: Spec,
    mine: Spec,
    keys: dict[str, tuple[Any, Any]],
    wrong: Sequence[str],
    folder: Path,
    main: Case,
    start: Start,
) -> bool:
    """Return whether B with A's values of some keys takes A's steps."""
    own = folder / "undone"
    own.mkdir()
    (own / MAIN).symlink_to(folder / MAIN)
    try:
        config = config_from({key: keys[key][0] for key in wrong}, mine.config)
    except UsageError:
        return False
    job = VerifyJob(replace(right, config=config), SINGLE, own, (main,))
    (outcome,) = outcomes_of([job], start)
    return not outcome.failed and outcome.first is None


def other_keys(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Return the keys of training whose values differ: key → A's value, B's value."""
    trees = [config.model_dump(by_alias=True) for config in (a, b)]
    differing = {}
    for key, info in all_keys().items():
        if info.is_section or any(
            key == section or key.startswith(f"{section}.") for section in _NOT_TRAINED
        ):
            continue
        values = [_value(tree, key) for tree in trees]
        if values[0] != values[1]:
            differing[key] = (values[0], values[1])
    return differing


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(tree, dict):
            return None
        tree = tree.get(part)
    return tree


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
