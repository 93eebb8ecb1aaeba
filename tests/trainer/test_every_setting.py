"""Every setting in every way to train: it acts, is refused, or is warned of. A key without an entry
fails.

That a setting acts is seen, where one process in a few steps shows it: what comes out of a run is
compared with and without it (`OBSERVED`). What no run here shows, and no rule of `no_effect` names,
is in `ACTS`, with what it acts on.
"""

import contextlib
import io
import json
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Trainer
from lockstep.config import Config
from lockstep.config.keys import all_keys
from lockstep.errors import LockstepError, NoEffectWarning, UsageError

WAYS = ("train", "steps", "training_step", "place")
IN_PLACE = ("distributed", "precision")
OF_TRAINING_IN_PLACE = ("seed", "compile", "gradient_checkpointing", "gradient_checkpointing_every")
# Key, or section → what it acts on, for those that one process in a few steps does not show.
ACTS = {
    "model": "the model that a config names; in Python it is handed over",
    "data.name": "the data that a config names; in Python they are handed over",
    "data.args": "the data that a config names; in Python they are handed over",
    "loss_fn": "the loss",
    "data": "how a dataset is read (tests/data)",
    "training.batch_norm_samples": (
        "batch normalisation over ranks (tests/parallel/forward_effects/test_buffers.py)"
    ),
    "training.bad_numbers": "a step with bad numbers (tests/faults/test_numbers.py)",
    "training.gradient_checkpointing": (
        "what is kept of a forward pass (tests/parallel/execution/test_activation.py)"
    ),
    "training.label_smoothing": "a language model's loss (tests/models/test_token_losses.py)",
    "training.z_loss": "a language model's loss (tests/models/test_token_losses.py)",
    "training.loss_chunks": "a language model's loss (tests/models/test_token_losses.py)",
    "training.early_stopping": "the evaluations (tests/trainer/test_updates.py)",
    "training.compile": "the blocks of the model",
    "precision": "number formats (tests/test_precision.py)",
    "distributed": "ranks (tests/parallel, tests/launch)",
    "checkpoint": (
        "saves of the run, and `save_checkpoint` (tests/checkpoint, test_loops.py, test_formats.py)"
    ),
    "monitor": "records, callbacks and watchers (tests/monitor)",
}
# The keys of those sections of which `ACTS` has no single ones: a new one is added here when it
# acts.
LISTED = {
    "data": (
        "name args num_workers prefetch_factor pin_memory persistent_workers shuffle order"
        " drop_last"
    ),
    "precision": (
        "mode param_dtype fp8 tf32 loss_scale.dynamic loss_scale.initial_scale"
        " loss_scale.growth_factor loss_scale.backoff_factor loss_scale.growth_interval"
        " loss_scale.min_scale loss_scale.max_scale loss_scale.history_size"
    ),
    "distributed": (
        "strategy device backend init_method timeout_seconds hang.factor hang.seconds on_failure"
        " debug env reproducible buffers divergence_check_steps divergence_action"
        " replicate_size shard_size"
        " pipeline_size context_size context_method context_blocks tensor_size expert_size"
        " sequence_parallel tensor_blocks open_axes ddp.bucket_cap_mb ddp.find_unused_parameters"
        " ddp.static_graph ddp.gradient_as_bucket_view ddp.compression.kind ddp.compression.rank"
        " ddp.compression.start_step ddp.compression.warm_start ddp.compression.error_feedback"
        " fsdp.sharding_strategy fsdp.auto_wrap_policy fsdp.accumulate fsdp.min_num_params"
        " fsdp.forward_prefetch fsdp.backward_prefetch fsdp.cpu_offload fsdp.reduce_dtype"
        " fsdp.buffer_dtype pipeline.split_spec pipeline.stages_per_rank pipeline.schedule"
        " pipeline.n_microbatches accelerate.device_placement accelerate.cpu"
        " accelerate.mixed_precision accelerate.split_batches accelerate.dispatch_batches"
        " accelerate.even_batches accelerate.use_seedable_sampler"
        " accelerate.gradient_accumulation_plugin diloco.workers diloco.inner_steps"
        " diloco.outer_learning_rate diloco.outer_momentum diloco.nesterov diloco.fragments"
        " diloco.send_as diloco.error_feedback"
    ),
    "checkpoint": (
        "save_strategy save_steps save_total_limit keep_best keep_best_mode load_best format"
        " storage local_cache async memory_steps retries on_failure resume allow_changes"
    ),
    "monitor": (
        "log_steps sinks callbacks profile.wait profile.warmup profile.active profile.record_shapes"
        " profile.profile_memory profile.with_stack profile.ranks profile.dir memory.threshold"
        " memory.alert_on_imbalance straggler.threshold straggler.patience prometheus.port"
        " prometheus.host gradient_norms experiment"
    ),
}
# A value that is asked for, where it does not follow from the key's type; None: it can't be set
# alone.
VALUES: dict[str, Any] = {
    "model.name": None,
    "data.name": None,
    "loss_fn": "mse",
    "model.args": None,
    "data.args": None,
    "data.prefetch_factor": None,
    "data.persistent_workers": None,
    "data.num_workers": 1,
    "training.batch_norm_samples": None,
    "training.gradient_accumulation_steps": 2,
    "training.optimizer": "sgd",
    "training.optimizer_args": {"amsgrad": True},
    "training.lr_schedule": "cosine",
    "training.lr_scaling": None,
    "training.label_smoothing": None,
    "training.z_loss": None,
    "training.loss_chunks": None,
    "training.early_stopping": {},
    "training.eval_strategy": "epoch",
    "training.gradient_clip.strategy": "value",
    "training.compile": None,
    "training.gradient_checkpointing": None,
    "precision.mode": "bf16",
    "precision.param_dtype": None,
    "precision.fp8": None,
    "checkpoint.keep_best": "eval_loss",
    "checkpoint.load_best": None,
    "checkpoint.storage": None,
    "checkpoint.resume": None,
    "monitor.sinks": ["jsonl"],
    "monitor.callbacks": None,
    "monitor.profile": {},
    "monitor.prometheus": None,
    "monitor.experiment": "mine",
    "distributed.strategy": "ddp",
    "distributed.device": None,
    "distributed.backend": "gloo",
    "distributed.init_method": "tcp://127.0.0.1:29511",
    "distributed.timeout_seconds": 7.0,
    "distributed.sequence_parallel": False,
    "distributed.buffers": None,
    "distributed.debug": None,
    "distributed.env": None,
    "distributed.accelerate.gradient_accumulation_plugin": None,
    "distributed.fsdp.cpu_offload": None,
    "distributed.open_axes": ["tensor", "context"],
    "distributed.pipeline.split_spec": {"0": "end"},
}
LEAVES = [key for key, info in all_keys().items() if not info.is_section or key in VALUES]
X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def asked(key: str) -> Any:
    """Another value than the default, or None if there is none that stands alone."""
    if key in VALUES:
        return VALUES[key]
    info = all_keys()[key]
    if isinstance(info.default, bool):
        return not info.default
    others = [choice for choice in info.choices or () if choice != info.default]
    if others:
        return others[0]
    if isinstance(info.default, int | float):
        return (
            type(info.default)(info.default / 2)
            if isinstance(info.default, float)
            else info.default + 1
        )
    return 1


