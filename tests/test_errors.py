"""Every error that a user may meet: how it is built, and what provokes it. `python -m tests.errors`
lists them.
"""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import Config, load_config
from lockstep.config.schema_distributed import DistributedConfig
from lockstep.errors import LockstepError, UsageError, first_line, lost_a_peer
from lockstep.parallel.axes.axis import Axis, axes_named
from lockstep.parallel.site import Site
from lockstep.strategy import resolve
from tests.errors import with_tests
from tests.ranks import REPOSITORY

# What says all of it by itself, or is worded where it is found out.
WHAT_IS_ENOUGH = (
    "has … mistakes",  # each is told below it, with what to do
    "the launcher failed:",
    "and … : … cut at the same place",
    "",  # its text comes from elsewhere, with the rest
)
# "--master-port 0 is not a port"
REQUIREMENT = ("is not", "is no", "is neither", "is below", "needs", "is outside")
# say what is wanted in the message
ONLY_A_LAUNCH = ("lockstep/launch/", "lockstep/process_group/collectives.py", "lockstep/submit/")

# Of all errors, those that no test provokes by words of ten letters: on a GPU, on a machine or
# storage that fails, in a process of another's. `python -m tests.errors --untested` lists them, and
# those worded elsewhere, which do not count; the number is to go down.
NOT_PROVOKED = 72


def test_each_error_says_why_or_what_to_do() -> None:
    poor = [
        f"{site.file}:{site.line} {site.message}"
        for site in with_tests()
        if not site.parts & {"why", "fix", "**", "rolls_back"}
        and site.message not in WHAT_IS_ENOUGH
        and not (
            site.file.startswith(ONLY_A_LAUNCH)
            and any(word in site.message for word in REQUIREMENT)
        )
    ]
    assert not poor, "\n".join(poor)


def test_nearly_each_error_is_provoked_by_a_test() -> None:
    left = [
        f"{site.file}:{site.line} {site.message}"
        for site in with_tests()
        if site.pieces and not site.tests
    ]
    assert len(left) <= NOT_PROVOKED, "\n".join(left)


# ---- provoked here: (what it says, what provokes it, in an empty folder) ----


def config(text: str, *overrides: str) -> Callable[[], Any]:
    def load() -> Any:
        Path("c.yaml").write_text(text)
        return load_config("c.yaml", overrides)

    return load


def raw(content: bytes) -> Callable[[], Any]:
    def load() -> Any:
        Path("c.yaml").write_bytes(content)
        return load_config("c.yaml")

    return load


def named_step() -> Any:
    from lockstep.checkpoint.storage import step_name

    return step_name(-1)


def spawned(*args: Any) -> Callable[[], Any]:
    def run() -> Any:
        from lockstep import spawn

        return spawn(print, *args)

    return run


def average() -> Any:
    from lockstep import WeightAverage

    return WeightAverage(decay=2.0)


def loss_with_arguments() -> Any:
    from lockstep.config import config_from
    from lockstep.trainer.named_loss import loss_fn_of

    return loss_fn_of(
        config_from(
            {"loss_fn": {"name": "tests.test_errors:squares", "args": {"reduction": "sum"}}}
        )
    )


def squares(outputs: Any, targets: Any) -> Any:
    """A function that is none of torch's: those with arguments are taken for the class that does
    the same.
    """
    return (outputs - targets).square().mean()


def five() -> int:
    return 5


class SecondTensorAxis(Axis):
    name = "tensor"

    @classmethod
    def apply(cls, site: Site) -> None:
        """Stand beside no strategy."""


def named_like_another() -> Any:
    return list(axes_named(["tests.test_errors:SecondTensorAxis"]))


def size_without_an_axis() -> Any:
    return resolve(DistributedConfig(strategy="fsdp", pipeline_size=2), 2)


def with_closure() -> Any:
    from lockstep.optim import check_no_closure

    return check_no_closure(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))


def logged(value: Any) -> Callable[[], Any]:
    def log() -> Any:
        from lockstep.monitor.media import sorted_values

        return sorted_values({"seen": value})

    return log


