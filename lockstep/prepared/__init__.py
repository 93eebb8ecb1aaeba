"""Processes that have imported torch and Lockstep once, and the ranks that are forks of them.

    launcher, verify, … → rank_starts (fork, or a fresh process, and why)
    → process (asks for forks) ⇄ fork_server (the prepared process)
    warm (a later command finds one that is left) ⇄ warm_server

A fork is made before any thread, CUDA context or generator is used: what forbids one is looked for,
and a rank is then started afresh, and the run says so. This room loads torch in the prepared
process alone.
"""