def outcome(key: str, value: Any, way: str, output: Path | None) -> str:
    """`error`, `warning` or `accepted`: what a way to train says to one setting that is
    asked for.
    """
    settings: dict[str, Any] = {key: value, "loss_fn": nn.MSELoss()}
    if key == "loss_fn":
        settings = {"config": Config().replaced({"loss_fn": value})}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            if way == "place":
                lockstep.place(nn.Linear(4, 1), **settings)
            else:
                length = {} if key == "training.num_train_epochs" else {"max_steps": 2}
                trainer = Trainer(nn.Linear(4, 1), output_dir=output, **{**length, **settings})
                trained(trainer, way)
                trainer._open.close()
        except UsageError:
            return "error"
        except LockstepError as error:
            raise AssertionError(f"{key} in {way}: {error}") from error
    return "warning" if any(one.category is NoEffectWarning for one in seen) else "accepted"


def trained(trainer: Trainer, way: str) -> None:
    if way == "train":
        trainer.train(DATA, DATA)
    elif way == "steps":
        list(trainer.steps(DATA))
    else:
        size = trainer.config.training.batch_size
        trainer.training_step((X[:size], X[:size].sum(1, keepdim=True)))


def entry_of(key: str) -> str | None:
    """What a key acts on, by its nearest entry."""
    parts = key.split(".")
    return next(
        (ACTS[name] for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in ACTS),
        None,
    )


