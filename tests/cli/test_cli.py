"""The command's surface: what it takes, what it says, how it ends."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lockstep.launch.refusals
import lockstep.launch.roles
import lockstep.launch.train
from lockstep import cli
from lockstep.cli.projects import CONFIG_VERBS
from lockstep.cli.weights import CHECKPOINT_VERBS
from lockstep.config import load_config
from lockstep.config.files import shipped_names
from lockstep.launch.options import LaunchOptions
from tests.forked import Forked
from tests.launch.shared import environment, finish

VERBS = {"train", "launch", "config", "checkpoint", "data"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `lockstep train` would have started."""
    calls: list[dict[str, Any]] = []

    def train(path: Path, overrides: list[str], options: LaunchOptions, **more: Any) -> int:
        calls.append({"path": path, "overrides": overrides, "options": options, **more})
        return 0

    monkeypatch.setattr(lockstep.launch.train, "train", train)
    return calls


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """The message of a command that is wrong: exit code 2, one message, no traceback."""

    def run(*argv: str) -> str:
        assert cli.main(argv) == 2
        out, err = capsys.readouterr()
        assert err.startswith("lockstep: ")
        assert err.count("lockstep: ") == 1
        assert "Traceback" not in err
        assert out == ""
        return err

    return run


# ---- help ----


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["launch", "--help"]])
def test_help_starts_at_once(argv: list[str]) -> None:
    """Without torch, and without the schema and what it needs; in less than 0.3 s of a fresh
    process's own time.
    """
    heavy = ("torch", "pydantic", "yaml", "rich", "jinja2", "numpy")
    code = (
        "import sys, time, resource, contextlib\nfrom lockstep.cli import main\nwith"
        f" contextlib.suppress(SystemExit): main({argv})\nused ="
        " resource.getrusage(resource.RUSAGE_SELF)\nimport json; print(json.dumps([[n for n in"
        f" {heavy} if n in sys.modules], used.ru_utime + used.ru_stime]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    loaded, seconds = json.loads(ended.stdout.splitlines()[-1])
    assert loaded == []
    assert seconds < 0.3


def test_help_names_the_verbs_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == cli.main([]) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert f"  {verb} " in text
    assert "75 preempted and saved" in " ".join(text.split())
    assert set(cli.VERBS) >= VERBS


def test_every_verb_that_is_listed_works(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        with pytest.raises(SystemExit) as ended:
            cli.main([verb, "--help"])
        assert ended.value.code == 0
        assert f"usage: lockstep {verb}" in capsys.readouterr().out


def test_help_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for argv in ([], *([verb, "--help"] for verb in cli.VERBS)):
        with contextlib.suppress(SystemExit):
            cli.main(argv)
        wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
        assert wide == [], argv


def test_each_verb_has_an_example_and_each_subverb_its_own_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def text_of(*argv: str) -> str:
        with pytest.raises(SystemExit):
            cli.main([*argv, "--help"])
        return capsys.readouterr().out

    for verb in cli.VERBS:
        assert re.search(rf"examples?:\n  .*lockstep {verb} ", text_of(verb)), verb
    for verb, subverbs in (("config", CONFIG_VERBS), ("checkpoint", CHECKPOINT_VERBS)):
        for name, (what, _) in subverbs.items():
            assert f"  {name} " in text_of(verb)
            assert f"usage: lockstep {verb} {name} [-h]" in text_of(verb, name)
            assert what in " ".join(text_of(verb, name).split())
    assert "--prefix" not in text_of("checkpoint", "digest")
    assert "--prefix" in text_of("checkpoint", "import")


def test_the_surface_of_train_is_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    """Names that people type into scripts stay."""
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    launcher = (
        "nproc-per-node",
        "nnodes",
        "node-rank",
        "rdzv-endpoint",
        "master-addr",
        "master-port",
        "max-restarts",
    )
    keys = (
        "strategy",
        "batch-size",
        "gradient-accumulation-steps",
        "grad-clip",
        "precision",
        "compile",
        "max-steps",
    )
    for flag in ("config", "output-dir", "resume", "learning-rate", "seed", *keys, *launcher):
        assert f"--{flag}" in text


# ---- what is taken ----


def test_config_overrides_and_options_in_any_order(started: list[dict[str, Any]]) -> None:
    argv = [
        "a.b=3",
        "--nproc_per_node",
        "2",
        "runs/a.yaml",
        "--max-restarts=1",
        "data.args.x=1",
        "--resume",
        "never",
    ]
    assert cli.main(["train", *argv]) == 0
    (call,) = started
    assert call["path"] == Path("runs/a.yaml")
    assert call["overrides"] == ["a.b=3", "data.args.x=1"]
    assert call["options"] == LaunchOptions(nproc_per_node="2", max_restarts=1)
    assert call["resume"] == "never"
    assert call["output_dir"] == Path("runs/a")
    assert call["argv"] == argv, "workers get the same arguments"


def test_config_as_an_option(started: list[dict[str, Any]]) -> None:
    assert cli.main(["train", "--config", "a.yaml", "--output_dir=my_runs/x", "x.y=1"]) == 0
    assert started[0]["path"] == Path("a.yaml")
    assert started[0]["output_dir"] == Path("my_runs/x"), "underscores in a value stay"
    assert started[0]["overrides"] == ["x.y=1"]


def test_short_names_are_keys(started: list[dict[str, Any]]) -> None:
    flags = (
        "--strategy fsdp --batch_size 4 --gradient-accumulation-steps 2 --grad-clip 0 --precision"
        " bf16 --compile"
    )
    assert (
        cli.main(
            [
                "train",
                "a.yaml",
                *flags.split(),
                "--max-steps=7",
                "--learning_rate",
                "2e-4",
                "--seed",
                "3",
            ]
        )
        == 0
    )
    assert sorted(started[0]["overrides"]) == [
        "distributed.strategy=fsdp",
        "precision.mode=bf16",
        "training.batch_size=4",
        "training.compile=true",
        "training.gradient_accumulation_steps=2",
        "training.gradient_clip=0",
        "training.learning_rate=2e-4",
        "training.max_steps=7",
        "training.seed=3",
    ]


def test_short_names_reach_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    (tmp_path / "a.yaml").write_text("model: {name: bdh}\ndata: {name: python-docs}\n")
    assert (
        cli.main(
            [
                "config",
                "show",
                str(tmp_path / "a.yaml"),
                "--grad_clip",
                "0",
                "--compile",
                "--max-steps",
                "7",
            ]
        )
        == 0
    )
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["training"]["gradient_clip"]["strategy"] == "none"
    assert shown["training"]["compile"] is True
    assert shown["training"]["max_steps"] == 7


@pytest.mark.parametrize(
    "spelled",
    [["--local-rank=1"], ["--local_rank=1"], ["--local-rank", "1"], ["--local_rank", "1"]],
)
def test_trap_38_both_spellings_of_local_rank_are_taken_and_ignored(
    started: list[dict[str, Any]], spelled: list[str]
) -> None:
    """The legacy launcher adds it, in front of the verb; scripts of old pass it on. The environment
    decides.
    """
    assert cli.main([*spelled, "train", "a.yaml"]) == 0
    assert cli.main(["train", *spelled, "a.yaml"]) == 0
    assert [call["path"] for call in started] == [Path("a.yaml")] * 2


def test_trap_38_under_the_legacy_launcher(tmp_path: Path) -> None:
    """`python -m torch.distributed.launch -m lockstep train CONFIG` starts `lockstep --local-rank=0
    train CONFIG`.
    """
    process = Forked(
        [
            sys.executable,
            "-m",
            "torch.distributed.launch",
            "--nproc-per-node",
            "1",
            "--master-port",
            "0",
            "-m",
            "lockstep",
            "train",
            "nothing.yaml",
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ended = finish(process, tmp_path)
    assert "lockstep: there is no file nothing.yaml" in ended.err, ended.err


# ---- what is refused ----


def test_accumulation_that_contradicts_a_ready_config_is_refused_before_ranks_start(
    refused: Refused, tmp_path: Path
) -> None:
    """It was ignored where the config has a global_batch_size, as every ready config has."""
    flags = ("--gradient_accumulation_steps", "4", "--output-dir", str(tmp_path / "run"))
    argv = ("train", "ready/vae.yaml", "training.num_train_epochs=1", *flags)
    for ranks, product in ((1, 64), (4, 256)):
        message = refused(
            *argv, "--nproc-per-node", str(ranks), *(() if ranks == 1 else ("--strategy", "ddp"))
        )
        equation = (
            f"batch_size 16 × gradient_accumulation_steps 4 × data-parallel size {ranks} ="
            f" {product}"
        )
        assert f"{equation}, and global_batch_size is 128" in message
        assert f"training.global_batch_size={product}" in message
    assert not (tmp_path / "run").exists()


def test_config_check_resolves_what_the_config_names(refused: Refused, tmp_path: Path) -> None:
    """All of it at once, without training: a run would fail at the first."""
    (tmp_path / "a.yaml").write_text("""
model: {name: transformer, args: {hidden_dim: 16}}
data: {name: python-docs, args: {block_sizes: 4}}
loss_fn: {name: "torch.nn:CrossEntropyLoss", args: {reductions: sum}}
training: {optimizer_args: {epsilon: 1.0e-8}}
distributed: {fsdp: {auto_wrap_policy: "lockstep:no_such_policy"}}
monitor:
  callbacks:
    - {name: "forgather.ml.tb_logger:TBLogger"}
    - {name: "lockstep.monitor:JsonLogger", args: {paths: x.jsonl}}
    - {name: "lockstep:Config"}
""")
    message = refused("config", "check", str(tmp_path / "a.yaml"))
    assert "has 8 mistakes" in message
    for words in (
        "the model transformer takes no argument 'hidden_dim'; write n_embd",
        "python-docs takes no argument 'block_sizes'; did you mean 'block_size'?",
        "torch.nn:CrossEntropyLoss takes no argument 'reductions'; did you mean 'reduction'?",
        "the optimizer adamw takes no argument 'epsilon'; did you mean 'eps'?",
        "distributed.fsdp.auto_wrap_policy: lockstep has no no_such_policy",
        (
            "there is no module 'forgather', needed by forgather.ml.tb_logger:TBLogger; write"
            " monitor.sinks: [tensorboard]"
        ),
        "JsonLogger takes no argument 'paths'; did you mean 'path'?",
        "objects of lockstep:Config can't be called",
    ):
        assert words in message, message


@pytest.mark.parametrize("name", [name for name in shipped_names() if name.startswith("ready/")])
def test_a_ready_config_can_be_tried_for_two_steps(name: str) -> None:
    """Its warm-up may be longer, and it may count epochs."""
    config = load_config(name, ["training.max_steps=2"])
    assert (config.training.max_steps, config.training.num_train_epochs) == (2, None)


def test_foreign_flags_are_answered_with_ours(refused: Refused) -> None:
    message = refused("train", "a.yaml", "--use_fsdp")
    assert "there is no argument --use_fsdp" in message
    assert "write distributed.strategy=fsdp" in message
    multinode = (
        "--num_nodes 2 --node_rank 0 --num_gpus 4 --master_addr 10.0.0.1 --config config.yaml"
    )
    message = refused("train", *multinode.split())
    assert "there is no argument --num_nodes, --num_gpus\n" in message
    assert "for --num_nodes, write --nnodes; for --num_gpus, write --nproc-per-node" in message


def test_misspelt_flags_are_answered_with_the_nearest(refused: Refused) -> None:
    assert "write --nproc-per-node" in refused("train", "a.yaml", "--nprocs-per-node=2")
    for far in ("--qwertyuiop", "--tpu", "--autotuning"):
        assert "`lockstep train --help`" in refused("train", "a.yaml", far)


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("accelerate launch --multi_gpu --num_machines 2", "--nproc-per-node; --nnodes"),
        ("accelerate launch --config_file x.yaml", "there is no file of launch options"),
        (
            "accelerate launch --use_deepspeed --zero_stage 3",
            "=fsdp; distributed.fsdp.sharding_strategy",
        ),
        ("accelerate launch --gpu_ids 0,1", "set CUDA_VISIBLE_DEVICES"),
        ("deepspeed --num_nodes=2 --hostfile hosts", "--rdzv-endpoint HOST:PORT; --nnodes"),
        ("deepspeed --deepspeed_config ds.json", "distributed.strategy=fsdp"),
        ("deepspeed --include localhost:0", "set CUDA_VISIBLE_DEVICES"),
    ],
)
def test_flags_of_other_launchers_are_answered_with_ours(
    refused: Refused, typed: str, ours: str
) -> None:
    flags = [word for word in typed.split() if word not in ("accelerate", "launch", "deepspeed")]
    message = refused("launch", *flags, "train.py")
    for word in ours.split("; "):
        assert word in message, message


def test_a_script_sets_keys_itself(refused: Refused) -> None:
    assert "Trainer(model, precision='bf16')" in refused("launch", "--use_fsdp", "train.py")
    assert "Trainer(" not in refused("launch", "--num_gpus", "2", "train.py")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], ["no verb 'trian'; did you mean 'train'?"]),
        (["train"], ["no config is given"]),
        (["train", "a.yaml", "b.yaml"], ["one config", "a.yaml, b.yaml"]),
        (["train", "a.yaml", "--config", "b.yaml"], ["one config"]),
        (["train", "nothing.yaml"], ["no file nothing.yaml"]),
        (["train", "a.yaml", "--nproc-per-node", "0"], ["--nproc-per-node 0"]),
        (["train", "a.yaml", "--max-restarts", "x"], ["--max-restarts", "'x'"]),
        (["launch"], ["no script is given"]),
        (["launch", "nothing.py"], ["no file nothing.py"]),
        (["launch", "--use_fsdp", "a.py"], ["--use_fsdp", "distributed.strategy=fsdp"]),
        (["config", "sow"], ["'sow'", "show"]),
        (["config", "check", "a.yaml", "--schedule"], ["a schedule is drawn by `show`"]),
        (
            ["plan", "--params", "7e9", "--batch-size", "many"],
            ["--batch-size many is not a whole number"],
        ),
        (["plan", "a.yaml", "--params", "7e9"], ["--params plans without a config", "a.yaml"]),
        (
            ["submit", "slurm", "ready/transformer.yaml", "--nproc-per-node", "two"],
            ["--nproc-per-node two is not"],
        ),
        (
            ["submit", "slurm", "ready/transformer.yaml", "--gpus-per-node", "0"],
            ["the number of ranks per machine is missing"],
        ),
        (
            [
                "submit",
                "kubernetes",
                "ready/transformer.yaml",
                "--nproc-per-node",
                "2",
                "--image",
                "i",
                "--claim",
                "runs",
                "--request",
                "cpu",
            ],
            ["--request cpu is not NAME=VALUE"],
        ),
        (["checkpoint", "digest", "nowhere"], ["nowhere"]),
        (["checkpoint", "digst", "nowhere"], ["did you mean 'digest'?"]),
        (["data"], ["verb"]),
    ],
)
def test_mistakes_are_one_message_and_2(
    argv: list[str], words: list[str], refused: Refused
) -> None:
    message = refused(*argv)
    for word in words:
        assert word in message


