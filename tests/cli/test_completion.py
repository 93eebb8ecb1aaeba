"""The shell completes what the command line offers, in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.starter import SHELLS, completion_script
from lockstep.cli.verbs import VERBS
from lockstep.errors import UsageError
from tests.launch.shared import environment

_ASKED = [
    ["lockstep", "ch"],
    ["lockstep", "checkpoint", "ex"],
    ["lockstep", "submit", "sl"],
    ["lockstep", "train", "--resu"],
    ["lockstep", "train", "ru"],
]


def test_bash_completes_verbs_what_they_act_on_options_and_files(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/lockstep"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lockstep "$@"\n')
    command.chmod(0o755)
    (tmp_path / "run.yaml").touch()
    lines = ["source <(lockstep completion bash)"]
    for words in _ASKED:
        lines.append(
            f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _lockstep; echo"
            " ${COMPREPLY[@]}"
        )
    surroundings = environment()
    surroundings["PATH"] = f"{tmp_path / 'bin'}:{surroundings['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=surroundings,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "checkpoint",
        "export",
        "slurm",
        "--resume",
        "run.yaml",
    ], done.stderr


def test_each_shell_gets_each_verb() -> None:
    for shell in SHELLS:
        assert all(verb in completion_script(shell, VERBS) for verb in VERBS)
    if shutil.which("zsh"):
        zsh = completion_script("zsh", VERBS)
        assert subprocess.run(["zsh", "-n"], input=zsh, text=True, check=False).returncode == 0
    with pytest.raises(UsageError, match="there is no completion for 'fish'"):
        completion_script("fish", VERBS)
