"""Advice that a program can follow is followed: keys are in the schema, flags and commands are
parsed, names exist.
"""

import contextlib
import functools
import io
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from torch import nn
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.utils.data import TensorDataset

import lockstep
from docs.hooks.command_line import help_of
from lockstep.cli import main
from lockstep.cli.verbs import VERBS
from lockstep.config import Config, load_config
from lockstep.config.keys import all_keys
from lockstep.errors import UsageError
from lockstep.launch import spawn
from lockstep.submit import SCHEDULERS
from tests.advice import HOLE, Advice, all_advice
from tests.docs.commands import commands_in, parse

# What is said of other programs: `torchrun`, `accelerate launch`, `sbatch`, `pip`.
OTHERS_FLAGS = {"--shm-size", "--ipc", "--multi_gpu", "--num_processes"}
STAND_INS = {
    "CONFIG": "c.yaml",
    "FILE": "c.yaml",
    "SCRIPT.py": "s.py",
    "SCRIPT": "s.py",
    "PATH": ".",
    "RUN": ".",
    "DIR": "new",
    "SOURCE": "python-docs",
    "NAME": "mine",
    "N": "2",
    "STORAGE": ".",
    "KEY=VALUE": "training.seed=1",
    "OUT": "out",
    HOLE: "c.yaml",
}
OPTIONAL = re.compile(r"\[[^\]]*\]")


@functools.cache
def flags() -> set[str]:
    """The options of all verbs, as their help shows them."""
    verbs = [(verb,) for verb in VERBS]
    verbs += [("submit", scheduler) for scheduler in SCHEDULERS]
    return set(re.findall(r"--[a-z][a-z-]+", "\n".join(map(help_of, verbs))))


def test_keys_that_advice_names_are_keys() -> None:
    known = all_keys()
    free = tuple(f"{name}." for name, info in known.items() if info.free)
    wrong = [
        f"{one}: {key}"
        for one in all_advice()
        for key in one.keys
        if key not in known and not key.startswith(free) and not is_in_python(key, one)
    ]
    assert not wrong, "\n".join(wrong)


def is_in_python(key: str, advice: Advice) -> bool:
    """Whether it is an attribute of Python's (`model.parameters`, `data.Dataset`) and no key."""
    written = (f"{key}(", f"torch.utils.{key}", f"{key}.NAME", f"{key} = ", f"{key}.parameters(")
    return any(text in advice.text for text in written)


def test_values_that_advice_writes_are_values_of_their_keys() -> None:
    wrong = [
        f"{one}: {key}: {value}"
        for one in all_advice()
        for key, value in one.pairs
        if not is_value(key, value)
    ]
    assert not wrong, "\n".join(wrong)


def is_value(key: str, value: str) -> bool:
    """Whether the schema takes a value under a key of this name; the key may be short."""
    if value in ("NAME", "N", "VALUE", "package.module"):
        return True
    for full in (name for name in all_keys() if name == key or name.endswith(f".{key}")):
        tree: object = yaml.safe_load(value)
        for part in reversed(full.split(".")):
            tree = {part: tree}
        with suppress(ValidationError):
            Config.model_validate(tree)
            return True
    return False


def test_flags_that_advice_names_are_options() -> None:
    wrong = [
        f"{one}: {flag}"
        for one in all_advice()
        for flag in one.flags
        if flag not in flags() | OTHERS_FLAGS
    ]
    assert not wrong, "\n".join(wrong)


def test_names_of_python_that_advice_writes_exist() -> None:
    wrong = [f"{one}: {name}" for one in all_advice() for name in one.names if not exists(name)]
    assert not wrong, "\n".join(wrong)


def exists(name: str) -> bool:
    from lockstep.trainer import Trainer

    root, *rest = name.split(".")
    if root == "transformers":
        pytest.importorskip("transformers")
    if root == "trainer":
        return hasattr(Trainer, rest[0]) or rest[0] in Trainer.__init__.__code__.co_names
    place: object = import_module({"nn": "torch.nn", "F": "torch.nn.functional"}.get(root, root))
    for at, part in enumerate(rest):
        if not hasattr(place, part):
            try:
                place = import_module(".".join([root, *rest[: at + 1]]))
            except ImportError:
                return False
        else:
            place = getattr(place, part)
    return True


