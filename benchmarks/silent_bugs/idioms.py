"""Judges scripts in the idiom of public examples (`scripts/`) with `lockstep verify SCRIPT`.

Which cause is right, and in which function a fault is planted, was written down before verify was
given the script for the first time; `FIRST_TRY` says what it made of it then.

python -m benchmarks.silent_bugs.idioms [--only NAME …] [--rows FILE.jsonl] [--out
benchmarks/results/silent_bugs_idioms.md]

What `--rows` holds is judged already, and is not judged again: all of it takes an hour.
"""

import argparse
import ast
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.page import machine, page, table, tell
from lockstep.verify.command import verify_script
from lockstep.verify.comparison_result import UNKNOWN


@dataclass(frozen=True)
class Idiom:
    """A script, and what verify must say of it.

    Attributes:
        script: file in `scripts/`.
        arguments: of the script.
        kinds: of a cause that is right; empty: the script is sound.
        function: in which the fault is planted.
    """

    script: str
    arguments: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    function: str = ""

    @property
    def name(self) -> str:
        """The script and its arguments."""
        return " ".join([self.script, *self.arguments])

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.kinds


COMPUTATION = "computation of a rank"
SYNCHRONISATION = "gradient synchronisation"
ACCUMULATION = "gradient accumulation"
NORMALISATION = "loss normalisation"
SUM = "sum of gradients"
COUPLED = "coupled samples"