def taken_by_place(key: str) -> bool:
    section, _, name = key.partition(".")
    return (
        key == "loss_fn"
        or section in IN_PLACE
        or (section == "training" and name in OF_TRAINING_IN_PLACE)
    )


def test_each_key_has_an_entry_and_each_entry_a_key() -> None:
    for key in LEAVES:
        known = entry_of(key) is not None or key in OBSERVED or key in NEEDS_ANOTHER
        assert known, f"{key}: show in OBSERVED that it acts, or say in ACTS on what"
    for section, names in LISTED.items():
        keys = [
            key
            for key, info in all_keys().items()
            if key.startswith(f"{section}.") and not info.is_section
        ]
        assert sorted(keys) == sorted(f"{section}.{name}" for name in names.split()), (
            f"list the keys of {section}"
        )
    for name in {*ACTS, *VALUES, *OBSERVED, *NEEDS_ANOTHER}:
        assert name in all_keys(), name


NEEDS_ANOTHER = {  # warned of wherever they stand alone
    "training.base_batch_size",
    "training.min_lr_ratio",
    "training.wsd_decay_ratio",
    "training.bad_numbers.window",
    "training.bad_numbers.patience",
    "training.gradient_checkpointing_every",
    "distributed.tensor_blocks",
    "distributed.context_blocks",
    "distributed.context_method",
    "checkpoint.keep_best_mode",
    "monitor.experiment",
    # … and these of one process, which no launcher has started.
    "distributed.backend",
    "distributed.init_method",
    "distributed.timeout_seconds",
    "distributed.open_axes",
    "distributed.sequence_parallel",
    "distributed.hang.factor",
    "distributed.hang.seconds",
    "monitor.straggler.threshold",
    "monitor.straggler.patience",
}
MEANS_NOTHING = {
    "steps": ("training.eval_steps", "training.eval_strategy"),
    "training_step": (
        "training.eval_steps",
        "training.eval_strategy",
        "training.num_train_epochs",
        "data.",
    ),
}
REFUSED = {"training_step": ("checkpoint.load_best",)}  # see test_no_effect.py
# Those of `save_checkpoint(path)` and `load_checkpoint(path)` act without a run directory, too.
WITHOUT_DIRECTORY = ("checkpoint.format", "checkpoint.retries", "checkpoint.allow_changes")
EACH = [key for key in LEAVES if asked(key) is not None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "key",
    [
        key if number % 36 == 0 else pytest.param(key, marks=pytest.mark.full)
        for number, key in enumerate(EACH)
    ],
)
def test_a_setting_acts_or_is_refused_or_warned_of(
    key: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = outcome(key, asked(key), way, tmp_path / "run" if way != "place" else None)
    if way == "place" and not taken_by_place(key):
        assert found == "error"
    elif key in NEEDS_ANOTHER or key.startswith(
        ("precision.loss_scale.", *MEANS_NOTHING.get(way, ()))
    ):
        assert found != "accepted"
    elif way != "place" and key.startswith(("checkpoint.", "monitor.profile")):
        without = outcome(key, asked(key), way, None)
        assert (without == "accepted") == (key in WITHOUT_DIRECTORY), (
            f"{key} without output_dir: {without}"
        )


SAVES = {"save_strategy": "steps", "save_steps": 2}
BEST = {"keep_best": "eval_loss", "keep_best_mode": "max"}  # not the last one
# Key → what it is set to beside others that both runs have. The run with it has to differ from the
# one without.
OBSERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "training.max_steps": ({"max_steps": 3}, {}),
    "training.num_train_epochs": ({"num_train_epochs": 2, "max_steps": None}, {}),
    "training.batch_size": ({"batch_size": 2}, {}),
    "training.gradient_accumulation_steps": ({"gradient_accumulation_steps": 2}, {}),
    "training.global_batch_size": ({"global_batch_size": 8}, {}),
    "training.eval_batches": ({"eval_batches": 1}, {"eval_batch_size": 2}),
    "training.eval_batch_size": ({"eval_batch_size": 3}, {"eval_batches": 1}),
    "training.eval_steps": ({"eval_steps": 1}, {}),
    "training.eval_strategy": ({"eval_strategy": "epoch", "eval_steps": None}, {}),
    "training.early_stopping": ({"early_stopping": {"patience": 1, "min_delta": 100.0}}, {}),
    "training.optimizer": ({"optimizer": "sgd"}, {}),
    "training.optimizer_args": ({"optimizer_args": {"betas": (0.5, 0.6)}}, {}),
    "training.learning_rate": ({"learning_rate": 0.2}, {}),
    "training.lr_schedule": ({"lr_schedule": "cosine"}, {}),
    "training.lr_scaling": ({"lr_scaling": "linear", "base_batch_size": 2}, {}),
    "training.base_batch_size": (
        {"base_batch_size": 1},
        {"lr_scaling": "linear", "base_batch_size": 2},
    ),
    "training.min_lr_ratio": ({"min_lr_ratio": 0.5}, {"lr_schedule": "linear"}),
    "training.wsd_decay_ratio": ({"wsd_decay_ratio": 0.9}, {"lr_schedule": "wsd"}),
    "training.warmup_steps": ({"warmup_steps": 2}, {}),
    "training.weight_decay": ({"weight_decay": 0.5}, {}),
    "training.gradient_clip.value": ({"gradient_clip": 0.01}, {}),
    "training.gradient_clip.strategy": (
        {"gradient_clip": {"strategy": "value", "value": 0.01}},
        {"gradient_clip": 0.01},
    ),
    "training.seed": ({"seed": 7}, {}),
    "data.shuffle": ({"shuffle": False}, {}),
    "data.order": ({"order": "keyed"}, {}),
    "data.drop_last": ({"drop_last": True}, {"max_steps": 5}),
    "precision.mode": ({"precision": "bf16"}, {}),
    "precision.loss_scale.initial_scale": (
        {"loss_scale": {"initial_scale": 4.0}},
        {"precision": "fp16"},
    ),
    "checkpoint.save_strategy": (SAVES, {}),
    "checkpoint.save_steps": ({"save_steps": 1}, SAVES),
    "checkpoint.save_total_limit": ({"save_total_limit": 1}, SAVES),
    "checkpoint.keep_best": (BEST, {"save_total_limit": 1, **SAVES}),
    "checkpoint.keep_best_mode": (BEST, {"save_total_limit": 1, "keep_best": "eval_loss", **SAVES}),
    "checkpoint.load_best": ({"load_best": True}, {**BEST, **SAVES}),
    "monitor.log_steps": ({"log_steps": 3}, {}),
    "monitor.sinks": ({"sinks": ["jsonl"]}, {}),
    "monitor.gradient_norms": ({"gradient_norms": True}, {}),
    "monitor.profile": ({"profile": {"wait": 0, "warmup": 1, "active": 1}}, {}),
    "monitor.memory.threshold": ({"memory": {"threshold": 0.001}}, {}),
    "monitor.callbacks": ({"callbacks": [lambda record: print("called", record.step)]}, {}),
}
TO_COMPARE = {
    "max_steps": 4,
    "batch_size": 4,
    "learning_rate": 0.1,
    "save_strategy": "none",
    "log_steps": 1,
}
OF_A_ROW = ("step", "loss", "lr", "grad_norm", "eval_loss", "gradient_norms", "loss_scale")
RANDOM_NAME = re.compile(r"\d{6,}\.[^/]*\.\d+\.\d+\.\d+|-[0-9a-f]{8}$")
TIMED = re.compile(r"\d[\d,.e-]* (samples/s|s/step)|\d+:\d\d left|\d+% of the memory")
OBSERVABLE = [
    (key, way)
    for key in OBSERVED
    for way in ("train", "steps", "training_step")
    if not key.startswith((*MEANS_NOTHING.get(way, ()), *REFUSED.get(way, ())))
]
_without: dict[str, Any] = {}  # way and settings → what comes out of a run without the key


