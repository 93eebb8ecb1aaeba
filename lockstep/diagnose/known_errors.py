"""Finds the cause of an error and a fix in the tables of known errors, and writes docs/known_errors.md from them.

`recognise` prefers specific entries to general ones. A rank's exception is recognised by its text, and a killed rank by
the end of its log. The page: `python -m lockstep.diagnose.known_errors > docs/known_errors.md`.
"""

from dataclasses import dataclass
from pathlib import Path

from lockstep.diagnose import KnownError
from lockstep.diagnose.errors_network import COLLECTIVES, RENDEZVOUS
from lockstep.diagnose.errors_process import MACHINE, TRAINING

FAMILIES = {
    "Rendezvous": RENDEZVOUS,
    "Collectives": COLLECTIVES,
    "GPUs, memory, files, processes": MACHINE,
    "Models, gradients, checkpoints, data": TRAINING,
}
TABLE: tuple[KnownError, ...] = tuple(error for family in FAMILIES.values() for error in family)
# These often follow from a more specific error, which the same text or the log shows.
_VAGUE = ("a data worker was killed", "the dataset raised", "a peer is gone", "a collective timed out")
_TAIL_BYTES = 16_384


def recognise(text: str, log: Path | None = None) -> KnownError | None:
    """Return the known error in `text`, if any; the log is searched too if it is recognised, but vague."""
    found = [error for error in TABLE if error.regex.search(text)]
    known = min(found, key=lambda error: error.name in _VAGUE, default=None)
    if known is not None and known.name == "a data worker was killed" and log is not None:
        return recognise(f"{text}\n{tail(log)}")
    return known


def tail(log: Path) -> str:
    """Return the end of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# ---- docs/known_errors.md, with symptoms ----


_INTRO = """# Known errors

When a rank fails, the launcher prints the first cause, with its explanation from the tables below. This page is
generated from them by `python -m lockstep.diagnose.known_errors`. `lockstep doctor` finds many of these errors before a
run.

“Seen in tests” means that a test provokes the error with the real library and checks that it is recognised; the others
need what is named, and are recognised by their text.
"""


@dataclass(frozen=True)
class Symptom:
    """A problem that raises no error, and where its cause can be seen."""

    seen: str  # what the user notices
    where: str  # the line of `lockstep report`, of metrics.jsonl, or of `lockstep doctor`
    cause: str  # the usual causes
    fix: str  # what to do


SYMPTOMS = (
    Symptom(
        "a GPU at 0 %, or utilisation that differs",
        "report: “Time per phase”, gpu_utilisation (least, median, most, rank); doctor: GPUs",
        "ranks that wait for data or for a slower rank, or all ranks on GPU 0",
        "raise data.num_workers; check the rank that the line names; the device is the local rank",
    ),
    Symptom(
        "memory is unequal over ranks",
        "report: “Ranks hold unequal memory”, memory (spread over ranks)",
        "stages of a pipeline that are cut unevenly, or a dimension that does not divide",
        "move the cuts (distributed.pipeline.split_spec); `lockstep plan` shows each stage",
    ),
    Symptom(
        "slow synchronisation",
        "report: “of each step waits for other ranks”; doctor: all-reduce by message size",
        "the link is slow, the wrong interface is used, or one rank keeps the others waiting",
        "raise training.gradient_accumulation_steps; distributed.ddp.compression.kind: auto; hybrid_shard; name the "
        "interface",
    ),
    Symptom(
        "slow, and one rank more than the others",
        "report: “keeps the others waiting” (straggler, with rank, host and phase)",
        "another process on that machine, heat, a slow disk, a PCIe link of less width",
        "`lockstep doctor` on all machines shows what differs; take the machine out",
    ),
    Symptom(
        "slow, and the ranks wait for data",
        "report: “of each step waits for data”",
        "reading or preparing samples is slower than training on them",
        "raise data.num_workers or prefetch_factor; `lockstep data prepare`",
    ),
    Symptom(
        "the loss does not fall",
        "report: the loss, “Nearly every step's gradient is clipped”, lr in metrics.jsonl",
        "the learning rate does not fit the global batch, the gradient is clipped away, or targets are shifted wrongly",
        "training.lr_scaling: sqrt or linear with base_batch_size; a longer warm-up; train 100 steps on one batch: its "
        "loss must go to 0",
    ),
    Symptom(
        "the loss is NaN, or jumps",
        "report: “The loss was not a number at step”; events.jsonl: fault, with the samples",
        "an overflow under fp16, a bad sample, or a learning rate that is too high",
        "precision.mode: bf16; training.bad_numbers; lower training.learning_rate",
    ),
    Symptom(
        "the training differs on more ranks",
        "report: samples per step; `lockstep checkpoint digest` of both",
        "the global batch grew with the ranks",
        "set training.global_batch_size: accumulation follows, and the training is the same",
    ),
    Symptom(
        "nothing happens",
        "logs/rank-*.stacks.txt and rank-*.flight.json, written when a step hangs; `kill -QUIT` of a rank writes its "
        "stacks at any time",
        "ranks wait for one that does not come to a collective, or for a machine that was not started",
        "the launcher names the rank and the line; doctor tries ports both ways",
    ),
    Symptom(
        "each rank trains a model of its own",
        "the first line that a run prints: strategy and number of ranks",
        "ranks never joined: no lockstep.setup(), or one world on each machine (RANK used for machines)",
        "start with `lockstep launch`; a script calls lockstep.setup() or makes a Trainer",
    ),
)


def page() -> str:
    """Return the page in Markdown."""
    parts = [_INTRO]
    for title, errors in FAMILIES.items():
        lines = [f"## {title}", "", "| error | recognised by | cause | what to do | shown |", "|---|---|---|---|---|"]
        for error in errors:
            shown = f"needs {error.needs}" if error.needs else "seen in tests"
            cells = (error.name, f"`{error.pattern}`", error.cause, error.fix, shown)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(lines) + "\n")
    lines = [
        "## Symptoms without an error",
        "",
        "| what is seen | where to look | cause | what to do |",
        "|---|---|---|---|",
    ]
    lines += [f"| {s.seen} | {s.where} | {s.cause} | {s.fix} |" for s in SYMPTOMS]
    parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
