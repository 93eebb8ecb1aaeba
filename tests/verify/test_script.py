"""`lockstep verify SCRIPT.py` as docs/how_to/verify_any_script.md has it: right scripts and wrong
ones on two ranks.
"""

import json
import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import lockstep.errors
from benchmarks.silent_bugs import programs
from benchmarks.silent_bugs.idioms import IDIOMS, Idiom, judge
from lockstep.cli import main
from lockstep.errors import UsageError
from lockstep.verify.command import verify_script
from lockstep.verify.comparison_result import Outcome
from lockstep.verify.own_lines import code_at
from lockstep.verify.script.observed import hangs, observe
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.task import ScriptTask
from lockstep.verify.text import script_text as text
from lockstep.verify.watch import injected
from tests.sampled import quick_and_full

SCRIPTS = Path(__file__).parent / "scripts"


def judged(script: str, *arguments: str) -> Outcome:
    (outcome,) = verify_script(str(SCRIPTS / script), arguments, [2], steps=2)
    assert not outcome.failed, outcome.failed
    return outcome


def kinds(outcome: Outcome) -> dict[str, bool]:
    return {found.kind: found.is_error for found in outcome.causes}


@pytest.mark.parametrize(
    ("faults", "found"),
    [
        (["accumulate", "autocast", "look", "own draws"], {}),
        pytest.param(
            ["accumulate", "autocast", "deep", "fp16", "look", "noise", "own draws", "zero"],
            {},
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["own draws", "dropout", "batch norm"],
            {"random numbers": False, "batch statistics": False},
            marks=pytest.mark.full,
        ),
        (
            ["unsharded", "rate", "drift"],
            {"samples": True, "learning rate": True, "replicas": True},
        ),
        pytest.param(
            ["sum", "schedule"],
            {"learning rate schedule": True, "sum of gradients": True},
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["seeds", "unwrapped"],
            {"first values": True, "gradient synchronisation": True},
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["uneven", "accumulate"],
            {"loss normalisation": True, "gradient accumulation": True},
            marks=pytest.mark.full,
        ),
    ],
)
def test_replicas(faults: list[str], found: dict[str, bool]) -> None:
    """A right script passes, with what is other by nature; each mistake is named, and hides no
    other.
    """
    outcome = judged("replicas.py", *faults)
    assert kinds(outcome) == found
    assert outcome.passed == (not any(found.values()))
    assert outcome.steps == 2
    assert any("2 ranks take" in notice for notice in outcome.notices)
    assert not any("broadcast" in notice for notice in outcome.notices)


@pytest.mark.full
def test_the_line_is_not_of_what_ranks_with_the_right_gradient_do_too() -> None:
    """Both ranks clone the loss, and one process does not; the penalty is rank 1's alone."""
    outcome = judged("replicas.py", "penalty")
    (cause,) = outcome.causes
    assert cause.kind == "computation of a rank"
    assert ".square().sum()" in code_at(cause.line), outcome.operation
    assert "on rank 1: " in outcome.operation


# Of the scripts in public idiom, one; networks in no wrapper are in tests/verify/test_watch.py, and
# those whose layers are cut are below.
QUICK = ("evaluated evaluation mode",)


@pytest.mark.parametrize(
    "idiom",
    [
        idiom if idiom.name in QUICK else pytest.param(idiom, marks=pytest.mark.full)
        for idiom in IDIOMS
    ],
    ids=lambda idiom: idiom.name,
)
def test_scripts_in_public_idiom(idiom: Idiom) -> None:
    """Sound ones raise no alarm; each fault is found, with its cause, and no other is named."""
    judged = judge(idiom)
    assert judged.right, judged


@pytest.mark.full
def test_the_gradient_of_an_inner_step_is_not_a_rank_s_own() -> None:
    judged = judge(Idiom("meta_learned", ("summed",), ("sum of gradients",)))
    assert judged.text == "the gradient is the sum over ranks, 2 × the mean that one process has"