IDIOMS = (
    Idiom("gpt"),
    Idiom("gpt", ("penalty",), (COMPUTATION,), "backward"),
    Idiom("gpt", ("weighted rank",), (COMPUTATION,), "backward"),
    Idiom("gpt", ("undivided",), (ACCUMULATION,), "backward"),
    Idiom("bert"),
    Idiom("bert", ("own loader",), ("samples",), "main"),
    Idiom("resnet"),
    Idiom("resnet", ("evaluation mode",), ("evaluation mode",), "validate"),
    Idiom("sharded"),
    Idiom("sharded", ("scaled",), ("sum of gradients",), "main"),
    Idiom("sharded", ("mixed precision",)),
    Idiom("sharded", ("head left out",), (SYNCHRONISATION,), "shard"),
    Idiom("sharded", ("own tokens",), (NORMALISATION,), "main"),
    Idiom("lightning_defaults"),
    Idiom("lightning_defaults", ("unsharded",), ("samples",), "main"),
    Idiom("lightning_defaults", ("detached",), ("parameters without gradients",), "training_step"),
    Idiom("diffusion"),
    Idiom("diffusion", ("numpy",)),
    Idiom("diffusion", ("generator",)),
    Idiom("diffusion", ("same seed",), ("random numbers",), "main"),
    Idiom("diffusion", ("scaled",), (COMPUTATION,), "main"),
    Idiom("diffusion", ("not reduced",), (SYNCHRONISATION,), "main"),
    Idiom("mixup"),
    Idiom("mixup", ("crops",)),
    Idiom("gan"),
    Idiom("gan", ("generator unwrapped",), (SYNCHRONISATION,), "main"),
    Idiom("gan", ("same latents",), ("random numbers",), "main"),
    Idiom("gan", ("unsharded",), ("samples",), "main"),
    Idiom("gan", ("weighted rank",), (COMPUTATION,), "main"),
    Idiom("tutorial"),
    Idiom("tutorial", ("no epoch",), ("order of samples",), "_run_epoch"),
    Idiom("wrapped", ("zero",)),
    Idiom("wrapped", ("fp16",)),
    Idiom("wrapped", ("powersgd",)),
    Idiom("wrapped", ("zero scaled",), (COMPUTATION,), "main"),
    Idiom("tensor_parallel"),
    Idiom("tensor_parallel", ("sharded loader",), ("samples",), "main"),
    Idiom("evaluated"),
    Idiom("evaluated", ("evaluation mode",), ("evaluation mode",), "evaluate"),
    Idiom("accumulated"),
    Idiom("accumulated", ("own mean",)),
    Idiom("accumulated", ("undivided",), (ACCUMULATION,), "main"),
    Idiom("accumulated", ("undivided", "own mean"), (ACCUMULATION,), "main"),
    Idiom("policy"),
    Idiom("policy", ("beside the wrapper",), (SYNCHRONISATION,), "main"),
    Idiom("fabric_loop"),
    Idiom("fabric_loop", ("beside the wrapper",), (SYNCHRONISATION,), "main"),
    Idiom("trainer_of_transformers"),
    Idiom("trainer_of_transformers", ("penalty",), (COMPUTATION,), "compute_loss"),
    Idiom("low_rank"),
    Idiom("low_rank", ("other adapters",), ("first values",), "main"),
    Idiom("distilled"),
    Idiom("distilled", ("other teacher",), (COMPUTATION,), "main"),
    Idiom("weighted_classes"),
    Idiom("weighted_classes", ("local mean",), (NORMALISATION,), "main"),
    Idiom("weighted_classes", ("weighted rank",), (COMPUTATION,), "main"),
    Idiom("random_crops"),
    Idiom("random_crops", ("same seed",), ("samples", "random numbers"), "main"),
    Idiom("random_crops", ("sum of tokens",), (SUM,), "main"),
    Idiom("preferences"),
    Idiom("preferences", ("mean of tokens",), (NORMALISATION, COUPLED), "main"),
    Idiom("preferences", ("other reference",), (COMPUTATION,), "main"),
    Idiom("recipe"),
    Idiom("recipe", ("stepped by all",), ("learning rate schedule",), "main"),
    Idiom("recipe", ("no epoch",), ("order of samples",), "main"),
    Idiom("recipe", ("clipped early",), ("clipping",), "main"),
    Idiom("contrastive"),
    Idiom("contrastive", ("own negatives",), (COUPLED,), "gathered"),
    Idiom("contrastive", ("no gradient",), (SUM,), "gathered"),
    Idiom("streamed"),
    Idiom("streamed", ("unsharded",), ("samples",), "__iter__"),
    Idiom("streamed", ("weighted rank",), (COMPUTATION,), "main"),
    Idiom("averaged_by_hand"),
    Idiom("averaged_by_hand", ("summed",), (SUM,), "average_gradients"),
    Idiom("averaged_by_hand", ("biases left out",), (SYNCHRONISATION,), "average_gradients"),
    Idiom("averaged_by_hand", ("before the last",), (SYNCHRONISATION,), "main"),
    Idiom("averaged_by_hand", ("one frozen",), ("frozen parameters", COMPUTATION), "main"),
    Idiom("staged"),
    Idiom("staged", ("divided by stages",), (SUM,), "loss_of"),
    Idiom("staged", ("other input",), (COMPUTATION,), "main"),
    Idiom("fine_tuned"),
    Idiom("fine_tuned", ("mean of tokens",), (NORMALISATION, ACCUMULATION), "main"),
    Idiom("fine_tuned", ("beside the wrapper",), (SYNCHRONISATION,), "main"),
    Idiom("fine_tuned", ("own clipping",), ("clipping",), "main"),
    Idiom("segmented"),
    Idiom("segmented", ("own pixels",), (NORMALISATION,), "main"),
    Idiom("segmented", ("plain clipping",), ("clipping",), "main"),
    Idiom("two_tasks"),
    Idiom("two_tasks", ("head of a rank",), (COMPUTATION,), "main"),
    Idiom("two_tasks", ("no optimizer",), ("parameters without an optimizer",), "main"),
    Idiom("two_tasks", ("twice",), (COMPUTATION,), "main"),
    Idiom("clipped_shards"),
    Idiom("clipped_shards", ("local norm",), ("clipping",), "clip_gradients"),
    Idiom("mean_teacher"),
    Idiom("mean_teacher", ("rank 0 only",), (COMPUTATION,), "update_teacher"),
    Idiom("no_sync"),
    Idiom("no_sync", ("first micro-batch",), (SYNCHRONISATION,), "main"),
    Idiom("label_smoothed"),
    Idiom("label_smoothed", ("mean of positions",), (NORMALISATION,), "label_smoothed_loss"),
    Idiom("scaled_rate"),
    Idiom("scaled_rate", ("adam",), ("learning rate", SUM), "main"),
    Idiom("in_order"),
    Idiom("loss_scaled"),
    Idiom("early_stopped"),
    Idiom("early_stopped", ("own decision",), ("uneven steps", "hang"), "validation_loss"),
    Idiom("simclr"),
    Idiom("simclr", ("own slice",), (SUM,), "backward"),
    Idiom("own_shards"),
    Idiom(
        "own_shards", ("own length",), ("learning rate", "learning rate schedule"), "total_steps"
    ),
    Idiom("snapshots"),
    Idiom("snapshots", ("rank 0 alone",), ("replicas",), "load"),
    Idiom("momentum_queue"),
    Idiom("momentum_queue", ("own keys",), (COMPUTATION, COUPLED), "enqueue"),
    Idiom("mixture"),
    Idiom("mixture", ("own balance",), (COUPLED, NORMALISATION), "balance"),
    Idiom("cut_by_hand"),
    Idiom("cut_by_hand", ("bias of each rank",), (COMPUTATION,), "forward"),
    Idiom("cut_by_hand", ("no sum",), (SYNCHRONISATION, SUM), "backward"),
    Idiom("trainer_of_counts"),
    Idiom("trainer_of_counts", ("count ignored",), (ACCUMULATION, NORMALISATION), "compute_loss"),
    Idiom("bucketed"),
    Idiom("bucketed", ("own order",), ("samples",), "__iter__"),
    Idiom("bucketed", ("one order",), ("order of samples",), "__iter__"),
    Idiom("bucketed", ("not told",), ("order of samples",), "main"),
    Idiom("meta_learned"),
    Idiom("meta_learned", ("summed",), (SUM,), "reduce_gradients"),
    Idiom("meta_learned", ("first order",), (COMPUTATION,), "adapted"),
    Idiom("own_scaler"),
    Idiom("own_scaler", ("own scale",), (COMPUTATION, SYNCHRONISATION, SUM), "update"),
    Idiom("averaged_weights"),
    Idiom("averaged_weights", ("left in",), ("replicas",), "evaluate"),
    Idiom("autoencoder"),
    Idiom("autoencoder", ("same noise",), ("random numbers",), "main"),
    Idiom("autoencoder", ("own warm-up",), (COMPUTATION,), "divergence_weight"),
    Idiom("logged"),
    Idiom("logged", ("logged loss",), (SUM,), "reduced"),
    Idiom("plateau"),
    Idiom("plateau", ("own loss",), ("learning rate", "learning rate schedule"), "validate"),
    Idiom("windows"),
    Idiom("windows", ("neighbours",), ("samples",), "batches"),
    Idiom("hinted"),
    Idiom("hinted", ("other temperature",), (COMPUTATION,), "soft_loss"),
    Idiom("hinted", ("teacher trained",), (SYNCHRONISATION,), "main"),
    Idiom("fabric_accumulated"),
    Idiom("fabric_accumulated", ("last skipped",), (SYNCHRONISATION,), "is_accumulating"),
    Idiom("adapted"),
    Idiom("adapted", ("unprepared loader",), ("samples",), "main"),
    Idiom("accumulated_tokens"),
    Idiom("accumulated_tokens", ("local count",), (NORMALISATION, ACCUMULATION), "tokens_of"),
    Idiom("trainer_of_classes"),
    Idiom("trainer_of_classes", ("own weights",), (NORMALISATION,), "compute_loss"),
    Idiom("joined"),
    Idiom("joined", ("not joined",), ("uneven steps", "hang"), "train"),
    Idiom("clipped_accumulation"),
    Idiom("clipped_accumulation", ("each clipped",), ("clipping", SYNCHRONISATION), "main"),
    Idiom("synchronised_statistics"),
    Idiom(
        "synchronised_statistics",
        ("no gradient",),
        (SUM, COMPUTATION, COUPLED),
        "mean_of_ranks",
    ),
    Idiom("cutmix"),
    Idiom("cutmix", ("area of the draw",), (COMPUTATION,), "cut_and_mixed"),
    Idiom("replayed"),
    Idiom("replayed", ("target of a rank",), (COMPUTATION,), "sync_target"),
    Idiom("translated"),
    Idiom("translated", ("own words",), (NORMALISATION,), "loss_of"),
    Idiom("penalised"),
    Idiom("penalised", ("same points",), ("random numbers",), "main"),
    Idiom("penalised", ("penalty of a rank",), (COMPUTATION,), "gradient_penalty"),
    Idiom("recomputed_shards"),
    Idiom("recomputed_shards", ("other loss",), (COMPUTATION, ACCUMULATION), "main"),
    Idiom("hybrid"),
    Idiom("hybrid", ("shards alone",), (SYNCHRONISATION,), "shard"),
    Idiom("cut_vocabulary"),
    Idiom("cut_vocabulary", ("own total",), (COMPUTATION,), "cut_cross_entropy"),
    Idiom("lightning_by_hand"),
    Idiom("lightning_by_hand", ("undivided",), (ACCUMULATION,), "training_step"),
    Idiom("sparse_words"),
    Idiom("sparse_words", ("same negatives",), ("random numbers",), "main"),
    Idiom("barlow"),
    Idiom("barlow", ("no gradient",), (SUM,), "summed"),
    Idiom("vicreg"),
    Idiom("vicreg", ("own covariance",), (COUPLED,), "gathered"),
    Idiom("detector"),
    Idiom("detector", ("own boxes",), (NORMALISATION, COUPLED), "number_of_boxes"),
    Idiom("graphs"),
    Idiom("graphs", ("mean of nodes",), (NORMALISATION,), "node_loss"),
    Idiom("curriculum"),
    Idiom("curriculum", ("from the rank on",), ("samples",), "__iter__"),
    Idiom("teacher_forced"),
    Idiom("teacher_forced", ("own ratio",), (COMPUTATION,), "teaching_ratio"),
    Idiom("group_policy"),
    Idiom("group_policy", ("spread of the batch",), (COUPLED, NORMALISATION), "advantages"),
    Idiom("rollouts"),
    Idiom("rollouts", ("entropy of a rank",), (COMPUTATION,), "loss_of"),
    Idiom("sharded_accumulation"),
    Idiom("sharded_accumulation", ("optimizer first",), ("stale optimizer",), "main"),
    Idiom(
        "sharded_accumulation",
        ("never synchronised",),
        (SYNCHRONISATION, "parameters without gradients"),
        "main",
    ),
    Idiom("compiled"),
    Idiom("compiled", ("beside the wrapper",), (SYNCHRONISATION,), "main"),
    Idiom("worker_shards"),
    Idiom("worker_shards", ("by worker",), ("samples",), "__iter__"),
    Idiom("accelerated"),
    Idiom("accelerated", ("own backward",), (ACCUMULATION,), "main"),
    Idiom("soft_labels"),
    Idiom("soft_labels", ("own smoothing",), (COMPUTATION,), "soft_targets"),
    Idiom("warmed_up"),
    Idiom(
        "warmed_up", ("own length",), ("learning rate", "learning rate schedule"), "warm_up_steps"
    ),
    Idiom("unscaled"),
    Idiom("unscaled", ("clipped scaled",), ("clipping",), "main"),
    Idiom("sharpness"),
    Idiom("sharpness", ("own ascent",), (COMPUTATION, SYNCHRONISATION), "ascend"),
    Idiom("closure"),
    Idiom("closure", ("averaged once",), (SYNCHRONISATION, "replicas"), "average"),
    Idiom("adversarial"),
    Idiom("adversarial", ("own strength",), (COMPUTATION,), "strength"),
    Idiom("clustered"),
    Idiom("clustered", ("own clusters",), (COUPLED,), "sinkhorn"),
    Idiom("quantised"),
    Idiom("quantised", ("own codes",), (COMPUTATION, COUPLED, "replicas"), "update"),
    Idiom("trainer_of_loaders"),
    Idiom("trainer_of_loaders", ("plain loader",), ("samples",), "get_train_dataloader"),
    Idiom("lightning_pairs"),
    Idiom("lightning_pairs", ("no gradient",), (COMPUTATION, SUM), "keys_of_all"),
    Idiom("token_shards"),
    Idiom("token_shards", ("same windows",), ("samples",), "__init__"),
    Idiom("token_shards", ("weighted rank",), (COMPUTATION,), "main"),
    Idiom("shards_by_hand"),
    Idiom("shards_by_hand", ("shifted labels",), (COMPUTATION, "samples"), "own_part"),
    Idiom("shards_by_hand", ("head by hand",), (SYNCHRONISATION,), "main"),
    Idiom("weighed_tasks"),
    Idiom("weighed_tasks", ("beside the model",), (SYNCHRONISATION,), "main"),
    Idiom("private"),
    Idiom("private", ("own noise",), ("replicas", SYNCHRONISATION), "noisy"),
    Idiom("memory_mapped"),
    Idiom("memory_mapped", ("same seed",), ("samples", "random numbers"), "main"),
    Idiom("memory_mapped", ("never synchronised",), (SYNCHRONISATION,), "main"),
    Idiom("soft_target"),
    Idiom("soft_target", ("target of a rank",), (COMPUTATION,), "soft_update"),
    Idiom("soft_target", ("critic unwrapped",), (SYNCHRONISATION,), "main"),
)


