"""Watches any trainer's training loop while it runs, and says what is wrong in it.

Each rank is watched by itself. In the first steps, and every so often, ranks also compare
fingerprints of parameters and gradients, and learning rates: over a store of their own, from a
thread, so that the training waits for nothing and no collective of the script can be disturbed.
"""

import atexit
import logging
import os
import pickle
import runpy
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.errors import listed
from lockstep.machine.environment import rank_facts
from lockstep.store_threads import StoreThread
from lockstep.tensors import fingerprint
from lockstep.torch_compat import parallel_patches, replaced_calls, script_patches
from lockstep.verify.loop.findings import LoopFinding
from lockstep.verify.loop.updates import Nesting
from lockstep.verify.training_checks import TrainingChecks

_PREFIX = "lockstep-watch"
_CONNECT_SECONDS = 20.0
_WAIT_SECONDS = 600.0  # for what another rank says of a step
_LOOK_SECONDS = 0.02
# its `sitecustomize.py` is put on the path of other processes
_FOLDER = Path(__file__).parent / "injected"
_WRAPPED = "wrapped"  # parameters whose gradients DistributedDataParallel averages
_PLAIN = "plain"  # others, which ranks may hold equal or not
_END = -1  # stands for a step in what ranks say when their processes end
_log = logging.getLogger("lockstep.watch")


# What begins and ends the part of this process that `lockstep verify SCRIPT` compares: `observe()`
# calls it instead.
verified_part: list[tuple[Callable[[], None], Callable[[], None]]] = []


