"""The examples run: in small on two ranks of one launch; as they stand in tests that are marked
`full`.
"""

import difflib
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.run_directory.records import RunDirectory
from tests.hosts import require_root
from tests.launch.shared import environment
from tests.ranks import REPOSITORY, run_ranks
from tests.sampled import of_module

EXAMPLES = REPOSITORY / "examples"
TINY = [
    "data.args.block_size=32",
    "training.max_steps=2",
    "training.warmup_steps=1",
    "training.batch_size=2",
]
TINY += ["training.global_batch_size=4", "training.eval_steps=null", "checkpoint.save_steps=2"]
LANGUAGE = [
    *TINY,
    "model.args.n_layer=2",
    "model.args.n_embd=16",
    "model.args.n_head=2",
    "distributed.strategy=ddp",
]


def load(name: str) -> ModuleType:
    """An example as a module; it finds its neighbours, as when it is started."""
    path = EXAMPLES / f"{name}.py"
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


def cells() -> str:
    """The code of the notebook."""
    found = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in found if cell["cell_type"] == "code")


def train(config: str, run: str, *overrides: str) -> Path:
    """What `lockstep train` does on a rank."""
    from lockstep.config import load_config
    from lockstep.trainer import run as start

    assert start(load_config(config, overrides), output_dir=Path(run), resume="never") == 0
    return Path(run)


# ---- what each rank runs, in the folder of the test; what it returns comes back ----


def plain() -> Any:
    load("plain/after").main()


def gan() -> Any:
    losses, made = load("gan").train(4)
    return losses, list(made.shape)


def free_transformer() -> Any:
    example = load("free_transformer")
    runs = {
        name: train(config, name, *LANGUAGE, *(arg for arg in args if "n_layer" not in arg))
        for name, (config, *args) in example.MODELS.items()
    }
    return example.table(runs)


def vae() -> Any:
    from lockstep import checkpoint, is_main_process

    images = [
        "model.args.latent_dim=4",
        "training.num_train_epochs=null",
        *TINY[1:],
        "distributed.strategy=ddp",
    ]
    run = train("ready/vae.yaml", "vae", *images)
    if not is_main_process():
        return None
    newest = checkpoint.newest(run / "checkpoints")
    assert newest is not None
    return load("vae").draw(run, checkpoint.export_safetensors(newest, run / "vae.safetensors"))


def own_text() -> Any:
    from lockstep.evaluate.sample import sample

    Path("book.txt").write_text("It was a bright cold day in April. " * 300)
    run = train(str(EXAMPLES / "own_text.yaml"), "own_text", *LANGUAGE, "data.args.path=book.txt")
    return sample(run, prompt="It", num_tokens=5)


def notebook() -> Any:
    """Its cells; the ranks are there already."""
    import lockstep

    def on_both(fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, plot: str) -> None:
        fn(*args)
        lockstep.barrier()

    lockstep.spawn = on_both  # type: ignore[assignment]
    exec(cells().replace("args=(300,)", "args=(3,)"), {"__name__": "__main__"})
    return [row["loss"] for row in RunDirectory(Path("runs/notebook")).read_metrics()]


def own_accuracy() -> Any:
    import torch

    torch.manual_seed(0)
    return load("accuracy").found


QUICK: list[Callable[[], Any]] = [plain, own_accuracy, gan, notebook]
# The others train models of the package by configs.
PARTS = [*QUICK, free_transformer, vae, own_text]
FIRST_IN_FULL = "test_the_free_transformer_is_compared_with_its_baseline"


def run_all(folder: str, parts: list[Callable[[], Any]]) -> dict[str, Any]:
    """On each rank."""
    from lockstep import barrier

    os.chdir(folder)
    found = {}
    for part in parts:
        found[part.__name__] = part()
        barrier()
    return found


@pytest.fixture(scope="module")
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("examples")
    is_full = any(item.originalname == FIRST_IN_FULL for item in of_module(request))
    return folder, run_ranks(run_all, 2, str(folder), PARTS if is_full else QUICK)


def accuracy(weights: Path) -> float:
    import torch

    before = load("plain/before")
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, 128),
        torch.nn.ReLU(),
        torch.nn.Identity(),
        torch.nn.Linear(128, 10),
    )
    model.load_state_dict(torch.load(weights, weights_only=True))
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in before.val_data)
    return float(right) / len(before.unseen)


