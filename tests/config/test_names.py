"""The table of foreign names: every target exists, every name of the five guides is answered."""

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.config.files import shipped_names
from lockstep.config.flags import apply_flags, keyword_for
from lockstep.config.keys import all_keys
from lockstep.config.names import (
    SECTIONS,
    SOURCES,
    advice_for,
    advice_for_flag,
    advice_for_keyword,
    advice_for_value,
    table,
)
from lockstep.errors import UsageError
from tests.config.shared import refusal
from tests.docs.commands import commands_in, parse

OPTIONS = (
    *(
        "--nproc-per-node",
        "--nnodes",
        "--node-rank",
        "--rdzv-endpoint",
        "--master-addr",
        "--master-port",
    ),
    *("--max-restarts", "--output-dir", "--resume"),
)


def test_every_target_exists() -> None:
    known = all_keys()
    for row in table():
        if row.is_key:
            parents = [
                ".".join(row.ours.split(".")[:end]) for end in range(1, row.ours.count(".") + 2)
            ]
            deepest = [key for key in parents if key in known][-1]
            assert deepest == row.ours or known[deepest].free, row
        elif row.kind in ("key", "flag"):
            assert row.ours in OPTIONS or (not row.ours and row.note), row
        else:
            assert row.ours or row.note, row


def test_every_keyword_that_is_advised_is_taken() -> None:
    """What another trainer's argument is called here is a keyword of `Trainer`."""
    for row in table():
        if not row.is_key or row.kind not in ("key", "flag"):
            continue
        advice = advice_for_keyword(row.theirs, keyword_for) or ""
        for keyword in re.findall(r"write (\w+)=", advice):
            key = next(iter(apply_flags({keyword: None})))
            assert row.ours.startswith(key) or " or " in advice, (row, advice)
    written = keyword_for("training.early_stopping.patience", "3")
    assert written == 'early_stopping={"patience": 3}'
    assert keyword_for("monitor.straggler.threshold", "2") == 'straggler={"threshold": 2}'
    with pytest.raises(UsageError, match="give it to the model, where you make it"):
        apply_flags({"num_hidden_layers": 2})


def test_every_python_name_exists() -> None:
    """`lockstep.X` and what it is called with; `trainer.X` is the Trainer's."""
    for row in table():
        for name in re.findall(r"lockstep\.(\w+)\(", row.ours) if row.kind == "python" else ():
            assert hasattr(lockstep, name), row
        for name in re.findall(r"trainer\.(\w+)", row.ours) if row.kind == "python" else ():
            assert hasattr(lockstep.Trainer, name), row


