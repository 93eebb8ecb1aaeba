"""How the loss of each class of transformers is counted: the page docs/families.md.

    python -m benchmarks.families [--missing] [TASK …]    # some twenty minutes for all
    python -m benchmarks.families --write

Every class of the library's automatic mappings is built in a tiny size (`benchmarks.tiny_models`). The reference is the
author's own loop in plain PyTorch: the loss and gradient of `model(**batch)` for the whole batch. Against it stands a
step of Lockstep over the same samples in several cuts. A class is equal to 1e-5, or refused before training.
"""

import argparse
import json
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import lockstep
from benchmarks.tiny_models import SAMPLES, UnknownError, batch_for, tiny
from lockstep.errors import UsageError
from lockstep.models.observed import LossCalls

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
ROWS = Path(__file__).parent / "results" / "families.jsonl"
CUTS = ((2, 2), (1, 3))
TOLERANCE = 1e-5
_SECONDS = 30  # for one class

EQUAL, REFUSED, NOT_BUILT, NO_LOSS, WRONG = "equal", "refused", "not built", "no loss", "WRONG"


@dataclass(frozen=True)
class Row:
    """One class.

    Attributes:
        task: the automatic mapping.
        name: of the class.
        outcome: EQUAL, REFUSED, NOT_BUILT, NO_LOSS or WRONG.
        how: its loss is counted, or why not.
        version: of transformers.
    """

    task: str
    name: str
    outcome: str
    how: str
    version: str = transformers.__version__


def classes(tasks: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    """(task, model type, class) of all automatic mappings that may have a loss, each class once."""
    seen: set[str] = set()
    for mapping in sorted(vars(modeling_auto)):
        if not (mapping.startswith("MODEL_FOR_") and mapping.endswith("_MAPPING_NAMES")):
            continue
        task = mapping.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in names if isinstance(names, tuple | list) else (names,):
                if name not in seen and (not tasks or task in tasks):
                    seen.add(name)
                    yield task, model_type, name


def walk(task: str, model_type: str, name: str) -> Row:
    """Build a class, and compare its loss and gradient over several cuts with those of the whole batch."""
    try:
        with _limited():
            model = tiny(name, model_type, task)
            batch = batch_for(model, task)
            with torch.no_grad(), LossCalls() as calls:
                outputs = model(**batch)
    except UnknownError as error:
        return Row(task, name, NOT_BUILT, str(error))
    except Exception as error:  # whatever the library raises for a config or a batch
        return Row(task, name, NOT_BUILT, _in_short(error))
    if getattr(outputs, "loss", None) is None:
        return Row(task, name, NO_LOSS, "its forward pass returns none for these inputs")
    try:
        with _limited():
            return compared(model, batch, task, how(calls, batch))
    except TimeoutError as error:
        return Row(task, name, NOT_BUILT, _in_short(error))


def compared(model: nn.Module, batch: dict[str, Tensor], task: str, counted: str) -> Row:
    """The row of a model, which is trained on: its gradients are those of the last cut then."""
    name = type(model).__name__
    whole = model(**batch).loss
    if not whole.isfinite():
        return Row(task, name, NOT_BUILT, "its loss of this batch is not finite")
    whole.backward()
    expected = _gradients(model)
    model.zero_grad()
    placed = lockstep.place(model, "single")
    for cut in CUTS:
        pieces = {key: value.split(cut) if value.ndim else [value] * len(cut) for key, value in batch.items()}
        try:
            loss = placed.backward(*({key: value[i] for key, value in pieces.items()} for i in range(len(cut))))
        except UsageError as error:
            return Row(task, name, REFUSED, error.what.split(":")[0])
        found = _gradients(model)
        placed.zero_grad()
        off = abs(float(loss - whole.detach())) / max(1.0, abs(float(whole.detach())))
        steep = float((found - expected).norm() / expected.norm().clamp(min=1e-3))
        if not (off < TOLERANCE and steep < 10 * TOLERANCE):
            return Row(task, name, WRONG, f"cut as {cut}: loss {off:.1e} off, gradient {steep:.1e}; {counted}")
    return Row(task, name, EQUAL, counted)


def how(calls: LossCalls, batch: dict[str, Tensor]) -> str:
    """What a loss is a mean over, in words, from what torch's loss functions divided by."""
    if not calls.means or calls.others:
        return "samples, which the comparison of cuts confirms"
    if all(mean.of_elements for mean in calls.means):
        return "elements of the outputs, as many for each sample"
    labels = batch.get("labels")
    divisors = {float(mean.divisor) for mean in calls.means}
    if len(divisors) == 1 and labels is not None and labels.ndim > 1:
        for shift, words in ((0, ""), (1, ", shifted by the model")):
            for ignored in (-100, 255):
                if divisors == {float((labels[..., shift:] != ignored).sum())}:
                    return f"labels that are not {ignored}{words}"
    return "samples" if divisors == {float(SAMPLES)} else "targets that its loss function does not ignore"


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"it takes more than {_SECONDS} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # of the processor: other programs may keep it busy
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _in_short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:90] + ("…" if len(text) > 90 else "")


