"""What is said where a sink's library is not installed."""

import logging


def left_out(sink: str, extra: str) -> None:
    """One warning; the run goes on without the sink."""
    logging.getLogger("lockstep").warning(
        "warning: the sink %s is left out: its package is not installed"
        " (pip install 'lockstep-train[%s]', or take it out of monitor.sinks)",
        sink,
        extra,
    )