def test_every_command_is_read_and_every_template_ships(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    placeholders = {
        "CONFIG": "ready/bdh.yaml",
        "C": "ready/bdh.yaml",
        "my_config.yaml": "ready/bdh.yaml",
    }
    commands = [row.ours for row in table() if row.kind == "command"]
    for command in [*commands, *(row.ours for row in table() if row.ours.startswith("lockstep "))]:
        if command.startswith("-- extends"):
            assert command.split("'")[1] in shipped_names()
            continue
        [words] = commands_in(command)
        numbers = {"R": "0", "HOST": "10.0.0.1"}
        parse([{**placeholders, **numbers}.get(word, word) for word in words], monkeypatch)


def test_every_value_to_write_is_one_that_the_key_takes() -> None:
    for row in table():
        facts = all_keys().get(row.ours)
        if facts is not None and facts.choices and row.value and not row.value.startswith("["):
            assert row.value in facts.choices, row
        if row.kind == "value":
            assert facts is not None, row
            assert row.value, row


def test_no_foreign_name_is_one_of_ours_at_the_same_place() -> None:
    for row in table():
        if row.kind == "key":
            assert row.theirs not in all_keys(), row


def test_sections_and_sources() -> None:
    assert set(SECTIONS) == {key for key in all_keys() if "." not in key}
    assert {row.source for row in table()} == set(SOURCES)


# Every key of the configs in the five guides, and of the command lines there, that is not a key of
# ours as it stands.
GUIDES = {
    "per_device_train_batch_size": "training.batch_size",
    "per_device_eval_batch_size": "training.eval_batch_size",
    "output_dir": "--output-dir",
    "logging_steps": "monitor.log_steps",
    "torch_compile": "training.compile",
    "resume_from_checkpoint": "checkpoint.resume",
    "pipeline_chunks": "accumulation 4",
    "schedule_class": "distributed.pipeline.schedule",
    "checkpoint_sequential": "training.gradient_checkpointing: sequential",
    "pipeline_parallel_size": "distributed.pipeline_size",
    "data_parallel_size": "distributed.replicate_size",
    "accelerator_args.split_batches": "training.batch_size",
    "accelerator_args.dispatch_batches": "leave it out",
    "accelerator_args.mixed_precision": "precision.mode",
    "accelerator_args.backend": "distributed.backend",
    "accelerator_args.gradient_accumulation_plugin.num_steps": (
        "training.gradient_accumulation_steps"
    ),
    "accelerator_args.gradient_accumulation_plugin.adjust_scheduler": "leave it out",
    "accelerator_args.dataloader_config.even_batches": "leave it out",
    "accelerator_args.dataloader_config.use_seedable_sampler": "training.seed",
    "accelerator_args.dataloader_config.num_workers": "data.num_workers",
    "accelerator_args.dataloader_config.pin_memory": "data.pin_memory",
    "accelerator_args.dataloader_config.prefetch_factor": "data.prefetch_factor",
    "gpu_memory_threshold": "monitor.memory.threshold",
    "rank_filter": "leave it out",
    "distributed.use_fsdp": "distributed.strategy: fsdp",
    "distributed.fsdp_sharding_strategy": "distributed.fsdp.sharding_strategy",
    "distributed.fsdp_backward_prefetch": "distributed.fsdp.backward_prefetch",
    "distributed.fsdp_forward_prefetch": "distributed.fsdp.forward_prefetch",
    "distributed.fsdp_auto_wrap_policy": "distributed.fsdp.auto_wrap_policy",
    "distributed.fsdp_min_num_params": "distributed.fsdp.min_num_params",
    "distributed.fsdp_state_dict_type": "checkpoint.format",
    "distributed.fsdp_mixed_precision": "precision.mode: bf16",
    "distributed.fsdp_param_dtype": "precision.mode",
    "distributed.fsdp_reduce_dtype": "distributed.fsdp.reduce_dtype",
    "distributed.fsdp_buffer_dtype": "distributed.fsdp.buffer_dtype",
    "training.bf16": "precision.mode: bf16",
    "training.gradient_clip_norm": "training.gradient_clip",
    "use_dynamic_scaling": "precision.loss_scale.dynamic",
    "dynamic_history_size": "precision.loss_scale.history_size",
    "accumulation_steps": "training.gradient_accumulation_steps",
    "epochs": "training.num_train_epochs",
    "matrix_approximation_rank": "distributed.ddp.compression.rank",
    "hidden_dim": "model.args.n_embd",
    "latent_dim": "model.args.latent_bits",
}


@pytest.mark.parametrize(("theirs", "ours"), GUIDES.items())
def test_names_of_the_guides_are_answered(theirs: str, ours: str) -> None:
    assert ours in (advice_for(theirs) or "")


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--use_fsdp", "write distributed.strategy=fsdp"),
        ("--use-fsdp", "write distributed.strategy=fsdp"),
        ("--use_ddp", "write distributed.strategy=ddp"),
        ("--distributed", "--nproc-per-node"),
        ("--dataset_name=wikitext", "write data.name=VALUE"),
        ("--num_gpus", "--nproc-per-node"),
        ("--num_nodes", "--nnodes"),
        ("--num_processes", "--nproc-per-node"),
        ("--machine_rank", "--node-rank"),
        ("--main_process_ip", "--master-addr"),
        ("--per_device_train_batch_size", "write training.batch_size=VALUE"),
    ],
)
def test_trap_38_foreign_flags_are_answered_with_dashes_and_underscores(
    flag: str, ours: str
) -> None:
    """`--local-rank` and `--local_rank` are both in use, as is every other flag."""
    assert ours in (advice_for_flag(flag) or "")
    assert "leave it out" in (advice_for_flag("--local_rank") or "")
    assert advice_for_flag("--local-rank") == advice_for_flag("--local_rank")


def test_values_of_the_guides_are_answered() -> None:
    assert advice_for_value("checkpoint.format", "sharded_state_dict") == "write sharded"
    assert advice_for_value("distributed.fsdp.backward_prefetch", "BACKWARD_PRE") == "write pre"
    assert (
        advice_for_value("distributed.fsdp.auto_wrap_policy", "transformer_auto_wrap")
        == "write transformer"
    )
    assert advice_for_value("training.gradient_checkpointing", True) == "write full"
    assert advice_for_value("precision.mode", "bfloat16") == "write bf16"
    assert advice_for_value("precision.mode", "purple") is None


def test_the_longest_match_speaks() -> None:
    num_steps = advice_for("accelerator_args.gradient_accumulation_plugin.num_steps")
    assert num_steps == "write training.gradient_accumulation_steps"
    assert advice_for("num_steps") == "write training.max_steps"
    assert advice_for("unheard_of") is None


def test_trap_41_options_of_accelerates_loader_are_sent_to_the_loader(tmp_path: Path) -> None:
    """`dispatch_batches` belongs to Accelerate's DataLoaderConfiguration, `num_workers` to the
    loader.
    """
    message = refusal(
        tmp_path,
        "distributed:\n  accelerate:\n    dataloader_config:\n      num_workers: 4\n     "
        " split_batches: false\n",
    )
    assert (
        "run.yaml:4: unknown key distributed.accelerate.dataloader_config.num_workers; write"
        " data.num_workers" in message
    )
    assert "run.yaml:5" in message