def page(rows: Sequence[Row]) -> str:
    """The page."""
    numbers = {outcome: sum(row.outcome == outcome for row in rows) for outcome in (EQUAL, REFUSED, NO_LOSS, NOT_BUILT)}
    cuts = " and ".join("+".join(map(str, cut)) for cut in CUTS)
    versions = ", ".join(sorted({row.version for row in rows}))
    lines = [
        "# Hugging Face models, one by one",
        "",
        "<!-- Written by: python -m benchmarks.families --write -->",
        "",
        f"How the loss of each class in the automatic mappings of transformers {versions} is counted.",
        "The reference is the author's own loop: loss and gradient of `model(**batch)` for a whole batch, with targets",
        f"left out here and there. A step over the same samples in the cuts {cuts} is equal to it",
        f"to {TOLERANCE:g}, or refused before it trains. What is refused trains with a `count(batch)` of its own, or",
        "as one micro-batch a step. Models are tiny, in evaluation mode, with random values.",
        "",
        f"{numbers[EQUAL]} classes are equal, {numbers[REFUSED]} refused, {numbers[NO_LOSS]} have no loss, and",
        f"{numbers[NOT_BUILT]} were not built: no tiny config or batch was found by rule, or they need a package or a",
        "file. A class without a row has not been walked.",
    ]
    for task in dict.fromkeys(row.task for row in rows):
        lines += ["", f"## {task.replace('_', ' ').capitalize()}", "", "| class | | counts |", "|---|---|---|"]
        lines += [f"| {row.name} | {row.outcome} | {row.how.replace('|', '/')} |" for row in rows if row.task == task]
    return "\n".join(lines) + "\n"


def recorded(path: Path = ROWS) -> list[Row]:
    """The rows that were written down, by task and name; the newest of each class."""
    rows = [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    newest = {(row.task, row.name): row for row in rows}
    return [newest[key] for key in sorted(newest)]


def main() -> None:
    """Walk the tasks, write down a row for each class, and the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="mappings, by their middle part (CAUSAL_LM); unset: all")
    parser.add_argument("--write", action="store_true", help="walk nothing more, and write the page")
    parser.add_argument("--missing", action="store_true", help="only what has no row, or was not built")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if arguments.write:
        PAGE.write_text(page(recorded()))
        return
    done = {row.name for row in recorded() if row.outcome != NOT_BUILT} if arguments.missing else set()
    for task, model_type, name in classes(arguments.tasks):
        if name not in done:
            row = walk(task, model_type, name)
            print(f"{row.task:32} {row.name:48} {row.outcome:10} {row.how}", flush=True)
            with ROWS.open("a") as file:
                file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
