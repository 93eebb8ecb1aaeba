"""Published figures against this package's, a table for results/published.md.

python -m benchmarks.published [--write]
"""

import sys
from pathlib import Path

from lockstep.plan.published import figures

RESULT = Path(__file__).parent / "results" / "published.md"


def main() -> int:
    rows, failed = [], 0
    for figure in figures():
        predicted = figure.predicted()
        error = predicted / figure.published - 1
        failed += abs(error) > figure.within
        note = " (calibration)" if figure.calibrates else ""
        rows.append(
            f"| {figure.what}{note} | {figure.published:.4g} | {predicted:.4g} | {error:+.1%} | {figure.within:.0%} "
            f"| {figure.source} |"
        )
        print(rows[-1], flush=True)
    text = "\n".join(
        [
            "# Published figures, and what `lockstep plan` says",
            "",
            "`python -m benchmarks.published --write`",
            "",
            "| figure | published | here | error | allowed | source |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    if "--write" in sys.argv:
        RESULT.write_text(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
