"""Calls that only some ranks make: an error at once, or as soon as the watch looks, with the lines
of both.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import TORCHRUN, Forked
from tests.hosts import INTERFACE, Host
from tests.launch.on_hosts import PORT, launch_on
from tests.launch.shared import environment, lockstep
from tests.ranks import REPOSITORY, free_port

_BEGIN = """
import os, torch, torch.distributed as dist
from torch import nn
from lockstep import Config, Trainer

config = Config.model_validate({
    "distributed": {"device": "cpu", "strategy": "ddp", "hang": {"factor": 5, "seconds": 5}},
    "training": {"max_steps": 4, "batch_size": 4},
})
model = nn.Linear(4, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), config=config)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, 1))
"""


def line_of(text: str, code: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if code in line)


@pytest.mark.fault(
    "hang: a checkpoint is saved under `if is_main_process:`",
    "rank 0 waits for the others' shards, and they go on to the next step",
    "whichever comes second raises at once: exit code 2, one message with the lines of both",
)
def test_trap_79_saving_on_rank_0_alone_is_an_error_at_once(tmp_path: Path) -> None:
    text = (
        _BEGIN + "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        trainer.save_checkpoint('saved')\n"
    )
    (tmp_path / "own.py").write_text(text)
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 2, ended.err
    assert (
        "the ranks do not make the same calls: rank 0 calls save_checkpoint, rank 1 calls steps"
        in ended.err
    )
    saving = line_of(text, "trainer.save_checkpoint")
    stepping = line_of(text, "for record in")
    assert f"rank 0 at own.py:{saving}, rank 1 at own.py:{stepping}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("trainer.train(data)", "Trainer.train"),
        *(
            pytest.param(code, call, marks=pytest.mark.full)
            for code, call in (
                ("Trainer(nn.Linear(4, 1), loss_fn=nn.MSELoss(), config=config)", "Trainer"),
                ("trainer.evaluate(data)", "evaluate"),
                ("trainer.resume('auto')", "resume"),
            )
        ),
    ],
)
def test_trap_79_what_rank_0_alone_begins_before_the_loop_is_an_error_at_once(
    tmp_path: Path, code: str, call: str
) -> None:
    """Its collectives would meet others of the loop: torch's errors of objects, or SIGABRT."""
    text = (
        _BEGIN
        + f"if dist.get_rank() == 0:\n    {code}\nfor record in trainer.steps(data):\n    pass\n"
    )
    (tmp_path / "own.py").write_text(text)
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 2, ended.err
    assert (
        f"the ranks do not make the same calls: rank 0 calls {call}, rank 1 calls Trainer.steps"
        in ended.err
    )
    beginning = line_of(text, code)
    looping = line_of(text, "for record in")
    assert f"rank 0 at own.py:{beginning}, rank 1 at own.py:{looping}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.full
def test_trap_79_a_loop_in_a_loop_on_rank_0_alone_is_an_error_at_once(tmp_path: Path) -> None:
    text = (
        _BEGIN + "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        next(trainer.steps(data))\n"
    )
    (tmp_path / "own.py").write_text(text)
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 2, ended.err
    assert ended.err.count("Trainer.steps is called while a loop") == 1
    assert f"own.py:{line_of(text, 'next(trainer')}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.fault(
    "hang: a metric is reduced under `if is_main_process:`",
    "a collective of torch's own, in a script: rank 0 waits in it, and the others in the next step",
    "after `hang.seconds` the rank is named with its line and the line where the others wait; exit"
    " code 1",
)
def test_trap_79_a_collective_of_torch_on_rank_0_alone_is_found(tmp_path: Path) -> None:
    text = (
        _BEGIN + "alone = dist.new_group([0, 1])\n"
        "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        dist.all_reduce(torch.ones(1), group=alone)\n"
    )
    (tmp_path / "own.py").write_text(text)
    since = time.monotonic()
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 1, ended.err
    assert (
        "rank 0 of 2 failed: it hangs: it waits in a collective which the others have not entered"
        in ended.err
    )
    assert re.search(rf"own\.py:{line_of(text, 'dist.all_reduce')} in <module>", ended.err)
    assert f"the others wait in steps at own.py:{line_of(text, 'for record in')}" in ended.err
    assert time.monotonic() - since < 250


