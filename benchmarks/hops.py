"""Counts the files of the package that a step enters, and the jumps between them.

    python -m benchmarks.hops              # what this tree does
    python -m benchmarks.hops --each       # and every jump, in order
    python -m benchmarks.hops --place      # the files that a model goes through in `place`
    python -m benchmarks.hops --write      # all strategies, into results/hops.md

A *jump* is the first call from one file of the package into another, while the third step runs on
rank 0: from the moment the loop asks the loader for its batch until the optimizer has written the
parameters. Returns do not count, nor does a pair of files that has been seen before. A call that
comes back through torch (a hook, an autograd function) is counted from the file of the package that
is nearest on the stack.

A model is placed twice: the second time, which counts, everything is imported and the ranks have
met. A file is *handed the model* where another one calls it with the model, with what was read of
it (`ModelFacts`) or with the site of its placement. An object that holds the model does not count.

None is handed it twice but that of the loop, and of a model on meta those in `ON_META`: it is asked
for `init_weights` before anything is done, and filled when all is done, since no rank has room for
its values before its share is laid out.

Calls are traced (`sys.setprofile`), so the numbers are exact and the same on every machine. What
other threads do (the loader's, which read ahead) is left out.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import lockstep
from benchmarks.page import RESULTS, page, tell
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.site import Site

PACKAGE = Path(lockstep.__file__).parent
STEP = 3
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp:2": {"distributed": {"strategy": "ddp"}},
    "fsdp:2": {"distributed": {"strategy": "fsdp"}},
    "pipeline:2": {"distributed": {"strategy": "pipeline"}},
}
# whose placing is looked at, besides: axes that change layers
PLACED: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "tensor:2": {"distributed": {"strategy": "tensor"}},
    "context:2": {"distributed": {"strategy": "context"}},
    "fsdp:2 on meta": {"distributed": {"strategy": "fsdp"}, "meta": True},
}
ON_META = {"models/protocol.py", "parallel/facts.py", "parallel/initial.py"}


class Jumps:
    """Records the calls of this thread from one file of the package into another, while
    it is on.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        # file → where, and into which function, it was handed the model
        self.handed: dict[str, list[str]] = {}
        # (from, into) -> the function that was called first
        self.found: dict[tuple[str, str], str] = {}
        # files in the order in which they are entered, each stretch once
        self.entries: list[str] = []

    def __enter__(self) -> "Jumps":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> set[str]:
        """The files that were entered."""
        return {into for _, into in self.found}

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        into = _file_of(frame)
        if into is None or frame.f_code.co_name.startswith("<"):
            return
        came_from = _nearest(frame.f_back)
        if came_from == into:
            return
        if not self.entries or self.entries[-1] != into:
            self.entries.append(into)
        if self._model is not None and _is_handed(frame, self._model):
            self.handed.setdefault(into, []).append(f"{came_from}: {frame.f_code.co_name}")
        self.found.setdefault((came_from or "outside", into), frame.f_code.co_name)


