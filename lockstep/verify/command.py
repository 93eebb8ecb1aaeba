"""`lockstep verify CONFIG --against …`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import load_config, require_runnable
from lockstep.errors import EXIT_DONE, EXIT_FAILED
from lockstep.verify import DEFAULT_STEPS, verify
from lockstep.verify.table import as_json, text


def run(
    path: str | Path, overrides: Sequence[str], *, against: str | None, steps: int | None, in_json: bool
) -> int:  # fmt: skip
    """Verify what a config trains.

    Returns:
        0 where all topologies take the same steps, else 1.
    """
    config = load_config(path, overrides)
    require_runnable(config)
    topologies = None if against is None else [part.strip() for part in against.split(",") if part.strip()]

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    verdict = verify(config, topologies, steps=DEFAULT_STEPS if steps is None else steps, report=report)
    print(json.dumps(as_json(verdict), indent=2) if in_json else text(verdict))
    return EXIT_DONE if verdict.passed else EXIT_FAILED