def test_trap_79_a_collective_of_torch_that_meets_one_of_a_step_is_told_with_its_line(
    tmp_path: Path,
) -> None:
    """Tensors of other sizes meet, which gloo ends by SIGABRT, from a thread of its own."""
    text = (
        _BEGIN + "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        dist.all_reduce(torch.ones(1))\n"
    )
    (tmp_path / "own.py").write_text(text)
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 1, ended.err
    assert "rank 0 of 2 failed: killed by SIGABRT" in ended.err
    assert f"own.py:{line_of(text, 'dist.all_reduce')} in <module>" in ended.err, ended.err
    assert "ranks gave tensors of different sizes to one collective" in ended.err
    assert "let all ranks make the same calls: one under `if is_main_process:`" in ended.err


_CAUGHT = """
import time, torch
from torch import nn
from lockstep import Config, Trainer

class Fails(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls > 4:
            raise ValueError("no more of this")
        return super().forward(x)

config = Config.model_validate({
    "distributed": {"device": "cpu", "strategy": "pipeline", "hang": {"seconds": 5}},
    "training": {"max_steps": 8, "batch_size": 4},
})
model = nn.Sequential(nn.Linear(4, 4), Fails(4, 1))
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), config=config)
data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.zeros(64, 1))
try:
    for record in trainer.steps(data):
        print("step", record.step)
except ValueError:
    time.sleep(600)
"""


@pytest.mark.fault(
    "hang: a script catches an error that one rank alone has",
    "one stage of a pipeline raises, its process lives on, and the others wait for its messages",
    "after 10 s (or `hang.seconds`, if that is less) the rank is named with its error and its line;"
    " exit code 1",
)
def test_an_error_that_a_script_catches_on_one_rank_is_told_soon(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_CAUGHT)
    since = time.monotonic()
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 1, ended.err
    assert "rank 1 of 2 failed: steps ended with an error, which its script caught" in ended.err
    assert "ValueError: no more of this" in ended.err
    assert f"own.py:{line_of(_CAUGHT, 'raise ValueError')}" in ended.err
    assert f"the others wait for it in steps at own.py:{line_of(_CAUGHT, 'for record')}" in (
        ended.err
    )
    assert time.monotonic() - since < 250


def under_torchrun(folder: Path) -> tuple[int, str]:
    """Run the folder's `own.py` on two ranks of torchrun; return its exit code and its errors."""
    torchrun = Forked(
        [sys.executable, "-m", TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "own"],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", PYTHONPATH=f"{folder}:{REPOSITORY}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, said = torchrun.communicate(timeout=300)
    return torchrun.returncode, said


@pytest.mark.fault(
    "hang: a script catches an error that one rank alone has, under torchrun",
    "the same, where nobody watches the ranks, and gloo's wait can't be called off",
    "after 10 s (or `hang.seconds`, if that is less) a rank of the same machine that waits ends"
    " itself, with the other one's error and its line; torchrun stops the rest",
)
def test_an_error_that_a_script_catches_on_one_rank_is_told_soon_under_torchrun(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(_CAUGHT)
    code, said = under_torchrun(tmp_path)
    assert code == 1
    assert "rank 1 of 2 failed: steps ended with an error, which its script caught" in said
    assert "ValueError: no more of this" in said
    assert f"own.py:{line_of(_CAUGHT, 'raise ValueError')}" in said
    assert f"the others wait for it in steps at own.py:{line_of(_CAUGHT, 'for record')}" in said


@pytest.mark.fault(
    "hang: a metric is reduced under `if is_main_process:`, under torchrun",
    "the same, where nobody watches the ranks: each waits for the other",
    "after `hang.seconds` the rank that is alone in it ends itself, with its line and the line"
    " where the others of its machine wait; torchrun stops the rest. A collective whose tensors"
    " differ from those of the step that it meets ends a rank at once, in torch's words",
)
def test_trap_79_a_collective_of_torch_on_rank_0_alone_is_told_under_torchrun(
    tmp_path: Path,
) -> None:
    text = (
        _BEGIN + "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        dist.barrier()\n"
    )
    (tmp_path / "own.py").write_text(text)
    code, said = under_torchrun(tmp_path)
    assert code == 1
    assert (
        "rank 0 of 2 failed: it hangs: it waits in a collective which the others have not entered"
        in said
    )
    line = line_of(text, "dist.barrier")
    assert f"where: torch.distributed.barrier at own.py:{line}" in said, said
    assert f"the others wait in steps at own.py:{line_of(text, 'for record in')}" in said


_OTHERS = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "own.py"),
    "lockstep.spawn": ("-c", "import lockstep, own; lockstep.spawn(own.train, nprocs=2)"),
    "mp.spawn": (
        "-c",
        "import torch.multiprocessing as mp, own; mp.spawn(own.in_a_group, nprocs=2)",
    ),
}


