"""What is logged where a sink's library is not installed."""

import logging


def left_out(sink: str, extra: str | None, error: ImportError | None = None) -> None:
    """Warn once; the run goes on without the sink.

    Args:
        extra: of Lockstep's package that installs the library; None for a sink of the user's own.
    """
    why = "its package is not installed" if extra is not None or error is None else str(error)
    fix = f"pip install 'lockstep-train[{extra}]'" if extra is not None else "install it"
    logging.getLogger("lockstep").warning(
        "warning: the sink %s is left out: %s (%s, or take it out of monitor.sinks)", sink, why, fix
    )
