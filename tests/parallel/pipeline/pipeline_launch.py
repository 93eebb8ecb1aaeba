"""All that the tests of pipelines run on 2 and on 4 ranks, in one launch each: starting ranks costs
more than the rest.

A launch is made when the first test asks for a result of it.
"""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.parallel.pipeline.pipeline_cases import piped, save, several
from tests.parity.pipelines import SCHEDULES, SPLIT_BACKWARD, Case, grid
from tests.ranks import run_ranks

Calls = dict[str, tuple[str, tuple[Any, ...]]]

ONE_AT_A_TIME = {"training.batch_size": 1}
CHECKPOINTED = {"training.gradient_checkpointing": "full"}


def beside(kind: str, schedule: str = "1F1B", **more: Any) -> dict[str, Any]:
    """Two pipelines of two ranks, side by side."""
    size = {"ddp": "replicate_size", "fsdp": "shard_size"}[kind]
    settings = piped(schedule, pipeline_size=2, **{size: 2}, **more)
    if kind == "fsdp" and schedule in SPLIT_BACKWARD:
        settings["distributed.fsdp.sharding_strategy"] = "shard_grad_op"
    return settings


# Each schedule with recomputed blocks; `test_every_schedule_recomputes_rightly` has those that are
# not in turn.
RECOMPUTED: dict[str, tuple[Any, ...]] = {
    name: ("deep", {**piped(name), **CHECKPOINTED}) for name in SCHEDULES
}
RECOMPUTED_IN_TURN = ("1F1B", "DualPipeV")

# ---- trainings that are compared with the same training in one process: model, settings, data …
# ----

ON_TWO: dict[str, tuple[Any, ...]] = {
    "several runs": ("deep", piped("1F1B", pipeline__n_microbatches=2)),
    "runs that are filled up": ("deep", piped("ZBVZeroBubble", pipeline__n_microbatches=5)),
    "fewer micro-batches than stages": (
        "deep",
        {**piped("DualPipeV"), "training.global_batch_size": 2},
    ),
    "every length": ("deep", {**piped("1F1B"), **ONE_AT_A_TIME}, "TextsOfAllLengths"),
    "every length, V": ("deep", {**piped("DualPipeV"), **ONE_AT_A_TIME}, "TextsOfAllLengths"),
    "carried, 1F1B": ("Carrying", piped("1F1B")),
    "carried, DualPipeV": ("Carrying", piped("DualPipeV")),
    "carried, InterleavedZeroBubble": ("Carrying", piped("InterleavedZeroBubble")),
    "twofold, split": ("Twofold", piped("ZBVZeroBubble")),
    "frozen": ("frozen", piped("1F1B")),
    "frozen, split": ("frozen", piped("ZBVZeroBubble")),
    "spare parameter": ("with_spare", piped("1F1B")),
    "recurring module": ("recurring", piped("1F1B"), "Points"),
    "recurring module, split": ("recurring", piped("InterleavedZeroBubble"), "Points"),
    "clip by value": (
        "deep",
        {**piped(), "training.gradient_clip": {"strategy": "value", "value": 1e-3}},
    ),
    "clip hard": (
        "deep",
        {**piped(), "training.gradient_clip": {"strategy": "norm", "value": 1e-2}},
    ),
    "split_spec": ("deep", piped("1F1B", pipeline__split_spec={"layers.0": "end"})),
    "selective": ("deep", {**piped(), "training.gradient_checkpointing": "selective"}),
    "every_n": ("deep", {**piped(), "training.gradient_checkpointing": "every_n"}),
    "sequential": ("deep", {**piped("LoopedBFS"), "training.gradient_checkpointing": "sequential"}),
    **{f"checkpointed, {name}": RECOMPUTED[name] for name in RECOMPUTED_IN_TURN},
    "checkpointed latent": (
        "deep",
        {**piped("DualPipeV"), **CHECKPOINTED},
        "Tokens",
        {"name": "free_transformer"},
    ),
    "bf16": ("deep", {**piped(), "precision.mode": "bf16"}),
    "compiled": ("shallow", {**piped("Interleaved1F1B"), "training.compile": True}),
}

# Like another one above, with another schedule or setting; `test_other_trainings` has them.
ONLY_FULL = (
    "runs that are filled up",
    "every length",
    "every length, V",
    "frozen",
    "sequential",
    "carried, 1F1B",
    "carried, InterleavedZeroBubble",
    "frozen, split",
    "spare parameter",
    "recurring module, split",
    "clip by value",
    "split_spec",
    "selective",
    "every_n",
    "checkpointed latent",
    "compiled",
)

# Of the schedules: 5 micro-batches for two pipelines, in runs of two; one of the pipelines runs a
# dummy at the end.
SIDE_BY_SIDE: dict[str, tuple[Any, ...]] = {
    f"{schedule}, {kind}": (
        "deep",
        {**beside(kind, schedule, pipeline__n_microbatches=2), "training.global_batch_size": 10},
        "Tokens",
        {"tie_embeddings": True},
    )
    for schedule in SCHEDULES
    for kind in ("ddp", "fsdp")
}
# Two schedules, each beside one of the two; `test_every_schedule_beside_the_other` has the rest.
IN_TURN = ("ZBVZeroBubble, fsdp", "DualPipeV, ddp")