def test_a_folder_that_can_not_be_made_is_one_message(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "file").touch()
    run = tmp_path / "file" / "run"
    message = refused(
        "submit",
        "slurm",
        "ready/transformer.yaml",
        "--nproc-per-node",
        "2",
        "--output-dir",
        str(run),
    )
    assert f"{run} can't be read or written" in message
    assert "Not a directory" in message


def test_the_traceback_is_there_for_who_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "1")
    assert cli.main(["train", "nothing.yaml"]) == 2
    assert "Traceback" in capsys.readouterr().err


def nothing_is_started(*_given: Any, **_more: Any) -> None:
    raise AssertionError("a process is started")


def test_a_wrong_config_is_refused_before_any_process_is_started(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("training:\n  max_step: 3\n")
    monkeypatch.setattr(subprocess.Popen, "__init__", nothing_is_started)
    monkeypatch.setattr(os, "fork", nothing_is_started)
    message = refused(
        "train", str(config), "--nproc-per-node", "64", "--output-dir", str(tmp_path / "run")
    )
    assert "max_step" in message
    assert "max_steps" in message
    assert f"{config}:2" in message or "line 2" in message
    assert not (tmp_path / "run").exists()


WRONG_TOGETHER = {
    "fp16 compression with fsdp": (
        "ddp: {compression: {kind: fp16}}, strategy: fsdp",
        2,
        "reduce_dtype: fp16",
    ),
    "PowerSGD with accelerate": (
        "ddp: {compression: {kind: powersgd}}, strategy: accelerate",
        2,
        "strategy: ddp",
    ),
    "cpu_offload on the CPU": (
        "fsdp: {cpu_offload: true}, strategy: fsdp, device: cpu",
        2,
        "cpu_offload: false",
    ),
    "cpu_offload where there is no GPU": (
        "fsdp: {cpu_offload: true}, strategy: fsdp",
        2,
        "cpu_offload: false",
    ),
    "hybrid_shard that does not divide": (
        "fsdp: {sharding_strategy: hybrid_shard}, strategy: fsdp",
        3,
        "use an even number of ranks, or full_shard",
    ),
    "shards that do not multiply out": (
        "strategy: fsdp, replicate_size: 2, shard_size: 2",
        6,
        "start 4 ranks",
    ),
    "dp with several processes": ("strategy: dp", 2, "set distributed.strategy to ddp or fsdp"),
    "single with several processes": ("strategy: single", 2, "or start one process"),
}


@pytest.mark.parametrize("case", WRONG_TOGETHER)
def test_what_does_not_go_together_is_refused_before_any_process_is_started(
    case: str, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with what to write instead."""
    monkeypatch.setattr(
        lockstep.launch.train, "launch", lambda *_: pytest.fail("processes were started")
    )
    monkeypatch.setattr(lockstep.launch.refusals, "count_gpus", lambda: 0)
    distributed, ranks, instead = WRONG_TOGETHER[case]
    config = tmp_path / "a.yaml"
    config.write_text(f"extends: ready/transformer.yaml\ndistributed: {{{distributed}}}\n")
    run = tmp_path / "run"
    assert instead in refused(
        "train", str(config), "--nproc-per-node", str(ranks), "--output-dir", str(run)
    )
    assert not run.exists()


def test_launch_inside_a_launcher_is_refused(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "itself started by a launcher" in refused("launch", str(tmp_path / "a.py"))


def test_srun_starts_ranks_or_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun lockstep train CONFIG` is a rank; one that is told how many ranks its machine has is a
    launcher.
    """
    is_rank = lockstep.launch.roles.is_rank
    two_nodes = LaunchOptions(nproc_per_node="8", nnodes="2", rdzv_endpoint="first:29500")
    assert not is_rank(LaunchOptions())
    for name, value in {
        "PROCID": "1",
        "NTASKS": "2",
        "LOCALID": "0",
        "STEP_ID": "0",
        "NODEID": "1",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert is_rank(LaunchOptions())
    assert not is_rank(two_nodes)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert is_rank(two_nodes), "a rank that such a launcher has started"


def test_a_pipe_that_closes_early_is_no_error() -> None:
    """`lockstep … | head -1`."""
    command = [sys.executable, "-m", "lockstep", "config", "schema"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("words", "every", "arguments"),
    [
        (["--watch-training", "train.py", "--lr", "3"], 100, ["--lr", "3"]),
        (["--watch_training", "train.py"], 100, []),
        (["--watch-training", "7", "train.py", "5"], 7, ["5"]),
        (["--watch-training=7", "train.py"], 7, []),
        (["--watch-training", "--nproc-per-node", "1", "train.py"], 100, []),
    ],
)
def test_a_flag_whose_value_may_be_left_out_goes_before_a_script(
    words: list[str], every: int, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("lockstep.verify.watch.inject", lambda **variables: seen.append(variables))
    monkeypatch.setattr(
        lockstep.launch.train, "launch_script", lambda *given, **_rest: seen.append(given[:2]) or 0
    )
    assert cli.main(["launch", *words]) == 0
    assert seen == [{"LOCKSTEP_WATCHED_TRAINING": str(every)}, ("train.py", arguments)]
