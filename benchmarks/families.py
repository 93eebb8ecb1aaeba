"""How the loss of each class of transformers is counted: the page docs/families.md.

    python -m benchmarks.families [--missing] [TASK …]    # some twenty minutes for all
    python -m benchmarks.families --write

Every class of the library's automatic mappings is built in a tiny size (`benchmarks.tiny_models`).
The reference is the author's own loop in plain PyTorch: the loss and gradient of `model(**batch)`
for the whole batch. Against it stands a step of Lockstep over the same samples in several cuts. A
class is equal to 1e-5, or refused before the step.
"""

import argparse
import gc
import inspect
import itertools
import json
import os
import re
import signal
import warnings
from collections.abc import Collection, Iterator, Sequence
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
from benchmarks.tiny_models import SAMPLES, VARIANTS, UnknownError, batches, build, config_class
from lockstep.errors import UsageError
from lockstep.models.observed import LossCalls

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
ROWS = Path(__file__).parent / "results" / "families.jsonl"
CUTS = ((2, 2), (1, 3))
TOLERANCE = 1e-5
_SECONDS = 30  # for one class

EQUAL = "equal"
REFUSED = "refused"
NOT_BUILT = "not built"
NO_LOSS = "no loss"
WRONG = "WRONG"


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


def walk_all(tasks: Sequence[str] = (), done: Collection[str] = ()) -> Iterator[Row]:
    """Walk the classes of these tasks, all if there are none; leave out those that are done."""
    for number, (task, model_type, name) in enumerate(classes(tasks)):
        if name not in done:
            yield walk(task, model_type, name)
        if not number % 20:
            gc.collect()  # models are cycles of references


def walk(task: str, model_type: str, name: str) -> Row:
    """Build a class, and compare its loss and gradient over several cuts with those of the whole
    batch.
    """
    try:
        kind = config_class(name, model_type) and getattr(transformers, name)
        if _takes_no_labels(kind):
            return Row(task, name, NO_LOSS, "its forward pass takes no labels")
        if model_type in _NOT_COMPARABLE:
            return Row(task, name, NOT_BUILT, _NOT_COMPARABLE[model_type])
        with _limited():
            model, batch, loss, calls = _first_that_runs(task, model_type, name)
        if loss is None:
            return Row(task, name, NO_LOSS, "its forward pass returns none for these inputs")
        with _limited():
            return compared(model, batch, task, how(calls, batch))
    except Exception as error:  # whatever the library raises for a config or a batch
        if _UNTRAINED.search(str(error)):
            return Row(task, name, NO_LOSS, f"the library says: {_in_short(error)}")
        return Row(task, name, NOT_BUILT, _in_short(error))


_NOT_COMPARABLE = {
    "levit": (
        "evaluation keeps a bias of the pass before, without its gradient; training has batch norm"
        " over samples"
    )
}
_UNTRAINED = re.compile(r"train.{0,60}(not|n't)\b|(not|n't)\b.{0,60}train", re.IGNORECASE)
_LABELS = re.compile("label|return_loss|start_positions|future_values|target|masked_pos|mask_time")


def _takes_no_labels(kind: type[Any]) -> bool:
    """Nothing in the forward pass of the class is a label, or a loss."""
    # what is masked is an input of encoders, too
    labels = [name for name in _labels_of(kind) if "mask" not in name]
    return not labels and "loss" not in inspect.getsource(inspect.unwrap(kind.forward))


def _labels_of(model: Any) -> list[str]:
    parameters = inspect.signature(inspect.unwrap(model.forward)).parameters
    return [name for name in parameters if _LABELS.search(name)]