@pytest.mark.parametrize("faults", [pytest.param([], marks=pytest.mark.full), ["uneven"]])
def test_updates_that_rounding_makes_hide_nothing_and_are_no_fault(faults: list[str]) -> None:
    """A process that is left to itself makes other updates; with the ranks' gradients it makes
    theirs.
    """
    outcome = judged("cancelling.py", *faults)
    assert kinds(outcome) == dict.fromkeys(["loss normalisation"] if faults else [], True)
    assert "its optimizer was given the ranks' gradients" in outcome.notices[-1]
    assert not outcome.not_judged


@pytest.mark.parametrize(("kind", "found"), [("fsdp2", {}), ("fsdp1", {"clipping": True})])
def test_shards(kind: str, found: dict[str, bool]) -> None:
    """`clip_grad_norm_` sees the norm of DTensors over all ranks, and of FSDP1's shards only the
    rank's own.
    """
    outcome = judged("sharded.py", kind)
    assert kinds(outcome) == found


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["tensor"], {}),
        pytest.param(["pipeline"], {}, marks=pytest.mark.full),
        pytest.param(["by hand"], {}, marks=pytest.mark.full),
        (["by hand", "forget"], {"gradient synchronisation": True}),
        pytest.param(["tensor", "norm"], {"sum of gradients": True}, marks=pytest.mark.full),
        (["pipeline", "scale"], {"sum of gradients": True}),
    ],
)
def test_models_that_are_cut(arguments: list[str], found: dict[str, bool]) -> None:
    """Ranks that share a model read the same samples, and that is right; parts are joined for one
    process.
    """
    outcome = judged("cut.py", *arguments)
    assert kinds(outcome) == found


@pytest.mark.full
def test_a_model_that_is_cut_and_sharded() -> None:
    (outcome,) = verify_script(str(SCRIPTS / "cut.py"), ["fsdp and tensor"], [4], steps=2)
    assert outcome.passed, text("cut.py", [outcome])


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("collective", "hang", "rank 0 calls barrier (0 elements, "),
        ("uneven", "uneven steps", " has ended"),
        (
            "crash",
            "crash",
            "the script runs as one process, and not on 2 ranks: rank 1 of 2 failed: IndexError",
        ),
    ],
)
def test_scripts_that_hang_or_crash(how: str, kind: str, says: str) -> None:
    """It says where each rank waits, soon after none of them computes any more, though one takes
    longer to write it than another.
    """
    (outcome,) = verify_script(str(SCRIPTS / "hanging.py"), [how], [2], steps=3)
    assert not outcome.passed
    assert [found.kind for found in outcome.causes] == [kind]
    assert says in outcome.causes[0].text
    assert "✗" in text("hanging.py", [outcome])


