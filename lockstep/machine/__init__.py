"""This machine and this process: accelerators, cores, network, signals, what a run says."""