ON_FOUR: dict[str, tuple[Any, ...]] = {
    **{name: SIDE_BY_SIDE[name] for name in IN_TURN},
    "bdh": ("deep", beside("fsdp", "LoopedBFS"), "Tokens", {"name": "bdh"}),
    "lengths": ("deep", {**beside("fsdp"), **ONE_AT_A_TIME}, "TextsOfAllLengths"),
}
# Like one above, on a path with a turn; `test_every_schedule_beside_the_other` has it.
LENGTHS_IN_V = ("deep", {**beside("fsdp", "DualPipeV"), **ONE_AT_A_TIME}, "TextsOfAllLengths")

TRAININGS = ON_TWO | ON_FOUR

# ---- what a checkpoint goes on in ----

TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp:2": (2, {"distributed.strategy": "ddp"}),
    "pipeline:2, DualPipeV": (2, piped("DualPipeV")),
    "fsdp:4": (4, {"distributed.strategy": "fsdp"}),
    "pipeline:4": (4, piped("1F1B")),
    "pipeline:2*fsdp:2": (4, beside("fsdp")),
    "pipeline:2*ddp:2, ZBVZeroBubble": (4, beside("ddp", "ZBVZeroBubble")),
}
# From a pipeline beside shards to each, and from one process to some: loading looks at what it
# needs, not at who saved.
GOES_ON = [
    ("pipeline", "ddp:2"),
    ("pipeline", "pipeline:4"),
    ("pipeline", "single"),
    ("single", "pipeline:2, DualPipeV"),
]
# `test_a_checkpoint_goes_on_in_the_remaining_layouts` has these.
GOES_ON_IN_FULL = [
    *(
        ("pipeline", topology)
        for topology in (*TOPOLOGIES, "single")
        if ("pipeline", topology) not in GOES_ON
    ),
    ("single", "pipeline:2*fsdp:2"),
    ("single", "single"),
]


@cache
def folder_of(origin: str) -> Path:
    """Where the checkpoint of a run lies; that of the one process is written here and now."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def case_name(case: Case) -> str:
    return f"{case.model}, {case.schedule}, {case.layout}"


def loads_on(ranks: int, pairs: list[tuple[str, str]]) -> Calls:
    """Calls that go on from a checkpoint, of those (origin, topology) that have so many ranks."""
    return {
        f"{origin} → {name}": ("go_on", (settings, str(folder_of(origin))))
        for origin, name in pairs
        for size, settings in [TOPOLOGIES.get(name, (1, {}))]
        if size == ranks
    }


def calls_on(ranks: int) -> Calls:
    """Name → (function of `pipeline_cases`, its arguments)."""
    cases = (
        {name: case for name, case in ON_TWO.items() if name not in ONLY_FULL}
        if ranks == 2
        else ON_FOUR
    )
    trainings = {name: ("train", case) for name, case in cases.items()}
    parity: Calls = {case_name(case): ("parity", (case,)) for case in grid(ranks, whole=False)}
    goes_on = loads_on(ranks, GOES_ON)
    if ranks == 4:
        return {
            "saved": ("save", (TOPOLOGIES["pipeline:2*fsdp:2"][1], str(folder_of("pipeline")))),
            **trainings,
            **parity,
            **goes_on,
            "evaluated": ("evaluation", (beside("fsdp"), "TextsOfAllLengths")),
            "reductions": (
                "reductions",
                (beside("ddp", "Interleaved1F1B", pipeline__n_microbatches=2),),
            ),
            "statistics": ("running_statistics", (beside("ddp", "Interleaved1F1B"),)),
            "refused": (
                "message_of",
                ("deep", piped("ZBVZeroBubble", pipeline_size=2, shard_size=2)),
            ),
        }
    one_too_many = {"middle.1": "end", "end": "beginning"}
    return {
        **trainings,
        **parity,
        **goes_on,
        "transformer": ("look", (piped("1F1B"), "transformer")),
        "bdh": ("look", (piped("DualPipeV"), "bdh")),
        "wrapped": ("names", ({**piped("1F1B"), **CHECKPOINTED, "training.compile": True},)),
        "overflow": ("overflow", (piped("1F1B"),)),
        "statistics": ("running_statistics", (piped("1F1B"),)),
        "statistics, V": ("running_statistics", (piped("DualPipeV"),)),
        "statistics, recomputed": ("running_statistics", ({**piped("1F1B"), **CHECKPOINTED},)),
        "too many stages": (
            "message_of",
            ("Carrying", piped("1F1B", pipeline__split_spec=one_too_many)),
        ),
        "drifting": ("message_of", ("Drifting", piped("1F1B"))),  # the last one: its ranks part
    }


@cache
def launched(ranks: int) -> list[dict[str, Any]]:
    """Name → result, of each rank."""
    uninterrupted()
    if ranks == 2:
        launched(4)  # writes a checkpoint that these go on from
    calls = calls_on(ranks)
    results = run_ranks(several, ranks, list(calls.values()), timeout=1500)
    return [dict(zip(calls, of_rank, strict=True)) for of_rank in results]


@cache
def uninterrupted() -> Any:
    """The run of one process that saves after two of its steps."""
    return save({}, str(folder_of("single")))
