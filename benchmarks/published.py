"""Published figures against this package's, a table for results/published.md.

python -m benchmarks.published [--write]
"""

import sys

from benchmarks.page import RESULTS, page, tell
from benchmarks.published_figures import figures


def main() -> int:
    rows = []
    failed = 0
    for figure in figures():
        predicted = figure.predicted()
        error = predicted / figure.published - 1
        failed += abs(error) > figure.within
        note = " (calibration)" if figure.calibrates else ""
        rows.append(
            f"| {figure.what}{note} | {figure.published:.4g} | {predicted:.4g} | {error:+.1%} |"
            f" {figure.within:.0%} | {figure.source} |"
        )
        print(rows[-1], flush=True)
    text = page(
        "Published figures, and what `lockstep plan` says",
        "python -m benchmarks.published --write",
        "",
        ["The constants of the plan were set by the rows that say so, and by no other."],
        "| figure | published | here | error | allowed | source |",
        rows,
    )
    tell(text, RESULTS / "published.md" if "--write" in sys.argv else None)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