# What verify made of scripts before it was mended: RIGHT, or what it said instead. Those that are
# not here were first given to the mended one.
RIGHT = "right"
FIRST_TRY: dict[str, str] = {
    "own_shards": "learning rate",
    "snapshots": "cause not known",
    "snapshots rank 0 alone": "cause not known",
    "sharded mixed precision": "coupled samples",
    "sharded head left out": RIGHT,
    "momentum_queue": "frozen parameters",
    "momentum_queue own keys": "frozen parameters",
    "mixture": RIGHT,
    "mixture own balance": RIGHT,
    "cut_by_hand": RIGHT,
    "cut_by_hand bias of each rank": "cause not known",
    "cut_by_hand no sum": RIGHT,
    "gpt": "crash: too many fds",
    "gpt penalty": "crash: too many fds",
    "lightning_defaults": "gradient synchronisation",
    "lightning_defaults detached": "crash",
    "diffusion": "computation of a rank",
    "mixup": "computation of a rank",
    "gan generator unwrapped": "cause not known",
    "tutorial": "order of samples",
    "wrapped zero": "gradient synchronisation",
    "tensor_parallel sharded loader": "gradient synchronisation",
    "evaluated evaluation mode": "passed",
    "weighted_classes weighted rank": "loss normalisation",
    "random_crops": "samples",
    "random_crops same seed": RIGHT,
    "random_crops sum of tokens": "samples",
    "preferences": "random numbers",
    "preferences mean of tokens": "random numbers",
    "preferences other reference": "random numbers",
    "recipe": RIGHT,
    "recipe stepped by all": RIGHT,
    "recipe no epoch": RIGHT,
    "recipe clipped early": "gradient synchronisation",
    "contrastive": RIGHT,
    "contrastive own negatives": RIGHT,
    "contrastive no gradient": "computation of a rank",
    "streamed": RIGHT,
    "streamed unsharded": RIGHT,
    "streamed weighted rank": RIGHT,
    "averaged_by_hand": RIGHT,
    "averaged_by_hand summed": RIGHT,
    "averaged_by_hand biases left out": RIGHT,
    "averaged_by_hand before the last": "cause not known",
    "averaged_by_hand one frozen": "frozen parameters, which was not foreseen",
    "staged": RIGHT,
    "staged divided by stages": "gradient synchronisation",
    "staged other input": "cause not known",
    "fine_tuned": "random numbers",
    "fine_tuned mean of tokens": "random numbers",
    "segmented": "weights of ranks",
    "segmented own pixels": "sum of gradients",
    "segmented plain clipping": RIGHT,
    "two_tasks": RIGHT,
    "two_tasks head of a rank": "weights of ranks",
    "two_tasks no optimizer": RIGHT,
    "two_tasks twice": RIGHT,
    "clipped_shards": RIGHT,
    "clipped_shards local norm": "cause not known",
    "mean_teacher rank 0 only": RIGHT,
    "no_sync first micro-batch": RIGHT,
    "label_smoothed": RIGHT,
    "label_smoothed mean of positions": "computation of a rank",
    "scaled_rate": "learning rate, sum of gradients",
    "scaled_rate adam": RIGHT,
    "in_order": RIGHT,
    "loss_scaled": RIGHT,
    "early_stopped": RIGHT,
    "early_stopped own decision": RIGHT,
    "simclr own slice": RIGHT,
    "own_shards own length": RIGHT,
    "bucketed own order": "passed",
    "meta_learned": RIGHT,
    "meta_learned summed": RIGHT,
    "meta_learned first order": RIGHT,
    "own_scaler": RIGHT,
    "own_scaler own scale": RIGHT,
    "averaged_weights": RIGHT,
    "averaged_weights left in": RIGHT,
    "autoencoder": RIGHT,
    "autoencoder same noise": RIGHT,
    "autoencoder own warm-up": RIGHT,
    "logged": RIGHT,
    "logged logged loss": RIGHT,
    "plateau": RIGHT,
    "plateau own loss": "passed",
    "windows": "cannot judge",
    "windows neighbours": RIGHT,
    "hinted": RIGHT,
    "hinted other temperature": RIGHT,
    "hinted teacher trained": RIGHT,
    "fabric_accumulated": RIGHT,
    "fabric_accumulated last skipped": RIGHT,
    "adapted": RIGHT,
    "adapted unprepared loader": RIGHT,
    "accumulated_tokens": RIGHT,
    "accumulated_tokens local count": RIGHT,
    "trainer_of_classes": RIGHT,
    "trainer_of_classes own weights": RIGHT,
    "joined": RIGHT,
    "joined not joined": RIGHT,
    "clipped_accumulation": RIGHT,
    "clipped_accumulation each clipped": RIGHT,
    "synchronised_statistics": "parameters that do not move",
    "synchronised_statistics no gradient": "passed: one process had it, too",
    "cutmix": RIGHT,
    "cutmix area of the draw": RIGHT,
    "replayed": "cannot judge",
    "replayed target of a rank": "cannot judge",
    "translated": RIGHT,
    "translated own words": RIGHT,
    "penalised": "gradient synchronisation",
    "penalised same points": "gradient synchronisation",
    "penalised penalty of a rank": "gradient synchronisation",
    "recomputed_shards": RIGHT,
    "recomputed_shards other loss": "gradient accumulation, which was not foreseen",
    "hybrid": RIGHT,
    "hybrid shards alone": RIGHT,
    "cut_vocabulary": RIGHT,
    "cut_vocabulary own total": "cause not known",
    "lightning_by_hand": RIGHT,
    "lightning_by_hand undivided": RIGHT,
    "sparse_words": "crash",
    "sparse_words same negatives": "crash",
    "barlow": RIGHT,
    "barlow no gradient": RIGHT,
    "vicreg": RIGHT,
    "vicreg own covariance": RIGHT,
    "detector": RIGHT,
    "detector own boxes": RIGHT,
    "graphs": RIGHT,
    "graphs mean of nodes": RIGHT,
    "curriculum": RIGHT,
    "curriculum from the rank on": RIGHT,
    "teacher_forced": RIGHT,
    "teacher_forced own ratio": RIGHT,
    "group_policy": RIGHT,
    "group_policy spread of the batch": RIGHT,
    "rollouts": RIGHT,
    "rollouts entropy of a rank": "cause not known",
    "sharded_accumulation": RIGHT,
    "sharded_accumulation optimizer first": RIGHT,
    "sharded_accumulation never synchronised": "stale optimizer",
    "compiled": RIGHT,
    "compiled beside the wrapper": RIGHT,
    "worker_shards": RIGHT,
    "worker_shards by worker": RIGHT,
    "accelerated": RIGHT,
    "accelerated own backward": RIGHT,
    "soft_labels": RIGHT,
    "soft_labels own smoothing": RIGHT,
    "warmed_up": RIGHT,
    "warmed_up own length": RIGHT,
    "unscaled": RIGHT,
    "unscaled clipped scaled": RIGHT,
    "sharpness": RIGHT,
    "sharpness own ascent": RIGHT,
    "closure": RIGHT,
    "closure averaged once": RIGHT,
    "adversarial": RIGHT,
    "adversarial own strength": RIGHT,
    "clustered": RIGHT,
    "clustered own clusters": RIGHT,
    "quantised": RIGHT,
    "quantised own codes": RIGHT,
    "trainer_of_loaders": RIGHT,
    "trainer_of_loaders plain loader": RIGHT,
    "lightning_pairs": RIGHT,
    "lightning_pairs no gradient": RIGHT,
    "token_shards": RIGHT,
    "token_shards same windows": RIGHT,
    "token_shards weighted rank": RIGHT,
    "shards_by_hand": RIGHT,
    "shards_by_hand shifted labels": RIGHT,
    "shards_by_hand head by hand": RIGHT,
    "weighed_tasks": RIGHT,
    "weighed_tasks beside the model": RIGHT,
    "private": "random numbers",
    "private own noise": "cause not known",
    "memory_mapped": RIGHT,
    "memory_mapped same seed": RIGHT,
    "memory_mapped never synchronised": RIGHT,
    "soft_target": RIGHT,
    "soft_target target of a rank": RIGHT,
    "soft_target critic unwrapped": RIGHT,
}

