"""`lockstep report RUN`: what a run did, as one HTML page that needs nothing else. Nothing here imports torch.

read      the run directory → Run, also of a run that crashed or is still going
advice    Run → what to do next, each with its evidence
charts    Run → figures, as plain data for plotly.js
page      figures and words → the page
live      the page, served on loopback, following the run
"""

from lockstep.report.page import page_data, render
from lockstep.report.read import Run, read_run

__all__ = ["Run", "page_data", "read_run", "render"]
