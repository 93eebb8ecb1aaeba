"""A flag that a command does not use, in the form in which it was called, is an error of usage."""

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.cli.arguments import Parser
from lockstep.errors import EXIT_USAGE

CONFIG = "ready/bdh.yaml"
_KEYS = (
    "strategy batch-size gradient-accumulation-steps grad-clip precision compile max-steps"
    " learning-rate"
)
_MACHINES = (
    "nproc-per-node nnodes node-rank rdzv-endpoint rdzv-id rdzv-conf rdzv-backend master-addr"
    " master-port"
)
KEYS = [f"--{name}" for name in f"{_KEYS} allow-changes seed".split()]
LAUNCH = [
    f"--{name}"
    for name in f"{_MACHINES} standalone max-restarts local-rank fresh-processes".split()
]
# Form of a command → the options that it uses; any other that its parser takes is refused.
USED = {
    ("verify", "train.py"): "--against --nproc-per-node --ranks --steps --json --html",
    (
        "verify",
        "train.py",
        "--nproc-per-node",
        "2",
    ): "--nproc-per-node --ranks --steps --json --html",
    ("plan", "--params", "1e6"): "--params --seq-length --headroom --gpus --json --batch-size",
    ("plan", CONFIG, "--stages", "2"): f"--stages --config {' '.join(KEYS)}",
    ("plan", CONFIG): (
        "--config --gpus --gpu-type --interconnect --gpus-per-node --find-batch-size --write"
        f" --chart --price --json --stages --params {' '.join(KEYS)}"
    ),
    ("report", "run"): "--output -o --live",
    ("report", "run", "--live"): "--live --port",
    ("doctor",): f"--json --output-dir --config {' '.join(LAUNCH)}",
    ("config", "list"): "",
    ("config", "schema"): "",
    ("config", "check", CONFIG): f"--config {' '.join(KEYS)}",
    ("config", "show", CONFIG): f"--config --schedule --ranks {' '.join(KEYS)}",
    ("checkpoint", "list", "run"): "",
    ("checkpoint", "export", "run"): "--output --to",
    ("checkpoint", "convert", "run"): "--output --to",
    ("checkpoint", "import", "run"): "--output --prefix",
    (
        "bench",
        "scaling",
        CONFIG,
    ): f"--ranks --steps --output -o --config {' '.join(set(KEYS) - {'--max-steps'})}",
}


class _ParsedError(Exception):
    """Ends a command once its parser is known."""


def options_of(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The options of a command's parser, and whether each takes a value."""
    found: dict[str, bool] = {}

    def parse(self: Parser, *_: object, **more: object) -> None:
        for action in self._actions:
            found.update(
                {
                    name: action.nargs != 0
                    for name in action.option_strings
                    if name not in ("-h", "--help")
                }
            )
        raise _ParsedError

    with monkeypatch.context() as patched:
        patched.setattr(Parser, "parse", parse)
        with pytest.raises(_ParsedError):
            main(list(words))
    return found


@pytest.mark.parametrize("words", USED, ids=" ".join)
def test_each_flag_is_used_or_refused(
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = options_of(words, monkeypatch)
    used = set(USED[words].split())
    assert used <= options.keys(), "a flag that is gone"
    for option in options.keys() - used - set(words):
        value = (
            {"--steps": "3", "--ranks": "2", "--to": "full"}.get(option, "1")
            if options[option]
            else None
        )
        assert main([*words, option, *([value] if value else [])]) == EXIT_USAGE, option
        shown = capsys.readouterr().err
        others = ("a schedule is drawn by `show`", "--params plans without a config")
        assert any(
            text in shown for text in (f"{option} means nothing to `lockstep {words[0]}", *others)
        ), shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("config", "list", "nosuch.yaml"), "nosuch.yaml means nothing"),
        (
            ("doctor", "training.seed=7"),
            "training.seed=7 means nothing to `lockstep doctor without a config`",
        ),
        (("submit", "slurm", CONFIG, "--node-rank", "0"), "--node-rank means nothing"),
        (
            ("launch", "--output-dir", "a", "--log-dir", "b", "train.py"),
            "--output-dir means nothing",
        ),
        (
            ("launch", "--master-addr", "192.0.2.9", "train.py"),
            "--master-addr 192.0.2.9 means nothing to one machine",
        ),
        (
            ("launch", "--rdzv-endpoint", "192.0.2.9:29500", "train.py"),
            "--rdzv-endpoint 192.0.2.9:29500 means nothing to one machine",
        ),
        (
            ("train", CONFIG, "--master-addr", "192.0.2.9"),
            "--master-addr 192.0.2.9 means nothing to one machine",
        ),
    ],
)
def test_what_a_command_does_not_use_is_an_error(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == EXIT_USAGE
    assert message in capsys.readouterr().err
