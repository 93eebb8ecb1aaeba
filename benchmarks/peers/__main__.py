"""What `lockstep verify SCRIPT` says of other libraries' own example loops, on small data.

python -m benchmarks.peers [--out benchmarks/results/peers.md]
"""

import argparse
import time
from pathlib import Path

from benchmarks.page import machine, page, tell
from lockstep.verify.command import verify_script

# script → (arguments, the example in whose idiom it is)
SCRIPTS: dict[str, tuple[tuple[str, ...], str]] = {
    "torch_ddp": ((), "pytorch/examples, distributed/ddp-tutorial-series"),
    "torch_mingpt": ((), "pytorch/examples, distributed/minGPT-ddp"),
    "accelerate_nlp": ((), "Accelerate, examples/nlp_example.py"),
    "accelerate_nlp 2": (("2",), "Accelerate, examples/by_feature/gradient_accumulation.py"),
    "accelerate_padded": ((), "Accelerate, quick tour; dropout, texts of unequal lengths"),
    "fabric_classifier": (("{n}",), "Fabric, examples/fabric/image_classifier"),
    "fabric_padded": (
        ("{n}",),
        "Fabric, convert PyTorch to Fabric; dropout, texts of unequal lengths",
    ),
    "lightning_classifier": (("{n}",), "Lightning, examples/pytorch/basics"),
    "transformers_clm": ((), "transformers, examples/pytorch/language-modeling/run_clm.py"),
}


def row(name: str) -> str:
    """Judge a script on two ranks, and return its row."""
    arguments, example = SCRIPTS[name]
    began = time.monotonic()
    path = Path(__file__).parent / f"{name.split()[0]}.py"
    (outcome,) = verify_script(str(path), arguments, [2], steps=3)
    seconds = time.monotonic() - began
    marks = [
        f"{'✗' if found.is_error else '≈'} {found.kind}: {found.text}"
        + (f"; do: {found.fix}" if found.fix else "")
        for found in outcome.causes
    ]
    says = (
        "; ".join(marks)
        or outcome.failed
        or outcome.not_judged
        or f"equal up to {outcome.rounding:.0e}"
    )
    says = " ".join(says.split()).replace("|", "/")
    cells = (f"`{name}`", example, "✓" if outcome.passed else "✗", says, f"{seconds:.0f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.only or SCRIPTS:
        rows.append(row(name))
        print(rows[-1], flush=True)
    words = [
        (
            "The loops are of our own writing in the idiom of the example that is named, on data"
            " and models that are made"
        ),
        "here; two ranks, three steps, compared with one process that is given the ranks' samples.",
    ]
    header = "| script | in the idiom of | passes | what verify says | seconds |"
    command = "python -m benchmarks.peers --out benchmarks/results/peers.md"
    tell(page("Peers' own examples, judged", command, machine(), words, header, rows), given.out)


if __name__ == "__main__":
    main()
