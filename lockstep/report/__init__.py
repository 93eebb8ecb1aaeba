"""Implements `lockstep report RUN`: shows a run in one self-contained HTML page. Nothing here imports torch."""

from lockstep.report.page import page_data, render
from lockstep.report.read import RunData, read_run

__all__ = ["RunData", "page_data", "read_run", "render"]