FOLDER = Path(__file__).parent / "scripts"
STEPS = 3


@dataclass(frozen=True)
class JudgedIdiom:
    """What verify says of a script.

    Attributes:
        passed: whether there is no alarm.
        open: whether it can't be judged.
        kinds: of the causes that are errors.
        text: of the first of them, or why it was not judged.
        where: the first operation that differs.
        at: the line that is named with the first cause; None: it was judged before causes had one.
        seconds: for the verdict.
    """

    idiom: Idiom
    passed: bool
    open: bool
    kinds: tuple[str, ...]
    text: str
    where: str
    seconds: float
    at: str | None = None

    @property
    def right(self) -> bool:
        """Whether a sound script passes, and a fault's cause is named, before any other."""
        if self.idiom.sound:
            return self.passed
        return not self.passed and any(kind in self.idiom.kinds for kind in self.kinds[:1])

    @property
    def line(self) -> int:
        """The script's line that is named with the cause, or else first; 0 without any."""
        said = self.at or f"{self.where} {self.text}"
        found = re.search(rf"/{self.idiom.script}\.py:(\d+)", said)
        return int(found[1]) if found else 0

    @property
    def is_in_function(self) -> bool:
        """Whether that line lies in the function where the fault was planted."""
        tree = ast.parse((FOLDER / f"{self.idiom.script}.py").read_text())
        return any(
            isinstance(node, ast.FunctionDef)
            and node.name == self.idiom.function
            and node.lineno <= self.line <= (node.end_lineno or 0)
            for node in ast.walk(tree)
        )


