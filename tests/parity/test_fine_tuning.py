"""The way of docs/how_to/finetune.md, disturbed: killed and resumed on other numbers of ranks, the
run ends in the bits of the undisturbed one, and its folder says in plain transformers what it says.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint import digest, newest
from tests.docs.blocks import REPOSITORY, blocks_in
from tests.forked import Forked
from tests.launch.shared import environment, finish, wait_for
from tests.launch.shared import lockstep as run_command

for package in ("transformers", "peft"):
    pytest.importorskip(package)

_PROMPT = "<|user|>What comes after 7?<|end|>\n<|assistant|>"
_STOPS = """
import signal
from pathlib import Path


class At:
    def __init__(self, step):
        self.step = step

    def __call__(self, record):
        if record.step == self.step:
            Path(f"reached-{record.step}").touch()
            signal.pause()
"""
_SAVES = ("checkpoint.save_steps=2", "monitor.log_steps=1", "training.eval_steps=6")
# Checkpoints are at even steps, so what is killed in an odd one loses work.
_DISTURBED = ((2, 5), (4, 9), (1, None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page has made before it trains: model, conversations, configs, a script."""
    made = tmp_path_factory.mktemp("page")
    before = Path.cwd()
    os.chdir(made)
    for block in blocks_in(REPOSITORY / "docs/how_to/finetune.md"):
        if block.mark == "file":
            (made / block.text).write_text(block.body)
        elif block.language == "python":
            exec(compile(block.body, str(block), "exec"), {"__name__": "__main__"})
    os.chdir(before)
    (made / "stops.py").write_text(_STOPS)
    return made


def train(folder: Path, run: str, ranks: int, stop_at: int | None = None) -> None:
    """Train adapters to the end, or kill all of it in a step, once the last checkpoint is there."""
    words = ["train", "adapters.yaml", "--output-dir", run, "--nproc-per-node", str(ranks), *_SAVES]
    if stop_at is not None:
        callback = {"name": "stops:At", "args": {"step": stop_at}}
        words.append(f"monitor.callbacks={json.dumps([callback])}")
    process = Forked(
        [sys.executable, "-m", "lockstep", *words],
        cwd=folder,
        env=environment(PYTHONPATH=f"{REPOSITORY}{os.pathsep}{folder}", OMP_NUM_THREADS="1"),
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
    )
    if stop_at is None:
        ended = finish(process, folder)
        assert ended.code == 0, ended.out + ended.err
        return
    saved = folder / run / f"checkpoints/step-{stop_at - 1:08}"
    wait_for(
        lambda: (
            ((folder / f"reached-{stop_at}").exists() and saved.exists())
            or process.poll() is not None
        )
    )
    assert process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found = newest(folder / run / "checkpoints")
    assert found == saved


def digest_of(folder: Path, run: str) -> str:
    found = newest(folder / run / "checkpoints")
    assert found == folder / run / "checkpoints/step-00000012"
    return digest(found)


def said_by(folder: Path, run: str, ranks: int) -> dict[str, Any]:
    """What an evaluation on so many ranks finds, and how the run answers a question."""
    asked = ["--prompt", _PROMPT, "--tokens", "16", "--nproc-per-node", str(ranks), "--json"]
    ended = run_command(folder, "evaluate", run, *asked, OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.out + ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def answered_by(folder: Path) -> str:
    """How a folder in Hugging Face's layout continues the same prompt, in plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    given = tokenizer(_PROMPT, return_tensors="pt", add_special_tokens=False)
    made = model.generate(**given, max_new_tokens=16, do_sample=False, eos_token_id=None)
    return str(tokenizer.decode(made[0], skip_special_tokens=True))


@pytest.mark.full
def test_adapters_killed_and_resumed_on_other_ranks_and_back_in_transformers(folder: Path) -> None:
    for ranks in (1, 2, 4):
        train(folder, f"on-{ranks}", ranks)
    undisturbed = {digest_of(folder, f"on-{ranks}") for ranks in (1, 2, 4)}
    assert len(undisturbed) == 1

    for ranks, stop_at in _DISTURBED:
        train(folder, "disturbed", ranks, stop_at)
    assert {digest_of(folder, "disturbed")} == undisturbed

    found = said_by(folder, "disturbed", 2)
    assert found["recorded"] == found["all"]["loss"]
    for kind, output in (("huggingface", "merged"), ("adapter", "adapter")):
        words = ["export", "disturbed", "--to", kind, "--output", output]
        ended = run_command(folder, "checkpoint", *words)
        assert ended.code == 0, ended.out + ended.err
    assert found["texts"] == [answered_by(folder / "merged")]
    asked = [sys.executable, "answer.py"]  # merged, and with the adapters beside the base
    subprocess.run(asked, cwd=folder, env=environment(), check=True)


def _scripts() -> dict[str, list[str]]:
    """The blocks of docs/coming_from/trl.md, by library."""
    blocks = blocks_in(REPOSITORY / "docs/coming_from/trl.md")
    config, commands, trl, plain = (block.body for block in blocks)
    return {"lockstep": [config, commands], "trl": [trl], "transformers": [plain]}


def test_it_takes_no_more_lines_than_others() -> None:
    lines = {name: sum(map(_lines, texts)) for name, texts in _scripts().items()}
    assert lines["lockstep"] < lines["trl"] < lines["transformers"], lines


def _lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


@pytest.mark.full
@pytest.mark.parametrize("library", ["lockstep", "transformers", "trl"])
def test_the_same_with_other_libraries_runs(folder: Path, library: str) -> None:
    """As the page has it; its folder answers, too."""
    pytest.importorskip(library)
    texts = _scripts()[library]
    if library == "lockstep":
        (folder / "side.yaml").write_text(texts[0])
        for command in texts[1].splitlines():
            ended = run_command(folder, *command.split()[1:])
            assert ended.code == 0, ended.out + ended.err
    else:
        (folder / f"by_{library}.py").write_text(texts[0])
        asked = [sys.executable, f"by_{library}.py"]
        subprocess.run(asked, cwd=folder, env=environment(HF_HUB_OFFLINE="1"), check=True)
    assert "What comes after 7?" in answered_by(folder / f"merged-by-{library}")