@pytest.mark.fault(
    "hang: a checkpoint is saved under `if is_main_process:`, without Lockstep's launcher",
    "under torchrun, `lockstep.spawn` or `mp.spawn`, where nobody watches the ranks",
    "the ranks of a machine compare their calls all the same: whichever comes second raises at"
    " once",
)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(name, marks=pytest.mark.full)
        for name in ("torchrun", "lockstep.spawn", "mp.spawn")
    ],
)
def test_trap_79_saving_on_rank_0_alone_under_other_launchers(
    tmp_path: Path, launcher: str
) -> None:
    """The rank that waits hears of it as its peer leaves; it would wait for `timeout_seconds`."""
    begin, train = _BEGIN.split("config =")
    train = (
        "config =" + train + "for record in trainer.steps(data):\n"
        "    if trainer.is_main_process and record.step == 2:\n"
        "        trainer.save_checkpoint('saved')\n"
    )
    text = (
        f"{begin}def train():\n    {train.replace(chr(10), chr(10) + '    ')}\n"
        + "def in_a_group(rank):\n    dist.init_process_group('gloo',"
        " init_method=f'file://{os.getcwd()}/meet', rank=rank, world_size=2)\n    train()\nif"
        " __name__ == '__main__':\n    train()\n"
    )
    (tmp_path / "own.py").write_text(text)
    command = [sys.executable, *_OTHERS[launcher]]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode != 0
    assert (
        "the ranks do not make the same calls: rank 0 calls save_checkpoint, rank 1 calls steps"
        in ended.stderr
    )
    saving = line_of(text, "trainer.save_checkpoint")
    stepping = line_of(text, "for record in")
    assert f"rank 0 at own.py:{saving}, rank 1 at own.py:{stepping}" in ended.stderr


_CALLS = {
    "state_dict": "trainer.state_dict()",
    "evaluate": "trainer.evaluate(data)",
    "predict": "trainer.predict(data)",
    "save_checkpoint": "trainer.save_checkpoint('saved')",
    "barrier": "lockstep.barrier()",
    "all_reduce": "lockstep.all_reduce(1.0)",
    "training_step": "trainer.training_step((torch.ones(4, 4), torch.zeros(4, 1)))",
    "torch.distributed.barrier": "dist.barrier()",
    "torch.distributed.all_reduce": "dist.all_reduce(torch.ones(1))",
}


def call_at_the_end(call: str, rank: int, late: int | None = None) -> str:
    """The text of a script in which one rank makes a call after the others' end; `late` is a rank
    that waits before.
    """
    return (
        _BEGIN + "import lockstep, time\n"
        "for record in trainer.steps(data):\n"
        "    pass\n"
        f"if lockstep.rank() == {late}:\n"
        "    time.sleep(1)\n"
        f"if lockstep.rank() == {rank}:\n"
        f"    {_CALLS[call]}\n"
    )


def assert_named(said: str, text: str, call: str, rank: int, script: str = "own.py") -> None:
    other = 1 - rank
    assert f"rank {rank} calls {call}, and rank {other} has ended without it" in said, said
    line = line_of(text, _CALLS[call])
    last = line_of(text, "for record in")
    assert (
        f"rank {rank} at {script}:{line}, rank {other} ended after steps at {script}:{last}" in said
    )
    assert "call it on every rank, before `if is_main_process:`" in said


@pytest.mark.fault(
    "hang: what a run has learned is kept under `if is_main_process:` at the end of a script",
    "rank 0 alone calls `state_dict`, `evaluate`, `save_checkpoint` …, and the others come to the"
    " end of the script",
    "an error at once: exit code 2, one message with the call, the lines of both, and the rank that"
    " has ended",
)
@pytest.mark.parametrize(
    ("call", "rank", "late"),
    [
        # it waits when the other one ends, or comes first: as the machine has it
        ("state_dict", 0, None),
        ("evaluate", 1, 1),  # the other one has ended before
        ("torch.distributed.all_reduce", 0, 1),
        *(
            pytest.param(call, rank, late, marks=pytest.mark.full)
            for call in _CALLS
            for rank, late in ((0, 1), (1, 1))
        ),
    ],
)
def test_a_call_that_one_rank_makes_when_the_others_have_ended(
    tmp_path: Path, call: str, rank: int, late: int | None
) -> None:
    text = call_at_the_end(call, rank, late)
    (tmp_path / "own.py").write_text(text)
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 2, ended.err
    assert_named(ended.err, text, call, rank)
    assert "Traceback" not in ended.err