def _file_of(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path[len(str(PACKAGE)) + 1 :] if path.startswith(str(PACKAGE)) else None


def _nearest(frame: FrameType | None) -> str | None:
    while frame is not None:
        file = _file_of(frame)
        if file is not None:
            return file
        frame = frame.f_back
    return None


def _is_handed(frame: FrameType, model: nn.Module) -> bool:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    given = [frame.f_locals.get(name) for name in names if name not in ("self", "cls")]
    return any(
        value is model or (isinstance(value, ModelFacts | Site) and value.model is model)
        for value in given
    )


def _model() -> nn.Module:
    sizes = {"n_layer": 4, "n_head": 2, "n_embd": 16, "vocab_size": 12, "block_size": 8}
    return lockstep.get_model("transformer")(**sizes)


def _batches() -> list[dict[str, torch.Tensor]]:
    tokens = torch.arange(9).expand(2, 9)
    return [{"input_ids": tokens[:, :-1], "targets": tokens[:, 1:]} for _ in range(32)]


def walk_of_a_step(settings: dict[str, Any], result: str) -> None:
    """Train three steps, and write the jumps of the third, on rank 0."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = lockstep.Trainer(
        model, optimizer=optimizer, batch_size=2, global_batch_size=8, **settings
    )
    jumps = Jumps()
    trainer.optimizer.register_step_post_hook(lambda *_: sys.setprofile(None))
    with suppress(StopIteration):
        steps = iter(trainer.steps(_batches()))
        for _ in range(STEP - 1):
            next(steps)
        with jumps:
            next(steps)
    _write(jumps, result)


def walk_of_a_model(settings: dict[str, Any], result: str) -> None:
    """Place a model, and write the jumps, on rank 0."""
    distributed = settings.get("distributed", {})
    device = "meta" if settings.get("meta") else "cpu"
    with torch.device(device):
        models = [_model(), _model()]
    lockstep.place(models[0], **distributed)
    model = models[1]
    with Jumps(model) as jumps:
        lockstep.place(model, **distributed)
    _write(jumps, result)


def handed_again(walk: dict[str, Any]) -> dict[str, list[str]]:
    """Return the files that were handed the model more than once, but for that of the loop."""
    return {
        file: calls
        for file, calls in walk["handed"].items()
        if len(calls) > 1 and file != "parallel/place.py"
    }


def _write(jumps: Jumps, result: str) -> None:
    if lockstep.rank() == 0:
        found = [[came_from, into, name] for (came_from, into), name in jumps.found.items()]
        Path(result).write_text(
            json.dumps({"jumps": found, "entries": jumps.entries, "handed": jumps.handed})
        )


def count(walk: Callable[[dict[str, Any], str], None], strategy: str) -> dict[str, Any]:
    """Run a walk on the ranks of a strategy, and return what rank 0 wrote."""
    ranks = 2 if ":2" in strategy else 1
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "jumps.json")
        lockstep.spawn(walk, (PLACED[strategy], str(result)), nprocs=ranks)
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def main() -> None:
    """Print the files and jumps of each strategy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("strategies", nargs="*")
    parser.add_argument("--each", action="store_true", help="print every jump, in order")
    parser.add_argument("--place", action="store_true", help="the walk of a model through `place`")
    parser.add_argument(
        "--write", action="store_true", help="both walks of all, into results/hops.md"
    )
    asked = parser.parse_args()
    if asked.write:
        _write_page()
        return
    walk = walk_of_a_model if asked.place else walk_of_a_step
    for strategy in asked.strategies or (PLACED if asked.place else STRATEGIES):
        found = count(walk, strategy)
        print(f"{strategy}: {_figures(found)}", flush=True)
        if asked.each:
            for came_from, into, name in found["jumps"]:
                print(f"    {came_from} → {into} ({name})")
            for file, calls in handed_again(found).items():
                print(f"    {file} is handed the model by {', '.join(calls)}")


def _figures(found: dict[str, Any]) -> str:
    entries = found["entries"]
    again = len({file for file in entries if entries.count(file) > 1})
    text = f"{len(set(entries))} files, {len(found['jumps'])} jumps, "
    if not found["handed"]:
        return text + f"{again} files entered again"
    return text + (
        f"{len(found['handed'])} files handed the model, {len(handed_again(found))} of them more"
        " than once"
    )


def _write_page() -> None:
    rows = []
    for strategy in PLACED:
        step = _figures(count(walk_of_a_step, strategy)) if strategy in STRATEGIES else ""
        placing = _figures(count(walk_of_a_model, strategy))
        rows.append(f"| {strategy} | {step} | {placing} |")
    text = page(
        "How far a batch and a model travel through the package",
        "python -m benchmarks.hops --write",
        f"torch {torch.__version__.partition('+')[0]}",
        [
            "A jump is the first call from one file of the package into another, on rank 0: while",
            "the third step goes from the loader to the update, and while a model is placed.",
            "A file is entered again where a call comes into it after others were entered. It is",
            "handed the model where another one calls it with the model, its facts or its site.",
            "A model on meta comes to three files again: it is asked for `init_weights` before",
            "anything is done, and filled when its share has been laid out.",
        ],
        "| strategy | a step | placing a model |",
        rows,
    )
    tell(text, RESULTS / "hops.md")


if __name__ == "__main__":
    main()