def balanced() -> Any:
    from types import SimpleNamespace

    from lockstep.models.hf_decoder import refuse_balanced_experts

    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(output_router_logits=True)  # type: ignore[assignment]
    return refuse_balanced_experts(model)


def data(name: str, **args: Any) -> Callable[[], Any]:
    def build() -> Any:
        from lockstep.data import build_data

        return build_data(Config(data={"name": name, "args": args}).data, seed=0)  # type: ignore[arg-type]

    return build


def model(name: str, **args: Any) -> Callable[[], Any]:
    def build() -> Any:
        from lockstep.models import build_model

        return build_model(Config(model={"name": name, "args": args}).model, {})  # type: ignore[arg-type]

    return build


def cli(*arguments: str) -> Callable[[], Any]:
    """As the command line does, without its last step, which prints the error."""

    def run() -> Any:
        from lockstep.cli.verbs import VERBS

        return VERBS[arguments[0]][0](list(arguments[1:]))

    return run


class Bare(nn.Linear):
    """Its loss is a sum, over nobody knows how many."""

    def loss(self, outputs: Any, _batch: Any) -> Any:
        return outputs.sum()


def trained(
    loss_fn: Any = None, batch: Any = None, of: nn.Module | None = None, **settings: Any
) -> Callable[[], Any]:
    def train() -> Any:
        from lockstep import Trainer

        given = (torch.ones(2, 3), torch.ones(2, 1)) if batch is None else batch
        trainer = Trainer(
            of or nn.Linear(3, 1), loss_fn=loss_fn, max_steps=1, lr_schedule="constant", **settings
        )
        return list(trainer.steps([given] * 8))

    return train


class Asking(nn.Linear):
    def inputs(self, batch: Any) -> Any:
        return (batch["inputs"],)


class Unreduced(nn.MSELoss):
    def forward(self, made: Any, wanted: Any) -> Any:
        return (made - wanted).square()


def strange(reduction: str) -> nn.Module:
    loss = nn.MSELoss()
    loss.reduction = reduction
    return loss


def refuse(what: Any) -> Callable[[], Any]:
    def run() -> Any:
        from lockstep.parallel.refusals import refuse_wrapped

        return refuse_wrapped(what())

    return run