@pytest.mark.root
@pytest.mark.fault(
    "hang: what a run has learned is kept under `if is_main_process:` at the end of a script, on"
    " several machines",
    "rank 0 alone calls `state_dict`, `evaluate` …; a rank of another machine has come to the end"
    " of the script",
    "the same error at once on each machine: the call, the lines of both, and the rank that has"
    " ended; exit code 2",
)
@pytest.mark.parametrize(
    "call", ["state_dict", pytest.param("torch.distributed.barrier", marks=pytest.mark.full)]
)
def test_a_call_that_one_rank_makes_when_those_of_another_machine_have_ended(
    four: list[Host], tmp_path: Path, call: str
) -> None:
    text = call_at_the_end(call, 0, 0)
    (tmp_path / "script.py").write_text(text)
    starts = [(host, number, f"{four[0].address}:{PORT}") for number, host in enumerate(four[:2])]
    for ended in launch_on(tmp_path, starts, nodes=2):
        assert ended.code == 2, ended.err
        assert_named(ended.err, text, call, 0, "script.py")
        assert "Traceback" not in ended.err


@pytest.mark.root
def test_a_call_that_one_rank_makes_at_the_end_under_torchrun_on_two_machines(
    four: list[Host], tmp_path: Path
) -> None:
    text = call_at_the_end("evaluate", 0, 0)
    (tmp_path / "own.py").write_text(text)
    meeting = ["--master-addr", four[0].address, "--master-port", PORT]
    command = [sys.executable, "-m", TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *meeting]
    started = [
        Forked(
            [*command, "--node-rank", str(number), "-m", "own"],
            host=host,
            host_name=f"host{number}",
            cwd=tmp_path,
            env=environment(
                OMP_NUM_THREADS="1",
                PYTHONPATH=f"{tmp_path}:{REPOSITORY}",
                GLOO_SOCKET_IFNAME=INTERFACE,
                TP_SOCKET_IFNAME=INTERFACE,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, host in enumerate(four[:2])
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert started[0].returncode != 0
    assert_named(said[0], text, "evaluate", 0)


@pytest.mark.parametrize("call", ["save_checkpoint", "torch.distributed.barrier"])
@pytest.mark.full  # the quick run has two machines, above
def test_a_call_that_one_rank_makes_at_the_end_under_torchrun(tmp_path: Path, call: str) -> None:
    """The error of torch's own collective is what is raised; the explanation is a note of it."""
    text = call_at_the_end(call, 0)
    (tmp_path / "own.py").write_text(text)
    code, said = under_torchrun(tmp_path)
    assert code != 0
    assert_named(said, text, call, 0)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_call_that_one_rank_makes_at_the_end_without_a_launcher(
    tmp_path: Path, rank: int
) -> None:
    text = call_at_the_end("state_dict", rank)
    (tmp_path / "own.py").write_text(text)
    place = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "own.py"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**place, RANK=str(one), LOCAL_RANK=str(one)),
        )
        for one in (0, 1)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [1 - rank, rank]
    assert_named(said[rank], text, "state_dict", rank)


@pytest.mark.fault(
    "hang: a checkpoint is saved under `if is_main_process:`, and the others wait in torch's own"
    " `barrier`",
    "rank 0 waits for the others' parts, and they wait for rank 0",
    "all ranks of one machine wait in collectives, and use no core: found after about 5 s, with the"
    " lines of both",
)
def test_ranks_that_wait_for_each_other_in_different_collectives_are_found_soon(
    tmp_path: Path,
) -> None:
    text = (
        _BEGIN.replace('"hang": {"factor": 5, "seconds": 5}', '"hang": {"seconds": 600}')
        + "for record in trainer.steps(data):\n"
        "    if record.step == 2:\n"
        "        if trainer.is_main_process:\n"
        "            trainer.save_checkpoint('saved')\n"
        "        dist.barrier()\n"
    )
    (tmp_path / "own.py").write_text(text)
    since = time.monotonic()
    ended = lockstep(tmp_path, "launch", "--nproc-per-node", "2", "own.py", OMP_NUM_THREADS="1")
    assert ended.code == 1, ended.err
    assert (
        "rank 1 of 2 failed: it hangs: it waits in a collective which the others have not entered"
        in ended.err
    )
    assert (
        f"the others wait in save_checkpoint at own.py:{line_of(text, 'trainer.save_checkpoint')}"
        in ended.err
    )
    assert time.monotonic() - since < 250
