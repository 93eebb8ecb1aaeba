"""A URL where a path belongs is refused, in every flag, key and argument, before
anything is made.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep
from lockstep import checkpoint, cli
from lockstep.cli.arguments import Parser
from lockstep.cli.verbs import VERBS
from lockstep.config import Config
from lockstep.data import text as texts
from lockstep.data.language import Tokenizer
from lockstep.data.prepare import prepare
from lockstep.errors import UsageError
from lockstep.files.paths import local_path
from lockstep.monitor.callbacks import JsonLogger
from lockstep.report.read import read_run

URL = "s3://bucket/x"
CONFIG = "trainers/ddp.yaml"


@pytest.fixture(autouse=True)
def _nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "url", [URL, "gs://bucket/x", "az://c/x", "hdfs://n/x", "https://h/x", "abfss://c@a/x"]
)
def test_whatever_has_a_scheme_is_a_url(url: str) -> None:
    for given in (url, Path(url)):  # Path has dropped a slash
        with pytest.raises(UsageError, match=f"{url} is a URL, not a path") as caught:
            local_path(given, "--output-dir")
        assert caught.value.where == "--output-dir"
        assert "disk of the network" in (caught.value.fix or "")
    with pytest.raises(UsageError, match="write the path alone: /data/x"):
        local_path("file:///data/x", "output_dir")


@pytest.mark.parametrize(
    "path", ["x", "/x/y", "./s3:x", "a:b/c", "runs/1:2", "my.package:Name", "C:/x", "~/x"]
)
def test_other_paths_are_taken_as_they_are(path: str) -> None:
    assert local_path(path, "PATH") == Path(path)


COMMANDS = [
    "train URL",
    "train --config URL",
    f"train {CONFIG} monitor.profile.dir=URL",
    f"train {CONFIG} data.name=text data.args.path=URL",
    f"train {CONFIG} data.name=tokens data.args.path=URL",
    f"config check {CONFIG} model.name=hf:URL",
    f"train {CONFIG} data.name=text data.args.path=. data.args.tokenizer=URL",
    "launch --output-dir URL x.py",
    "launch --log-dir URL x.py",
    "launch URL",
    "config show URL",
    "checkpoint import URL",
    *(f"checkpoint {verb} x --output URL" for verb in ("export", "convert", "import")),
    "report URL --live",
    "report x -o URL",
    "report x --output=URL",
    "top URL",
    "top x URL",
    "sample URL",
    "plan URL",
    f"plan {CONFIG} --write URL",
    f"plan {CONFIG} --chart URL",
    f"verify {CONFIG} --html URL",
    f"doctor {CONFIG} --output-dir URL",
    f"bench scaling {CONFIG} -o URL",
    "init URL",
    "init x --data URL",
    f"submit kubernetes {CONFIG} --mount-path URL",
    f"submit ray {CONFIG} --working-dir URL",
    "data prepare URL --out x",
    "data prepare python-docs --out URL",
    "data prepare URL --out x --tokenizer URL",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command.replace("URL", URL).split()) == 2
    out, err = capsys.readouterr()
    assert f"{URL} is a URL, not a path" in err, err
    assert out == ""


def test_every_argument_that_is_a_path_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument whose name says that it is one has the type `Path`, which the parser looks at."""
    seen: dict[str, Parser] = {}

    def keep(self: Parser, argv: list[str], **_more: Any) -> Any:
        seen[self.prog] = self
        raise UsageError("seen")

    monkeypatch.setattr(Parser, "parse", keep)
    for verb in VERBS:
        if verb != "data":  # has a parser of its own
            with pytest.raises(UsageError):
                VERBS[verb][0](["slurm", "x"] if verb == "submit" else ["x"])
    for scheduler in ("kubernetes", "ray"):
        with pytest.raises(UsageError):
            VERBS["submit"][0]([scheduler, "x"])
    assert len(seen) >= len(VERBS)
    names = ("DIR", "FILE", "PATH", "FILE.svg", "RUN", "RUN_DIR")
    # those that end in "|URL" may be a bucket, and `bucket_url` looks at them
    missing = [
        f"{parser.prog} {action.dest}"
        for parser in seen.values()
        for action in parser._actions
        if action.metavar in names and action.type is not Path
    ]
    assert missing == []


PYTHON: list[Callable[[], object]] = [
    lambda: lockstep.Trainer(nn.Linear(1, 1), loss_fn=nn.MSELoss(), output_dir=Path(URL)),
    lambda: lockstep.Trainer(nn.Linear(1, 1), loss_fn=nn.MSELoss()).save_checkpoint(URL),
    lambda: lockstep.place(nn.Linear(1, 1)).save_checkpoint(URL),
    lambda: lockstep.place(nn.Linear(1, 1)).load_checkpoint(URL),
    lambda: checkpoint.save(URL, 1, checkpoint.Snapshot({"a": torch.zeros(1)}), config_yaml=""),
    lambda: checkpoint.list_checkpoints(URL),
    lambda: checkpoint.newest(URL),
    lambda: checkpoint.weights(URL),
    lambda: checkpoint.verify(URL),
    lambda: checkpoint.export_safetensors("step-00000001", URL),
    lambda: checkpoint.import_weights(URL, "x"),
    lambda: checkpoint.import_weights("x.safetensors", URL),
    lambda: texts.text(path=URL),
    lambda: texts.tokens(path=URL),
    lambda: prepare("python-docs", URL),
    lambda: Tokenizer(URL),
    lambda: JsonLogger(URL),
    lambda: JsonLogger(run_directory=URL),
    lambda: read_run(Path(URL)),
    lambda: Config.from_file(URL),
]


@pytest.mark.parametrize("call", PYTHON)
def test_python_refuses_it(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=f"{URL} is a URL, not a path"):
        call()


def test_what_is_no_path_may_be_a_url(tmp_path: Path) -> None:
    """A class of the user's own takes what it likes; the address of a meeting point is one."""
    config = Config.model_validate(
        {
            "data": {"name": "webdataset:WebDataset", "args": {"urls": URL}},
            "distributed": {"init_method": "tcp://127.0.0.1:1"},
        }
    )
    from lockstep.config.checks import check

    check(config)


OTHER_URL = "hdfs://node/x"


@pytest.mark.parametrize(
    "command",
    [
        f"train {CONFIG} --output-dir URL",
        *(
            f"checkpoint {verb} URL"
            for verb in ("list", "inspect", "verify", "digest", "export", "convert")
        ),
        "report URL",
    ],
)
def test_where_a_bucket_is_taken_other_urls_are_not(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.replace("URL", OTHER_URL).split()) == 2
    assert f"{OTHER_URL} is a URL, not a path" in capsys.readouterr().err
    assert cli.main(command.replace("URL", "s3://me:password@bucket/x").split()) == 2
    assert "password" not in capsys.readouterr().err
    with pytest.raises(UsageError, match=f"{OTHER_URL} is a URL, not a path"):
        lockstep.Trainer(nn.Linear(1, 1), loss_fn=nn.MSELoss(), output_dir=OTHER_URL)


def test_a_run_in_a_bucket_keeps_its_checkpoints_there() -> None:
    kept = Config().kept_in(URL)
    assert kept.checkpoint.storage is not None
    assert kept.checkpoint.storage.args == {"url": URL}
    assert kept.kept_in(URL) == kept
    with pytest.raises(UsageError, match="and its checkpoints elsewhere"):
        kept.kept_in("s3://bucket/y")