def test_a_plain_script_needs_a_handful_of_changed_lines_and_learns_the_same(
    ran: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (
        (EXAMPLES / f"plain/{name}.py").read_text().splitlines() for name in ("before", "after")
    )
    added = [
        line
        for line in difflib.ndiff(before[1:], after[1:])
        if line.startswith("+ ") and line[2:].strip()
    ]
    assert len(added) <= 8, "\n".join(added)
    monkeypatch.chdir(tmp_path)
    load("plain/before").main()
    assert accuracy(tmp_path / "digits.pt") > 0.9
    assert accuracy(ran[0] / "digits.pt") > 0.9


def test_an_accuracy_of_ones_own_takes_seventeen_lines_at_most(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    """And it is the same on two ranks."""
    lines = [line for line in (EXAMPLES / "accuracy.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 17
    alone = own_accuracy()
    assert alone["accuracy"] > 0.9
    for rank in ran[1]:
        assert rank["own_accuracy"]["accuracy"] == alone["accuracy"]
        assert rank["own_accuracy"]["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_two_optimizers_see_the_same_losses_on_both_ranks(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    first, second = (found["gan"] for found in ran[1])
    assert first == second
    losses, shape = first
    assert len(losses) == 4
    assert shape == [8, 64]
    assert losses[0] != losses[-1]


@pytest.mark.full
def test_the_free_transformer_is_compared_with_its_baseline(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    header, baseline, free = ran[1][0]["free_transformer"].splitlines()
    assert "KL, bits a token" in header
    assert re.fullmatch(r"baseline +5\.\d+ +5\.\d+ +–", baseline)
    assert re.fullmatch(r"free +5\.\d+ +5\.\d+ +\d\.\d+", free)


@pytest.mark.full
def test_pictures_of_the_vae_are_png_files_of_their_size(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, (found, _) = ran
    for name, size in zip(
        found["vae"], ((8 * 32 * 4, 2 * 32 * 4), (8 * 32 * 4, 4 * 32 * 4)), strict=True
    ):
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">II", data[16:24]) == size


@pytest.mark.full
def test_the_language_model_writes(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    found = ran[1][0]
    assert found["own_text"].startswith("It")
    assert len(found["own_text"].encode(errors="replace")) >= 7


def test_the_notebook_s_cells_run(ran: tuple[Path, list[dict[str, Any]]]) -> None:
    losses = ran[1][0]["notebook"]
    assert len(losses) == 2, "of the first step and the last"
    assert losses[-1] != losses[0]


@pytest.mark.full
def test_the_notebook_in_a_kernel_draws_the_run_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real kernel runs its cells on two ranks; the figure is updated in place, and its last state
    stays.
    """
    nbclient = pytest.importorskip(
        "nbclient", reason="THE NOTEBOOK IS NOT RUN: pip install nbclient ipykernel"
    )
    nbformat = pytest.importorskip("nbformat")
    for name, value in environment(
        OMP_NUM_THREADS="1", IPYTHONDIR=str(tmp_path / "ipython")
    ).items():
        monkeypatch.setenv(name, value)
    book = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    updates: list[Any] = []
    received = client.process_message

    def process(message: Any, cell: Any, index: int) -> Any:
        if message["msg_type"] == "update_display_data":
            updates.append(message["content"]["data"]["text/html"])
        return received(message, cell, index)

    client.process_message = process
    client.execute()
    (spawned,) = [
        cell for cell in book.cells if "lockstep.spawn" in cell.source and cell.cell_type == "code"
    ]
    (figure,) = [
        output.data["text/html"]
        for output in spawned.outputs
        if output.output_type == "display_data"
    ]
    assert "step 300 of 300" in figure
    assert len(updates) > 2, "while it trains"
    assert figure.count("<svg") == 2, "loss and samples per second"
    assert figure.count("<polyline") == 2
    assert "2 · 3 =" in book.cells[-1].outputs[-1].text


def as_it_stands(folder: Path, *command: str, text: str | None = None) -> str:
    surroundings = environment(OMP_NUM_THREADS="1", PYTHON=sys.executable)
    done = subprocess.run(
        command,
        cwd=folder,
        env=surroundings,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain/after.py", "gan.py"])
def test_one_process_and_two_ranks_say_the_same(tmp_path: Path, name: str) -> None:
    script = str(EXAMPLES / name)
    alone = as_it_stands(tmp_path, sys.executable, script)
    launch = [sys.executable, "-m", "lockstep", "launch", "--nproc-per-node", "2", script]
    together = as_it_stands(tmp_path, *launch)
    said = re.compile(r"^(?:loss on .*|step \d+  judge .*)$", re.MULTILINE)
    assert said.findall(alone)
    assert said.findall(alone) == said.findall(together)


@pytest.mark.full
def test_the_notebook_spawns_two_ranks(tmp_path: Path) -> None:
    """Its code comes from no file, as in a notebook, so ranks are forks."""
    assert "after 300 steps" in as_it_stands(tmp_path, sys.executable, "-", text=cells())


@pytest.mark.full
@pytest.mark.parametrize("name", ["vae", "free_transformer", "hf_causal"])
def test_the_long_ones_as_they_stand(tmp_path: Path, name: str) -> None:
    script = str(EXAMPLES / f"{name}.py")
    launched = name == "hf_causal"
    command = [
        sys.executable,
        *(["-m", "lockstep", "launch", "--nproc-per-node", "2"] if launched else []),
        script,
    ]
    expected = {"vae": "samples.png", "free_transformer": "KL, bits a token", "hf_causal": "The "}[
        name
    ]
    assert expected in as_it_stands(tmp_path, *command)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_text_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text((REPOSITORY / "README.md").read_text())
    assert (
        as_it_stands(tmp_path, str(EXAMPLES / "own_text.sh"), "book.txt").count("--- sample") == 3
    )


@pytest.mark.full
@pytest.mark.root
def test_two_hosts(tmp_path: Path) -> None:
    require_root()
    small = [
        str(EXAMPLES / "own_text.yaml"),
        *LANGUAGE,
        "data.args.path=book.txt",
        "--output-dir",
        "run",
    ]
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 300)
    as_it_stands(tmp_path, str(EXAMPLES / "two_hosts.sh"), *small)
    assert "strategy ddp:2" in (tmp_path / "run/logs/rank-0.log").read_text()
    assert (tmp_path / "run/checkpoints/step-00000002/manifest.json").exists()