def _first_that_runs(
    task: str, model_type: str, name: str
) -> tuple[Any, dict[str, Any], Tensor | None, LossCalls]:
    """(model, batch, loss, calls) of the first variant with a finite loss; or of the first that
    runs without one.

    Raises:
        Exception: that of the first variant, where none runs.
    """
    problem: Exception | None = None
    without = None
    for variant in VARIANTS:
        try:
            model = build(name, model_type, task, variant)
            for batch in batches(model, task):
                try:
                    with torch.no_grad(), warnings.catch_warnings(), LossCalls() as calls:
                        # labels of another shape
                        warnings.filterwarnings("error", message="Using a target size")
                        loss = getattr(model(**batch), "loss", None)
                    if isinstance(loss, Tensor) and loss.ndim == 0 and loss.isfinite():
                        return model, batch, loss, calls
                    if any(_LABELS.search(name) for name in batch) or not _labels_of(model):
                        without = without or (model, batch, None, calls)
                    if loss is not None:
                        problem = problem or UnknownError("its loss of these batches is not finite")
                except TimeoutError:
                    raise
                except Exception as error:  # whatever the library raises for a batch
                    if _UNTRAINED.search(str(error)):
                        raise
                    problem = problem or error
        except TimeoutError:
            raise
        except Exception as error:  # whatever the library raises for a config
            if _UNTRAINED.search(str(error)):
                raise
            problem = problem or error
    if without is not None and not isinstance(problem, UnknownError):
        return without
    problem = problem or UnknownError("no rule makes labels for it")
    raise problem


def compared(model: nn.Module, batch: dict[str, Any], task: str, counted: str) -> Row:
    """The row of a model: in float32, and where rounding makes more than the tolerance, in float64,
    too.
    """
    row = _compared(model, batch, task, counted)
    if row.outcome != WRONG:
        return row
    model.zero_grad()
    try:
        return _compared(model.double(), _in_float64(batch), task, counted)
    except RuntimeError:  # its author mixes types
        return row


def _in_float64(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_float64(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_in_float64(each) for each in value]
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _compared(model: nn.Module, batch: dict[str, Any], task: str, counted: str) -> Row:
    name = type(model).__name__
    whole = model(**batch).loss
    whole.backward()
    expected = _gradients(model)
    model.zero_grad()
    placed = lockstep.place(model, "single")
    for cut in CUTS:
        pieces = {key: _cut(value, cut) for key, value in batch.items()}
        try:
            loss = placed.backward(
                *({key: value[i] for key, value in pieces.items()} for i in range(len(cut)))
            )
        except UsageError as error:
            return Row(task, name, REFUSED, error.what.split(":")[0])
        found = _gradients(model)
        placed.zero_grad()
        off = abs(float(loss - whole.detach())) / max(1.0, abs(float(whole.detach())))
        steep = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
        if not (off < TOLERANCE and steep < TOLERANCE):
            return Row(
                task,
                name,
                WRONG,
                f"cut as {cut}: loss {off:.1e} off, gradient {steep:.1e}; {counted}",
            )
    return Row(task, name, EQUAL, counted)


def _cut(value: Any, cut: tuple[int, ...]) -> Sequence[Any]:
    """A batch's tensor, or its list with a member for each sample, in pieces; other values are each
    piece's.
    """
    if isinstance(value, Tensor) and value.ndim:
        rows = value.shape[0] // sum(cut)  # several for each sample: channels of a sound
        return value.split([rows * samples for samples in cut])
    if isinstance(value, list):
        ends = list(itertools.accumulate(cut, initial=0))
        return [value[start:end] for start, end in itertools.pairwise(ends)]
    return [value] * len(cut)


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
    return (
        "samples"
        if divisors == {float(SAMPLES)}
        else "targets that its loss function does not ignore"
    )


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"it takes more than {_SECONDS} s")

    before = signal.signal(signal.SIGPROF, late)
    # of the processor: other programs may keep it busy
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _in_short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if package := re.search(r"requires the (\S+) library", text):
        return f"needs the package {package[1]}"
    text = text.removeprefix(
        "Class validation error for validator 'validate_architecture': ValueError: "
    )
    return text[:90] + ("…" if len(text) > 90 else "")