class observe:  # noqa: N801 — called as a function
    """Watches the training loop in its block, or from `start` on.

    `lockstep verify SCRIPT` compares this part alone.

    Args:
        every: number of steps after which parameters are looked at, and ranks compared; the first
            three always are.
        report: is given each finding once; unset: it is printed.
    """

    def __init__(
        self, every: int = 100, report: Callable[[LoopFinding], None] | None = None
    ) -> None:
        self._checks = TrainingChecks(3, every, report or _warn)
        self._undo: list[Callable[[], None]] = []
        self._depth = 0
        self._ranks: _Ranks | None = None
        self._nesting = Nesting()
        self._steps_of: Counter[int] = Counter()  # of each optimizer
        self._compares = False  # whether ranks are compared in this step
        self._before: dict[str, Tensor] = {}  # fingerprints of weights when it began

    @property
    def findings(self) -> dict[str, LoopFinding]:
        """Findings by their kind."""
        if self._ranks is not None:
            self._ranks.flush()
        return self._checks.findings

    @property
    def steps(self) -> int:
        """Number of optimizer steps that were seen."""
        return self._checks.steps

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> "observe":
        """Begin to watch."""
        if verified_part:
            begin, end = verified_part[-1]
            begin()
            self._undo = [end]
            return self
        checks = self._checks
        self._undo = [
            register_module_forward_pre_hook(self._before_forward).remove,
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
            script_patches.patch_backward(self._around_backward),
            script_patches.patch_clipping(self._around_clipping),
            script_patches.patch_scalers(checks.scaled, checks.unscaled),
            parallel_patches.patch_synchronisation(checks.synchronised),
            script_patches.patch_made(checks.note_made),
            script_patches.patch_modes(checks.left_training),
            script_patches.patch_schedules(checks.schedule_stepped),
            script_patches.patch_samplers(checks.sampler_begun),
            script_patches.patch_loading(checks.loaded),
            script_patches.patch_reading(checks.batch_read),
            replaced_calls.patch_names(),
        ]
        return self

    __enter__ = start

    def stop(self) -> None:
        """Stop watching."""
        for undo in self._undo:
            undo()
        self._undo = []
        if self._ranks is not None:
            self._ranks.flush()

    def found_by_all(self) -> int | None:
        """Return the number of findings of all ranks, on rank 0, once the others have ended.

        None: it is not known.
        """
        number = len(self.findings)
        return number if self._ranks is None else self._ranks.sum_at_end(number)

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        """Note a module that is called, and the model that a pass begins with."""
        if torch.compiler.is_compiling():
            return
        if not self._checks.looks:
            self._undo[0]()  # modules are known by now, and a hook costs a microsecond a call
            return
        if module.training:
            self._checks.module_called(module)  # also where a part of it runs without gradients
        inside = {
            id(inner)
            for model in self._checks.models
            for inner in model.modules()
            if inner is not model
        }
        if not torch.is_grad_enabled() or id(module) in inside:
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._checks.model_called(module)

    def _around_backward(self, call: Any, first: Any) -> Any:
        if self._depth == 0:
            self._checks.backward(first if isinstance(first, Tensor) else None)
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._checks.backward_done()

    def _around_clipping(self, call: Any, parameters: Any) -> Any:
        self._checks.clipped([parameters] if isinstance(parameters, Tensor) else parameters)
        return call()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check what the optimizer is about to apply, and keep what it was before it does.

        Of the first steps of each optimizer ranks compare what they hold alike.
        """
        if not self._nesting.begins(optimizer):
            return
        # a closure computes the gradients later
        if len(args) == 1 and kwargs.get("closure") is None:
            self._checks.begin_update(optimizer)
        self._before = {}
        # Each of several optimizers has first steps of its own.
        begins = self._steps_of[id(optimizer)] < self._checks.first
        self._steps_of[id(optimizer)] += 1
        self._compares = (begins or self._checks.looks) and _has_ranks()
        if self._compares:
            for kind, name, p in self._compared(optimizer):
                if kind.startswith(_PLAIN):
                    self._before[f"before|{kind}|{name}"] = fingerprint(p.detach())

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._nesting.ends(optimizer):
            return
        if self._compares:
            self._ranks = self._ranks or _Ranks(self._checks)
            self._compare_ranks(optimizer, self._ranks)
        self._checks.end_update(optimizer)

    def _compared(self, optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
        """Yield each parameter that all ranks hold: its kind, its name, itself.

        The kind is `wrapped` or `plain`, and the number of the optimizer: several networks may use
        one name.
        """
        of = list(self._steps_of).index(id(optimizer))
        wrappers = self._checks.made.of_kind(DistributedDataParallel)
        wrapped = {id(p) for wrapper in wrappers for p in wrapper.parameters()}
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if not isinstance(p, DTensor) and p.numel():
                kind = _WRAPPED if id(p) in wrapped else _PLAIN
                yield f"{kind}{of}", self._checks.names.get(id(p), f"parameter {number}"), p

    def _compare_ranks(self, optimizer: Optimizer, ranks: "_Ranks") -> None:
        """Send fingerprints of weights and gradients, and learning rates, to be compared."""
        prints = dict(self._before)
        for kind, name, p in self._compared(optimizer):
            prints[f"weight|{kind}|{name}"] = fingerprint(p.detach())
            if p.grad is not None and not p.grad.is_sparse:
                prints[f"gradient|{kind}|{name}"] = fingerprint(p.grad.detach())
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        values = torch.stack(list(prints.values())).tolist() if prints else []
        ranks.send(
            self._checks.steps, {"prints": dict(zip(prints, values, strict=True)), "rates": rates}
        )


class _Ranks:
    """Compares what ranks say of a step, in a thread of rank 0."""

    def __init__(self, checks: TrainingChecks) -> None:
        self._checks = checks
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()
        self._queue: Queue[tuple[int, dict[str, Any]] | None] = Queue()  # None: the end
        self._connected = True  # until the thread finds no store
        self._equal: set[str] = set()  # weights that were equal on all ranks once
        self._found: int | None = None  # by all ranks, when all have ended
        StoreThread(self._run, "watch-training", wake=lambda: self._queue.put(None))

    def send(self, step: int, report: dict[str, Any]) -> None:
        if self._connected:
            self._queue.put((step, report))

    def flush(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while self._connected and self._queue.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def sum_at_end(self, number: int) -> int | None:
        """Tell rank 0 what this rank found.

        Return the sum there, None elsewhere or if a rank does not answer.
        """
        self.send(_END, {"found": number})
        self.flush()
        return self._found

    def _run(self, thread: StoreThread) -> None:
        """Send or receive what ranks say, until the process ends."""
        try:
            address = os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
            made: Any = vars(torch.distributed)["TCPStore"]
            store = made(
                address, port, is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
            )
        except Exception as error:
            _log.warning(
                "warning: ranks are not compared with each other: no store is reached (%s)", error
            )
            self._connected = False
            return
        while True:
            item = self._queue.get()
            if item is None or thread.closing.is_set():
                return
            step, report = item
            with suppress(Exception):  # the other ranks have ended
                self._exchange(store, step, report, thread.closing)
            self._queue.task_done()

    def _exchange(
        self, store: Any, step: int, report: dict[str, Any], closing: threading.Event
    ) -> None:
        """Give rank 0 what this rank says of a step; on rank 0, compare what all say."""
        if self.rank:
            store.set(f"{_PREFIX}/{step}/{self.rank}", pickle.dumps(report))
            return
        ranks = [report]
        for rank in range(1, self.world):
            key = f"{_PREFIX}/{step}/{rank}"
            deadline = time.monotonic() + _WAIT_SECONDS
            while not store.check([key]):  # the process may end meanwhile
                if closing.wait(_LOOK_SECONDS) or time.monotonic() > deadline:
                    return
            ranks.append(pickle.loads(store.get(key)))
            store.delete_key(key)
        if step == _END:
            self._found = sum(each["found"] for each in ranks)
        else:
            self._compare(step + 1, ranks)

    def _compare(self, step: int, ranks: list[dict[str, Any]]) -> None:
        """Find learning rates, gradients and weights that differ on ranks."""
        if any(report["rates"] != ranks[0]["rates"] for report in ranks):
            rates = "; ".join(
                f"rank {rank}: {report['rates'][:3]}" for rank, report in enumerate(ranks)
            )
            self._checks.find(
                "learning rate", f"ranks step with different learning rates in step {step}: {rates}"
            )
        apart: dict[str, list[str]] = {}
        # Rank 0 may lack a gradient that others have.
        for key in dict.fromkeys(key for report in ranks for key in report["prints"]):
            moment, kind, name = key.split("|", 2)
            values = {report["prints"].get(key) for report in ranks}
            if len(values) == 1:
                self._equal.add(key)
            elif kind.startswith(_WRAPPED) or key in self._equal:
                apart.setdefault(moment, []).append(name)
        if "before" in apart:
            text = (
                f"{listed(apart['before'], 5)} were equal on all ranks, and differ when step {step}"
                " begins: each rank updates them with gradients of its own"
            )
            fix = "wrap their model in DistributedDataParallel, or average its gradients"
            self._checks.find("gradient synchronisation", text, fix)
        elif "gradient" in apart:
            text = f"the gradients of {listed(apart['gradient'], 5)} differ on ranks in step {step}"
            fix = (
                "call the wrapped model, leave no_sync() for the last backward pass, and change no"
                " gradient by rank"
            )
            self._checks.find("gradient synchronisation", text, fix)
        elif "weight" in apart:
            text = (
                f"{listed(apart['weight'], 5)} differ on ranks after step {step}, with equal"
                " gradients"
            )
            fix = (
                "let nothing but the optimizer write weights, or let it write the same on all ranks"
            )
            self._checks.find("replicas", text, fix)


def _has_ranks() -> bool:
    """Return whether there are other ranks to compare with."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def _warn(finding: LoopFinding) -> None:
    at = f", at {finding.line}" if finding.line else ""
    do = f"; do: {finding.fix}" if finding.fix else ""
    line = f"watch-training: ✗ rank {rank_facts().rank}: {finding.kind}: {finding.text}{at}{do}"
    print(line, flush=True)
    # the launcher shows rank 0 alone: a log would keep this line
    if not getattr(sys.stdout, "shown", True):
        print(line, file=getattr(sys.stdout, "console", sys.stderr), flush=True)


def install() -> None:
    """Watch this process, as `lockstep launch --watch-training` says, until it ends."""
    seen = observe(int(os.environ["LOCKSTEP_WATCHED_TRAINING"])).start()

    def end() -> None:
        if not seen.steps:
            return
        found = seen.found_by_all()
        if rank_facts().is_main:
            own = "" if found is not None else " on rank 0; what the others found is not known"
            number = len(seen.findings) if found is None else found
            print(
                f"watch-training: {seen.steps} steps, {number or 'nothing'} found{own}", flush=True
            )

    atexit.register(end)


def injected(**variables: str) -> dict[str, str]:
    """Return the environment of a process that observes itself.

    The variables tell `sitecustomize.py` what to observe.
    """
    path = [str(_FOLDER), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}


def inject(**variables: str) -> None:
    """Have this process and those that it starts observe themselves."""
    os.environ.update(injected(**variables))
    runpy.run_path(str(_FOLDER / "sitecustomize.py"))