def judge(idiom: Idiom) -> JudgedIdiom:
    """Verify one script on two ranks."""
    began = time.monotonic()
    path = str(FOLDER / f"{idiom.script}.py")
    (outcome,) = verify_script(path, idiom.arguments, [2], steps=STEPS)
    errors = [found for found in outcome.causes if found.is_error]
    text = errors[0].text if errors else outcome.failed or outcome.not_judged
    kinds = tuple(found.kind for found in errors)
    seconds = time.monotonic() - began
    is_open = bool(outcome.not_judged) and not errors
    at = errors[0].line if errors else ""
    return JudgedIdiom(idiom, outcome.passed, is_open, kinds, text, outcome.operation, seconds, at)


def kept(path: Path | None) -> dict[str, JudgedIdiom]:
    """Return what was judged before, by name."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_name = {idiom.name: idiom for idiom in IDIOMS}
    found = {}
    for values in rows:
        name = values.pop("name")
        if name in by_name:
            values["kinds"] = tuple(values["kinds"])
            found[name] = JudgedIdiom(by_name[name], **values)
    return found


def keep(path: Path, judged: JudgedIdiom) -> None:
    """Add a verdict to those that are kept."""
    values = asdict(judged)
    del values["idiom"]
    with path.open("a") as file:
        print(json.dumps({"name": judged.idiom.name, **values}), file=file)


def row(judged: JudgedIdiom) -> str:
    """Return the row of the table."""
    idiom = judged.idiom
    wanted = "sound" if idiom.sound else " or ".join(idiom.kinds)
    says = "passed" if judged.passed else ", ".join(judged.kinds) or "cannot judge"
    text = " ".join(judged.text.split())[:140].replace("|", "/")
    cells = (
        idiom.name,
        wanted,
        says,
        "✓" if judged.right else "✗",
        FIRST_TRY.get(idiom.name, "-"),
        text,
        f"{judged.line or '-'}{' ✓' if judged.is_in_function else ''}",
        f"{judged.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    known = kept(given.rows)
    found = []
    for idiom in IDIOMS:
        if given.only is None or idiom.name in given.only:
            found.append(known[idiom.name] if idiom.name in known else judge(idiom))
            if given.rows is not None and idiom.name not in known:
                keep(given.rows, found[-1])
            print(row(found[-1]), flush=True)
    sound = [judged for judged in found if judged.idiom.sound]
    faults = [judged for judged in found if not judged.idiom.sound]
    named = [judged for judged in faults if judged.kinds and judged.kinds[0] != UNKNOWN]
    lined = [judged for judged in faults if judged.at is not None]
    goals = {
        "scripts that this page holds": f"{len(found)} of {len(IDIOMS)}",
        "no alarm on a sound script": f"{sum(bool(j.kinds) for j in sound)} of {len(sound)}",
        "sound scripts with a verdict, ≥ 95 %": f"{sum(j.passed for j in sound)} of {len(sound)}",
        "faults found, ≥ 95 %": f"{sum(bool(j.kinds) for j in faults)} of {len(faults)}",
        "causes right, ≥ 85 %": f"{sum(j.right for j in faults)} of {len(faults)}",
        "causes wrong, none": f"{sum(not j.right for j in named)}",
        "faults whose line lies in the function where it was planted, ≥ 80 %": (
            f"{sum(j.is_in_function for j in faults)} of {len(faults)}"
        ),
        "the same, of those judged since causes have lines": (
            f"{sum(j.is_in_function for j in lined)} of {len(lined)}"
        ),
    }
    words = [
        *table("| goal | shown |", [f"| {goal} | {shown} |" for goal, shown in goals.items()]),
        "",
        (
            "Each script stands alone, is of our own writing, and does what public examples of its"
            " kind do (`scripts/`)."
        ),
        (
            "What counts as its cause was written down before verify was given it. The column"
            " `first try` has what verify"
        ),
        (
            "said before it was mended; `-`: it was first given to the mended one. The machine's"
            " load is in the seconds."
        ),
    ]
    text = page(
        "Silent bugs in scripts of public idiom",
        "python -m benchmarks.silent_bugs.idioms --out benchmarks/results/silent_bugs_idioms.md",
        machine(),
        words,
        "| script | planted | verify says | right | first try | in words | line | seconds |",
        [row(judged) for judged in found],
        [],
    )
    tell(text, given.out)


if __name__ == "__main__":
    main()