def page(rows: Sequence[Row]) -> str:
    """The page."""
    numbers = {
        outcome: sum(row.outcome == outcome for row in rows)
        for outcome in (EQUAL, REFUSED, NO_LOSS, NOT_BUILT)
    }
    cuts = " and ".join("+".join(map(str, cut)) for cut in CUTS)
    versions = ", ".join(sorted({row.version for row in rows}))
    lines = [
        "# Hugging Face models, one by one",
        "",
        "<!-- Written by: python -m benchmarks.families --write -->",
        "",
        (
            f"How the loss of each of the {len(rows)} classes in the automatic mappings of"
            f" transformers {versions} is"
        ),
        (
            "counted. The reference is the author's own loop in plain PyTorch: loss and gradient of"
            " `model(**batch)` for a"
        ),
        (
            "whole batch, with targets left out here and there, and with another number of objects"
            " in each image. Against"
        ),
        f"it stands one step of Lockstep over the same samples as micro-batches of {cuts} samples.",
        "",
        "| | classes | |",
        "|---|---|---|",
        (
            f"| equal | {numbers[EQUAL]} | loss and gradient of all parameters are the reference's"
            f" to {TOLERANCE:g} |"
        ),
        (
            f"| refused | {numbers[REFUSED]} | an error before the step: no count was found that"
            " makes it equal |"
        ),
        (
            f"| no loss | {numbers[NO_LOSS]} | its forward pass returns none, or its author has not"
            " written one |"
        ),
        (
            f"| not built | {numbers[NOT_BUILT]} | it needs a package, or no rule made a tiny"
            " config or a batch for it |"
        ),
        "",
        (
            "The gradient is compared as one vector: the norm of the difference over the norm of"
            " the reference. Both are"
        ),
        (
            "compared in float32; where float32 rounds more than the tolerance, in float64. Models"
            " are tiny, with random"
        ),
        (
            "values, without dropout, and in evaluation mode (Reformer in training mode, as it"
            " insists on it): batch"
        ),
        "normalization over the samples of a micro-batch is not part of the comparison.",
        "",
        (
            "A class that is refused trains with a `count(batch)` of its own"
            " ([how](how_to/loss.md)), or with one"
        ),
        (
            "micro-batch a step on one rank. Why a class was not built is mostly said in the"
            " library's own words."
        ),
        "",
        *_decoders(PAGE.read_text()),
    ]
    for task in dict.fromkeys(row.task for row in rows):
        lines += [
            "",
            f"## {task.replace('_', ' ').capitalize()}",
            "",
            "| class | | counts |",
            "|---|---|---|",
        ]
        lines += [
            f"| {row.name} | {row.outcome} | {_in_a_cell(row.how)} |"
            for row in rows
            if row.task == task
        ]
    return "\n".join(lines) + "\n"


def _decoders(text: str) -> list[str]:
    """Return the section of the page that `tests.parity.decoders` writes, as it is."""
    section = text[text.index("## Decoders that have an adapter") :]
    return section[: section.index("\n## ")].rstrip().splitlines()


def _in_a_cell(text: str) -> str:
    return (
        text.replace("|", "/")
        .replace("<", "&lt;")
        .replace("`", "")
        .replace("*", "\\*")
        .replace("_", "\\_")
    )


def recorded(path: Path = ROWS) -> list[Row]:
    """The rows that were written down, by task and name; the newest of each class."""
    rows = (
        [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    )
    newest = {row.name: row for row in rows}
    return sorted(newest.values(), key=lambda row: (row.task, row.name))


def record(rows: Sequence[Row], path: Path = ROWS) -> None:
    """Write down rows in place of those that were."""
    path.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))


def main() -> None:
    """Walk the tasks, write down a row for each class, and the page if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tasks", nargs="*", help="mappings, by their middle part (CAUSAL_LM); unset: all"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="walk nothing; write the page, and keep the newest row of each class",
    )
    parser.add_argument(
        "--missing", action="store_true", help="only what has no row, or was not built"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if arguments.write:
        rows = recorded()
        record(rows)
        PAGE.write_text(page(rows))
        return
    done = (
        {row.name for row in recorded() if row.outcome != NOT_BUILT} if arguments.missing else set()
    )
    for row in walk_all(arguments.tasks, done):
        print(f"{row.task:32} {row.name:48} {row.outcome:10} {row.how}", flush=True)
        with ROWS.open("a") as file:
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
