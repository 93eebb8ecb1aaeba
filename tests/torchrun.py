"""Runs torchrun, whose ranks are forks of this fork's prepared process (`tests/forked.py`)."""

import sys

from torch.distributed.run import main

from lockstep.prepared.process import own_prepared_process
from lockstep.prepared.rank_starts import RankStarter
from lockstep.torch_compat.rank_processes import started_by

if __name__ == "__main__":
    with started_by(RankStarter(own_prepared_process(), print)):
        sys.exit(main())