PROVOKED: list[tuple[str, Callable[[], Any]]] = [
    ("c.yaml is empty", config("")),
    ("c.yaml is not a text file (UTF-8)", raw(b"training: \xff")),
    ("c.yaml is a binary file", raw(b"training: \0")),
    ("a step is not negative, but -1", named_step),
    ("is called tensor, as the axis that ships and stands beside it", named_like_another),
    ("strategy fsdp makes nothing of pipeline_size=2", size_without_an_axis),
    ("the second argument of spawn is a tuple of the function's arguments", spawned(10)),
    ("the function's arguments are a tuple, not a str", spawned("ten")),
    ("there is no average with decay=2.0", average),
    ("is not a class, and its arguments are outputs and targets", loss_with_arguments),
    ("not YAML: a tab where spaces should be", config("training:\n\tmax_steps: 1\n")),
    ("not YAML:", config("training: {max_steps: 1\n")),
    ("is written twice, first in line", config("training: {seed: 1}\ntraining: {seed: 2}\n")),
    ("does not have the type of its tag", config("training: {max_steps: !!int x}\n")),
    ("an alias refers to the value that it is part of", config("training: &a {x: *a}\n")),
    (
        "is neither beside c.yaml nor among the files that ship",
        config("extends: trainers/none.yaml\n"),
    ),
    (
        "is not a statement of the template language",
        config("-- blok x\n-- endblock x\ntraining: {seed: 1}\n"),
    ),
    ("the value of the override", config("training: {seed: 1}\n", "training.seed={")),
    ("digits has no image_size 9", data("digits", image_size=9)),
    ("math:pi is a float, not a class or a function", data("math:pi")),
    ("should be a whole number of at least 1", data("python-docs", block_size=0)),
    ("there is no file or folder", data("text", path="none.txt")),
    ("there is no model 'bhd'", model("bhd")),
    ("is a float, not a class or a function", model("math:pi")),
    ("the model torch.nn:Linear needs in_features", model("torch.nn:Linear")),
    ("made a Fraction, not an nn.Module", model("fractions:Fraction")),
    ("n_layer=0: at least 1 is needed", model("transformer", n_layer=0)),
    ("is not the config of a Hugging Face model", model("hf:c.json")),
    ("has loss(), which returns a sum, but no count()", trained(of=Bare(3, 1))),
    ("holds no tensor to count samples in", trained(nn.MSELoss(), batch=({},))),
    (
        "no targets for the loss function in a batch with the keys input",
        trained(nn.MSELoss(), {"input": torch.ones(2, 3)}),
    ),
    ("but a mean is one number", trained(Unreduced())),
    ("(…) can't read the batch", trained(batch={"x": torch.ones(2, 3)}, of=Asking(3, 1))),
    ("a loss with reduction 'median'", trained(strange("median"))),
    ("in which there is no loss", trained(batch={"input": torch.ones(2, 3)})),
    (
        "the model is already wrapped in DataParallel",
        refuse(lambda: nn.DataParallel(nn.Linear(1, 1))),
    ),
    ("no scheduler is given", cli("submit")),
    ("there is no scheduler pbs", cli("submit", "pbs", "run.yaml")),
    ("there is no study 'speed'", cli("bench", "speed", "c.yaml")),
    ("is not a list of numbers from 1 on", cli("bench", "scaling", "c.yaml", "--ranks", "a,b")),
    (
        "-o means nothing to `lockstep report RUN --live`",
        cli("report", ".", "--live", "-o", "x.html"),
    ),
    ("there is no format 'zip' to convert to", cli("checkpoint", "convert", ".", "--to", "zip")),
    ("a module is run by Python", cli("launch", "-m", "--no-python", "x.py")),
    ("gave int for its training data, which is not a dataset", data("tests.test_errors:five")),
    ("LBFGS evaluates the loss again within an update, by a closure", with_closure),
    ("'seen' is a dict, which can't be logged", logged({})),
    ("balances its experts by a loss over all layers", balanced),
    (
        "can't be cut into stages",
        lambda: __import__("lockstep.models.protocol").models.protocol.require_segments(
            nn.Linear(1, 1)
        ),
    ),
]


@pytest.mark.parametrize(
    ("message", "provoke"), PROVOKED, ids=[message[:40] for message, _ in PROVOKED]
)
def test_it_is_said(
    message: str, provoke: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text("{}")
    (tmp_path / "c.yaml").write_text("model: {name: transformer}\ndata: {name: python-docs}\n")
    with pytest.raises(LockstepError) as caught:
        provoke()
    assert message in caught.value.what
    assert caught.value.why or caught.value.fix
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    "number",
    [
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.EPIPE,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
    ],
)
def test_whatever_the_system_calls_a_lost_connection_it_is_one(number: int) -> None:
    text = f"[pair.cc:537] Read error [127.0.0.1]:25732: {os.strerror(number)}. This is typical"
    assert lost_a_peer(RuntimeError(text))


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one"), "one"),
        (AssertionError(), "AssertionError"),
        ("", ""),
    ],
)
def test_the_first_line_of_an_error_that_says_nothing_is_its_name(said: object, line: str) -> None:
    assert first_line(said) == line


def test_no_code_takes_the_first_line_of_a_text_that_may_be_empty() -> None:
    """`"".splitlines()[0]` is an IndexError in place of the error that was to be told."""
    bare = re.compile(r"str\([^()]*(\([^()]*\))?\)(\.strip\(\))?\.splitlines\(\)\[0\]")
    found = [
        str(path.relative_to(REPOSITORY))
        for path in sorted((REPOSITORY / "lockstep").rglob("*.py"))
        if bare.search(path.read_text())
    ]
    assert not found, "errors.first_line does it"
