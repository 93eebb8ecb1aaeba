"""Implements `lockstep report RUN`: shows a run in one self-contained HTML page. Nothing here imports torch.

read      reads the run directory into `RunData`, also of a run that crashed or is still going
advice    derives from it what to do next, each with its evidence
figures   describes figures as plain data, which draw.js draws, and keeps them small
charts    makes the figures of a run, or of several
index     compares all runs of a folder on one page
page      puts figures and text into the page, and writes it or serves it, following the run
scaling   `lockstep bench scaling`: one config on several numbers of ranks
"""

from lockstep.report.page import page_data, render
from lockstep.report.read import RunData, read_run

__all__ = ["RunData", "page_data", "read_run", "render"]
