"""Runs as a worker of pytest-xdist, in a fork (`tests/forked.py`): the words in which execnet
starts its other side.
"""

import sys

if __name__ == "__main__":  # multiprocessing imports it in what a worker starts
    exec(eval(sys.stdin.readline()))
