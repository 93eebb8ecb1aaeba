"""What goes wrong without an error: how it looks, where to see it, what to do."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """A symptom and the line that shows its cause.

    Attributes:
        look: the line of `lockstep report`, of metrics.jsonl, or of `lockstep doctor`.
    """

    seen: str
    look: str
    cause: str
    mend: str


SYMPTOMS = (
    Symptom(
        "a GPU at 0 %, or utilisation that differs",
        "report: “Time per phase”, gpu_utilisation (least, median, most, rank); doctor: GPUs",
        "ranks that wait for data or for a slower rank, or all ranks on GPU 0",
        "raise data.num_workers; look at the rank that the line names; the device is the local rank",
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
        "report: “The loss was no number at step”; events.jsonl: fault, with the samples",
        "an overflow under fp16, a bad sample, or a learning rate that is too high",
        "precision.mode: bf16; training.bad_numbers; lower training.learning_rate",
    ),
    Symptom(
        "it learns otherwise on more ranks",
        "report: samples a step; `lockstep checkpoint digest` of both",
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