def test_a_rank_whose_script_has_ended_does_not_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs in it then waits for the other ranks, and nobody is to wait for that."""
    monkeypatch.setattr(hangs, "_PATIENCE", 0.2)
    monkeypatch.setattr(hangs, "_POLL", 0.1)
    monkeypatch.setattr(hangs, "descendants", lambda _process: ())  # those of the tests
    task = ScriptTask("train.py", (), 1, tmp_path)
    watch = hangs.ScriptHangWatch(task, 0, 1, ScriptRecord())
    watch.script_has_ended()
    waiting = threading.Thread(target=watch._wait_until_all_idle, daemon=True)
    waiting.start()
    deadline = time.monotonic() + 60
    while waiting.is_alive():
        assert time.monotonic() < deadline, "it computes"


class EndedError(BaseException):
    """This process would end here."""


def test_a_rank_that_has_ended_takes_no_rank_that_hangs_for_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs writes its record once all ranks are idle: here between two looks of the rank
    that has ended. It left then, and what was told was no hang but the end of a rank.
    """
    task = ScriptTask("train.py", (), 2, tmp_path)
    watch = hangs.ScriptHangWatch(task, 0, 2, ScriptRecord())
    observer = object.__new__(observe._ScriptObserver)
    observer.task = task
    observer.rank = 0
    observer.world = 2
    observer.record = ScriptRecord()
    observer._hang_watch = watch
    monkeypatch.setattr(observer, "_orders", SimpleNamespace(complete=dict), raising=False)
    waited: list[float] = []
    looks: list[bool] = []

    def are_idle() -> bool:
        found = hangs.ScriptHangWatch.are_idle(watch)
        looks.append(found)
        for rank in range(2):  # right after the look
            task.idle_file(rank).touch()
        task.write_record(1, ScriptRecord())
        return found

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if seconds == observe._WAIT:
            raise EndedError  # by the watch

    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(watch, "are_idle", are_idle)
    monkeypatch.setattr(observe, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setattr(observe, "os", SimpleNamespace(_exit=end))
    with pytest.raises(EndedError):
        observer.finish()
    assert looks == [False, True]
    assert waited[-1] == observe._WAIT, "it leaves the end to the watch"


@pytest.mark.parametrize(
    ("fault", "found"),
    [((), {}), pytest.param(("unsharded",), {"samples": True}, marks=pytest.mark.full)],
)
def test_a_script_of_lightning(fault: tuple[str, ...], found: dict[str, bool]) -> None:
    """Its optimizer computes the gradients in a closure; as it is documented, it passes."""
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")
    outcome = judged("lightened.py", "{n}", *fault)
    assert (outcome.framework, kinds(outcome)) == ("Lightning", found)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            "-m torch.distributed.run --nproc-per-node {n} --standalone", marks=pytest.mark.full
        ),
        pytest.param("-m lockstep launch --nproc-per-node {n}", marks=pytest.mark.full),
    ],
)
def test_a_command_in_place_of_a_script(launcher: str) -> None:
    command = f"{sys.executable} {launcher} {SCRIPTS}/replicas.py sum"
    (outcome,) = verify_script(command, [], [2], steps=2)
    said = text(command, [outcome])
    assert kinds(outcome) == {"sum of gradients": True}, said
    assert said.startswith(f"2 steps of {command.replace('{n}', '2')}, compared with"), said


@pytest.mark.full
@pytest.mark.parametrize(
    ("typed", "rounds"),
    [
        ("python -m package.train", False),
        ("accelerate launch --mixed_precision bf16 package/loop.py right", True),
    ],
)
def test_a_command_that_needs_no_launcher(
    typed: str,
    rounds: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A module finds those of its package, and a script the options of `accelerate launch`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    Path("package").mkdir()
    text = (SCRIPTS / "accelerated.py").read_text()
    if rounds:  # that it computes on CPUs is told by a variable
        text = text.replace("Accelerator(cpu=True)", "Accelerator()")
    Path("package/loop.py").write_text(text)
    Path("package/train.py").write_text("from .loop import main\nmain(True)\n")
    assert main(["verify", "--steps", "2", "--json", "--", *typed.split()]) == 0
    (world,) = json.loads(capsys.readouterr().out)["worlds"]
    assert world["framework"] == "Accelerate"
    assert any("autocast" in notice for notice in world["notices"]) == rounds


def test_a_command_that_can_not_be_proven() -> None:
    with pytest.raises(UsageError, match=r"has no \{n\}"):
        verify_script("torchrun train.py", [], [2], steps=2)
    (outcome,) = verify_script("no-such-launcher {n}", [], [2], steps=2)
    assert "there is no program no-such-launcher to run" in outcome.failed
    (outcome,) = verify_script(f"{sys.executable} -c exit({{n}})", [], [2], steps=2)
    assert "the command ended with code 2" in outcome.failed
    assert "-c 'exit(2)'" in outcome.failed


def test_what_is_observed_imports_this_lockstep_and_nothing_else_of_its_environment(
    tmp_path: Path,
) -> None:
    """Else a command of another environment would be compared with this one's torch."""
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep/__init__.py").write_text("raise ImportError('another one')")
    environment = {**os.environ, **injected(LOCKSTEP_OBSERVED_RUN=str(tmp_path))}
    folder, *given = environment["PYTHONPATH"].split(os.pathsep)
    assert Path(folder).name == "injected"
    assert given == list(filter(None, [os.environ.get("PYTHONPATH")]))
    environment["PYTHONPATH"] = os.pathsep.join([folder, str(tmp_path)])
    command = [sys.executable, "-c", "import lockstep.errors as found; print(found.__file__)"]
    said = subprocess.check_output(command, env=environment, text=True)
    assert Path(said.strip()) == Path(lockstep.errors.__file__)


def test_an_environment_without_what_lockstep_needs_is_told(tmp_path: Path) -> None:
    """Of two that are compared, one may have another torch, and nothing of Lockstep."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy')")
    environment = {**os.environ, **injected(LOCKSTEP_OBSERVED_RUN=str(tmp_path))}
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    command = [sys.executable, "-c", "import torch"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.endswith("numpy; install Lockstep in its environment, too\n")


def test_a_part_of_a_script_is_compared(tmp_path: Path) -> None:
    """`with lockstep.observe():` leaves out what comes before it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist, lockstep\nfrom torch import"
        " nn\ndist.init_process_group('gloo')\ntorch.manual_seed(0)\ninputs = torch.randn(64,"
        " 4)\ndef train(model, steps):\n    optimizer = torch.optim.SGD(model.parameters(),"
        " lr=0.1)\n    for step in range(steps):\n        part = inputs[8 * step : 8 * step +"
        " 8].chunk(dist.get_world_size())[dist.get_rank()]\n       "
        " model(part).square().mean().backward()\n        optimizer.step()\n       "
        " optimizer.zero_grad()\nmodel = nn.parallel.DistributedDataParallel(nn.Linear(4,"
        " 1))\ntrain(model.module, 1 if dist.get_world_size() == 1 else 0)\nwith"
        " lockstep.observe():\n    train(model, 2)\nraise SystemExit('not reached')\n"
    )
    (outcome,) = verify_script(str(script), [], [2], steps=5)
    assert outcome.passed, text("train.py", [outcome])
    assert outcome.steps == 2


