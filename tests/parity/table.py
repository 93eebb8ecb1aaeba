"""The tables of docs/parity.md: what the parity tests run, read off their cases.

python -m tests.parity.table --write
"""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.parity import foreign_kinds, pipelines
from tests.parity.matrix import STRATEGIES, Case
from tests.parity.parts import Part, parts, parts_of_make_test

PAGE = Path(__file__).parents[2] / "docs/parity.md"
BEGIN = "<!-- table of {}: python -m tests.parity.table --write -->"
END = "<!-- end of the table -->"
NAMES = {
    **{kind: f"`fsdp`, `{kind}`" for kind in STRATEGIES if "shard" in kind},
    "tied": "transformer with tied embeddings",
    "hf": "Llama (`hf:`)",
    "llama": "Llama (`hf:`)",
    "gpt2": "GPT-2 (`hf:`)",
    "traced": "one that torch traces",
    "sequential": "`nn.Sequential`",
    "bdh": "BDH",
    "free_transformer": "Free Transformer",
    "vae": "VAE",
}
HEADER = [
    "strategy",
    "ranks",
    "precision",
    "accumulation",
    "checkpointing",
    "compiled",
    "cases: `make test`, all",
]


class Cell(NamedTuple):
    """A case as the table counts it."""

    strategy: str
    model: str
    ranks: int
    precision: str
    accumulation: str
    checkpointing: str
    compiled: bool


def data_parallel(part: Part) -> list[Cell]:
    return [_cell(case, part.ranks) for case in part.cases]


def _cell(case: Case, ranks: int) -> Cell:
    more: dict[str, Any] = dict(case.more)
    return Cell(
        case.strategy,
        case.model,
        ranks,
        more.get("precision.mode", "fp32"),
        str(case.accumulation),
        case.checkpointing,
        bool(more.get("training.compile")),
    )


def of_pipelines(*, whole: bool) -> list[Cell]:
    """Ten micro-batches a step, of one pipeline or shared by two."""
    cases = [case for ranks in (2, 4) for case in pipelines.grid(ranks, whole=whole)]
    return [
        Cell("pipeline", c.model, c.ranks, "fp32", "5" if "*" in c.layout else "10", "none", False)
        for c in cases
    ]


def cells(*, whole: bool) -> list[Cell]:
    """Every case; unless `whole`, those that `make test` runs."""
    chosen = parts() if whole else parts_of_make_test()
    found = [cell for part in chosen for cell in data_parallel(part)]
    return [*found, *of_pipelines(whole=whole)]


def table() -> str:
    """In Markdown: the models, and a row for each strategy."""
    some = cells(whole=False)
    everything = cells(whole=True)
    lines = [*models(everything), "", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for strategy in ("dp", *STRATEGIES, "pipeline"):
        mine = [cell for cell in everything if cell.strategy == strategy]
        columns = [
            NAMES.get(strategy, f"`{strategy}`"),
            listed(str(cell.ranks) for cell in mine),
            listed(cell.precision for cell in mine),
            listed(cell.accumulation for cell in mine),
            listed(cell.checkpointing for cell in mine),
            "yes" if any(cell.compiled for cell in mine) else "",
            f"{sum(cell.strategy == strategy for cell in some)}, {len(mine)}",
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def models(everything: list[Cell]) -> list[str]:
    """Two lines; where a strategy lacks a model, it says so."""
    of = {
        strategy: listed(
            NAMES.get(cell.model, cell.model) for cell in everything if cell.strategy == strategy
        )
        for strategy in ("dp", *STRATEGIES, "pipeline")
    }
    piped = of.pop("pipeline")
    [others] = set(of.values())  # the same ones under every strategy
    return [f"Models: {others}.", f"Under pipelines, with seven schedules: {piped}."]


def listed(values: Iterable[str]) -> str:
    """Each value once, in the order in which they came; numbers by size."""
    once = list(dict.fromkeys(values))
    return ", ".join(sorted(once, key=int) if all(value.isdigit() for value in once) else once)


FOREIGN = ("ddp", "fsdp", "hybrid", "pipeline", "tensor", "context")


def of_foreign_models() -> str:
    """In Markdown: a row for each foreign model, a column for each strategy."""
    lines = [
        "| model | " + " | ".join(f"`{name}`" for name in FOREIGN) + " |",
        "|" + "---|" * (len(FOREIGN) + 1),
    ]
    for model in foreign_kinds.MODELS.values():
        columns = [named(model.refusal(f"{strategy}:2")) for strategy in FOREIGN]
        lines.append("| " + " | ".join([model.title, *columns]) + " |")
    return "\n".join(lines)


def named(refusal: str) -> str:
    """What a cell says where a message names this."""
    return f"refused: `{refusal}`" if refusal else "equal"


def in_page(text: str) -> str:
    """The page with the tables as they should be."""
    for name, made in {"strategies": table(), "foreign models": of_foreign_models()}.items():
        begin = BEGIN.format(name)
        new = f"{begin}\n{made}\n{END}"
        pattern = f"{re.escape(begin)}.*?{re.escape(END)}"
        text, found = re.subn(pattern, lambda _, new=new: new, text, flags=re.DOTALL)
        assert found == 1, f"{PAGE.name} lacks the lines {begin} and {END}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="into docs/parity.md; else it is printed"
    )
    if parser.parse_args().write:
        PAGE.write_text(in_page(PAGE.read_text()))
    else:
        print(table(), of_foreign_models(), sep="\n\n")


if __name__ == "__main__":
    main()
