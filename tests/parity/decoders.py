"""The table of decoders in docs/families.md: what came out of each strategy for each family with an
adapter.

python -m tests.parity.decoders --write
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.models.hf_decoder import FAMILIES
from tests.models.decoders import sizes
from tests.parity.foreign import VOCAB, Foreign, as_it_is, library, named, padded_text

PAGE = Path(__file__).parents[2] / "docs/families.md"
BEGIN = "<!-- table of decoders: python -m tests.parity.decoders --write -->"
END = "<!-- end of the table -->"
TOPOLOGIES = ("ddp:2", "fsdp:2", "pipeline:2", "tensor:2", "context:2")
COLUMNS = [(topology, "object:") for topology in TOPOLOGIES] + [
    (topology, "hf:") for topology in TOPOLOGIES[2:]
]
_WITHOUT_DROPOUT = {"attention_dropout": 0.0}
_OF_GPT2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


# no field of the config of this family
_UNNAMED = {"ernie4_5": "attention_dropout", "qwen3_moe": "head_dim"}


def _config(family: str) -> dict[str, Any]:
    found = sizes(family, vocab_size=VOCAB, **(_OF_GPT2 if family == "gpt2" else _WITHOUT_DROPOUT))
    found.pop(_UNNAMED.get(family, ""), None)
    return found


DECODERS: dict[str, Foreign] = {
    **{
        f"object:{family}": Foreign(
            family,
            library("AutoModelForCausalLM", family, **_config(family)),
            padded_text,
            piped=as_it_is,
        )
        for family in sorted(FAMILIES)
    },
    **{f"hf:{family}": named(family, family, {}, **_config(family)) for family in sorted(FAMILIES)},
}
"""The library's own objects, and what Lockstep builds by their names."""


def outcomes(families: Sequence[str]) -> dict[tuple[str, str], str]:
    """Train each on two ranks, reproducible and not: (model, topology) → what came out."""
    from tests.parity.test_foreign import problem, run_all
    from tests.ranks import run_ranks

    cases = [
        (f"{kind}{family}", topology, reproducible)
        for family in families
        for topology, kind in COLUMNS
        for reproducible in (True, False)
    ]
    found: dict[tuple[str, str], str] = {}
    for case, result in zip(cases, run_ranks(run_all, 2, cases, timeout=3000)[0], strict=True):
        name, topology, _ = case
        if not isinstance(result, str) and result.refused:
            text = "refused"
        else:
            text = problem(case, result) or "equal"
        before = found.setdefault((name, topology), text)
        found[name, topology] = text if before == "equal" else before
    return found


def table() -> str:
    """In Markdown: a row for each family, a column for each strategy."""
    header = [f"`{topology}`" + (", `hf:`" if kind == "hf:" else "") for topology, kind in COLUMNS]
    lines = ["| family | " + " | ".join(header) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    return "\n".join([*lines, *rows(sorted(FAMILIES))])


def rows(families: Sequence[str]) -> list[str]:
    found = outcomes(families)
    cells = {
        family: [found[f"{kind}{family}", topology] for topology, kind in COLUMNS]
        for family in families
    }
    return ["| " + " | ".join([f"`{family}`", *cells[family]]) + " |" for family in families]


def in_page(text: str) -> str:
    """The page with the table as it should be."""
    made = f"{BEGIN}\n{table()}\n{END}"
    new, found = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: made, text, flags=re.DOTALL
    )
    assert found == 1, f"{PAGE.name} lacks the lines {BEGIN} and {END}"
    return new


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="into docs/families.md; else it is printed"
    )
    if parser.parse_args().write:
        PAGE.write_text(in_page(PAGE.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