def test_a_loop_of_accelerate_is_explained_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "verify",
        str(SCRIPTS / "accelerated.py"),
        "--nproc-per-node",
        "1,2",
        "--steps",
        "2",
        "--json",
    ]
    assert main(arguments) == 1
    (world,) = json.loads(capsys.readouterr().out)["worlds"]
    assert (world["ranks"], world["framework"], world["passed"]) == (2, "Accelerate", False)
    fixes = {found["kind"]: found["fix"] for found in world["causes"]}
    assert "device_specific=True" in fixes["random numbers"]
    assert "accelerator.gather" in fixes["loss normalisation"]
    assert world["columns"] == {
        "loop": "✓",
        "samples": "✓",
        "random numbers": "✗",
        "first values": "✓",
        "settings": "✓",
        "gradients": "✗",
        "weights": "✗",
    }


@pytest.mark.full
def test_the_loop_of_accelerate_passes_when_it_is_mended_as_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", str(SCRIPTS / "accelerated.py"), "--steps", "2", "--", "right"]) == 0
    printed = capsys.readouterr().out
    assert "✓ but for what is other by nature" in printed
    assert "✗" not in printed


def test_a_script_without_loaders_is_judged_where_the_batch_is_held(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "dist.init_process_group('gloo')\n"
        "torch.manual_seed(0)\n"
        "size, rank = int(sys.argv[1]), dist.get_rank()\n"
        "inputs = torch.randn(64, 4)\n"
        "model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4):\n"
        "    number = step * dist.get_world_size() + rank\n"
        "    model(inputs.split(size)[number]).square().mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    (held,) = verify_script(str(script), ["{8/n}"], [2], steps=2)
    assert held.passed
    (other,) = verify_script(str(script), ["8"], [2], steps=2)
    assert not other.passed
    assert "one process trains on 8 samples and 2 ranks on 16" in other.not_judged
    assert "? cannot judge" in text("train.py", [other])


@pytest.mark.full
def test_targets_that_broadcast_are_noted(tmp_path: Path) -> None:
    """Each prediction meets the targets of all samples of a batch, on one process, too."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "inputs = torch.randn(64, 4)\n"
        "model = nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4):\n"
        "    batch = inputs[step * 8 : step * 8 + 8]\n"
        "    nn.functional.mse_loss(model(batch), batch[:, 0]).backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    (outcome,) = verify_script(str(script), [], [1], steps=2)
    (notice,) = [notice for notice in outcome.notices if "broadcast" in notice]
    assert "train.py:9: a loss is given [8, 1] and the targets [8]" in notice


def test_a_script_that_fails_or_takes_no_step_did_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nprint('hello')\nif os.environ['RANK'] == '1':\n    raise ValueError('no such"
        " file')\n"
    )
    (outcome,) = verify_script(str(script), [], [2], steps=2)
    assert "rank 1 of 2 failed: ValueError: no such file" in outcome.failed
    assert f"{script}:4" in outcome.failed
    assert "output of rank 0:\n  hello" in outcome.failed
    script.write_text("print('nothing')\n")
    (outcome,) = verify_script(str(script), [], [2], steps=2)
    assert "no call of optimizer.step() was seen" in outcome.failed


def test_a_script_of_lockstep_is_left_to_the_check_of_its_config(tmp_path: Path) -> None:
    """Its generators are seeded inside of the forward pass, so equal states before it
    show nothing.
    """
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from lockstep import Trainer\n"
        "data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))\n"
        "model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.1))\n"
        "Trainer(model, None, nn.MSELoss(), strategy='ddp').train(data, epochs=1)\n"
    )
    (outcome,) = verify_script(str(script), [], [2], steps=1)
    assert not outcome.failed
    assert "lockstep verify CONFIG" in outcome.not_judged
    assert not outcome.causes


OF_A_RUN = """
import sys
import torch
from torch import nn
from lockstep import Trainer
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
settings = {"output_dir": sys.argv[1], "max_steps": 2, "save_steps": 1}
Trainer(nn.Linear(4, 1), None, nn.MSELoss(), **settings).train(data)
"""
COMMAND = f"{sys.executable} -m lockstep launch --nproc-per-node {{n}}"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


@pytest.mark.parametrize(
    "kind", quick_and_full(["script", "new folder", "command"], ["new folder"])
)
def test_a_proof_leaves_run_directories_as_they_are(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a finished run, from which nothing is resumed, one that is not there yet, and the
    one that a launcher makes.
    """
    script = tmp_path / "train.py"
    run = tmp_path / "run"
    script.write_text(OF_A_RUN)
    if kind != "new folder":
        monkeypatch.setattr(sys, "argv", [str(script), str(run)])
        runpy.run_path(str(script))
        assert (run / "checkpoints" / "step-00000002").is_dir()
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    if kind == "command":
        (outcome,) = verify_script(f"{COMMAND} {script} {run}", [], [2], steps=2)
    else:
        (outcome,) = verify_script(str(script), [str(run)], [2], steps=2)
    assert not outcome.failed, outcome.failed
    assert "lockstep verify CONFIG" in outcome.not_judged
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        ([__file__, "--against", "ddp:2"], "'ddp:2' is not a list of numbers of ranks"),
        ([__file__, "--nproc-per-node", "1"], "one process is what others are compared with"),
        ([__file__, "--steps", "0"], "--steps 0 compares nothing"),
        (["run.yaml", "--nproc-per-node", "2"], "are for a script"),
    ],
)
def test_misuse_is_one_error(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_ranks_that_cut_orders_of_their_own() -> None:
    """No rank reads a sample twice, and some samples are read by two ranks."""
    judged = programs.judge("RanksCutTheirOwnOrders", sound=False)
    assert judged.found
    assert judged.right
    assert "ranks read each other's samples" in judged.text


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first difference is drawn in the module in which it begins."""
    program = str(Path(programs.__file__).parent / "program.py")
    page = tmp_path / "pages" / "verdict.html"
    assert (
        main(
            ["verify", program, "--steps", "1", "--html", str(page), "--", "InputsScaledOnOneRank"]
        )
        == 1
    )
    assert "computation of a rank" in capsys.readouterr().out
    text = page.read_text()
    assert (
        '<div class="part wrong"><b>head</b><div class="differs first">first: its output differs'
        in text
    )
    assert "gradient differs by" in text
    assert "computation of a rank" in text
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
