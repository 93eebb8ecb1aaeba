"""Runs as a worker of pytest-xdist, in a fork (`tests/forked.py`): the words in which execnet starts its other side."""

import sys

exec(eval(sys.stdin.readline()))