def comes_out(settings: dict[str, Any], way: str, folder: Path) -> Any:
    """Weights, files, rows and lines of a run of a few steps, without what takes another time in
    each run.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    samples = torch.randn(18, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(samples, samples.sum(1, keepdim=True))
    evaluating = {"eval_steps": 2} if way == "train" else {}
    own = {**TO_COMPARE, "sinks": ["jsonl", "console"], **evaluating, **settings}
    said = io.StringIO()
    logger = logging.getLogger("lockstep")
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(said):
            trainer = Trainer(model, loss_fn=nn.MSELoss(), output_dir=folder, **own)
            run_and_evaluate(trainer, way, data)
            trainer._open.close()
    finally:
        logger.removeHandler(handler)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [
        {name: value for name, value in json.loads(line).items() if name in OF_A_ROW}
        for line in lines
    ]
    files = sorted(RANDOM_NAME.sub("", str(path.relative_to(folder))) for path in folder.rglob("*"))
    text = TIMED.sub("", said.getvalue()).replace(str(folder), "")
    return {
        "weights": [p.tolist() for p in model.parameters()],
        "files": files,
        "rows": rows,
        "lines": text,
    }


def run_and_evaluate(trainer: Trainer, way: str, data: TensorDataset) -> None:
    if way == "train":
        trainer.train(data, data)
    elif way == "steps":
        for _ in trainer.steps(data):
            trainer.evaluate(data)
    else:
        size = trainer.config.training.batch_size
        calls = 0
        while not trainer.done:
            trainer.training_step(data[calls % 8 : calls % 8 + size])
            calls += 1
            trainer.evaluate(data)


@pytest.mark.parametrize(
    ("key", "way"),
    [
        pair if number % 10 == 0 else pytest.param(*pair, marks=pytest.mark.full)
        for number, pair in enumerate(OBSERVABLE)
    ],
)
def test_a_setting_changes_what_comes_out_of_a_run(key: str, way: str, tmp_path: Path) -> None:
    setting, beside = OBSERVED[key]
    name = f"{way} {beside}"
    if name not in _without:
        _without[name] = comes_out(beside, way, tmp_path / "without")
    found = comes_out({**beside, **setting}, way, tmp_path / "with")
    without = _without[name]
    assert any(found[part] != without[part] for part in found), f"{setting} did nothing"


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "way", ["train", pytest.param("steps", marks=FULL), pytest.param("training_step", marks=FULL)]
)
def test_what_comes_out_of_a_run_is_the_same_twice(way: str, tmp_path: Path) -> None:
    """Or what is compared above would differ for any setting."""
    first = _without.get(f"{way} {{}}") or comes_out({}, way, tmp_path / "first")
    assert first == comes_out({}, way, tmp_path / "second")
