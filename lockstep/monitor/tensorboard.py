"""Records as TensorBoard scalars, by their own names: loss, grad_norm, lr, eval_loss …"""

import logging
from typing import Any

from lockstep.monitor.sinks import Row, Sink
from lockstep.records import RunDirectory

_NOT_PLOTTED = {"step", "time", "skipped"}


def open_tensorboard(run: RunDirectory) -> Sink | None:
    """A sink that writes to `RUN/tensorboard`, or None, having said so, where the library is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logging.getLogger("lockstep").warning(
            "warning: the sink tensorboard is left out: the package tensorboard is not installed"
            " (pip install 'lockstep-train[tensorboard]', or take it out of monitor.sinks)"
        )
        return None
    return _TensorBoard(SummaryWriter(str(run.tensorboard)))


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def on_step(self, row: Row) -> None:
        for name, value in row.items():
            if name not in _NOT_PLOTTED and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, global_step=row["step"], walltime=row.get("time"))

    on_eval = on_step

    def close(self) -> None:
        self._writer.close()