def is_mention(words: list[str]) -> bool:
    """Whether only a verb is named, or a flag without a value: `lockstep plan`, `lockstep train
    --output-dir`.
    """
    assert words[1] in VERBS or words[1].startswith("--")
    plain = [word for word in words[2:] if not word.startswith("--")]
    return words[-1].startswith("--") or len(plain) < (
        2 if words[1] in ("checkpoint", "data", "config") else 1
    )


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: {name: transformer}\ndata: {name: python-docs}\ndistributed: {strategy: pipeline}\n"
    )
    (tmp_path / "s.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lockstep"])


@pytest.mark.usefixtures("beside")
def test_commands_that_advice_writes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = []
    for one in all_advice():
        for command in one.commands:
            words = OPTIONAL.sub("", command).split()
            words = [STAND_INS.get(word, word.replace(HOLE, "c.yaml")) for word in words]
            words = [word.replace("new", f"new-{one.line}") for word in words]
            if is_mention(words):
                continue
            try:
                for found in commands_in(" ".join(words)):
                    parse(found, monkeypatch)
            except Exception as error:
                wrong.append(f"{one}: {' '.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


def advised(mistake: Callable[[], object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(UsageError) as raised:
        mistake()
    return str(raised.value.fix)


def test_one_value_for_a_list_is_told_as_a_list(tmp_path: Path) -> None:
    key = "monitor.sinks"
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: transformer}\ndata: {name: python-docs}\n")
    assert advised(lambda: load_config(path, [f"{key}=wandbb"])) == "write [wandb]"
    assert load_config(path, [f"{key}=[wandb]"])
    assert advised(lambda: Config().replaced({key: "wandb"})) == 'write ["wandb"]'


@pytest.mark.parametrize("sizes", [(65, 4), (3, 4), (100, 16)])
def test_sizes_that_are_told_can_be_built(sizes: tuple[int, int]) -> None:
    n_embd, n_head = sizes
    build = lockstep.get_model("transformer")
    fix = advised(
        lambda: build(n_embd=n_embd, n_head=n_head, vocab_size=8, block_size=8, n_layer=1)
    )
    numbers = re.search(r"set model\.args\.n_embd to (\d+)(?: or (\d+))?, or change n_head", fix)
    assert numbers is not None, fix
    for number in filter(None, numbers.groups()):
        build(n_embd=int(number), n_head=n_head, vocab_size=8, block_size=8, n_layer=1)


def trainer(model: nn.Module, **more: object) -> Any:
    return lockstep.Trainer(model, loss_fn=nn.MSELoss(), batch_size=4, max_steps=1, **more)  # type: ignore[arg-type]


def test_a_file_of_weights_is_told_what_makes_a_checkpoint_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Linear(4, 1).state_dict(), "my weights.pt")
    fix = advised(lambda: trainer(nn.Linear(4, 1)).load_checkpoint("my weights.pt"))
    assert "model.load_state_dict(torch.load('my weights.pt'))" in fix
    (command,) = re.findall(r"`(lockstep [^`]+)`", fix)
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(shlex.split(command)[1:]) == 0
    trainer(nn.Linear(4, 1)).load_checkpoint("imported")


def test_another_model_in_an_old_folder_is_told_how_to_begin_anew(tmp_path: Path) -> None:
    data = TensorDataset(torch.ones(4, 4), torch.ones(4, 1))
    quiet = {"output_dir": tmp_path / "old", "sinks": ["jsonl"]}
    trainer(nn.Linear(4, 1), **quiet).train(data)
    other = nn.Sequential(nn.Linear(4, 1))
    fix = advised(lambda: trainer(other, **quiet).train(data))
    assert "--resume never (in Python resume='never')" in fix
    assert trainer(nn.Sequential(nn.Linear(4, 1)), **quiet, resume="never").train(data).step == 1


def test_ranks_of_an_environment_are_told_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    fix = advised(lambda: spawn._check_environment(2, 1, 0))
    assert "spawn(…, nprocs=2, nnodes=2, node_rank=1, master_addr='10.0.0.1')" in fix
    spawn._check_environment(2, 2, 1)


def test_policies_of_torchs_fsdp_are_told_by_name() -> None:
    class Decoder(nn.Linear):
        """A block."""

    policies = {
        ModuleWrapPolicy({Decoder}): 'auto_wrap_policy: ["Decoder"]',
        functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Decoder}
        ): '["Decoder"]',
        functools.partial(
            size_based_auto_wrap_policy, min_num_params=1000
        ): "size, and min_num_params: 1000",
    }
    for policy, name in policies.items():
        given = {"auto_wrap_policy": policy}
        assert name in advised(
            lambda given=given: trainer(nn.Linear(4, 1), strategy="fsdp", fsdp=given)
        )  # type: ignore[misc]
