"""Starts ranks on this machine and on several (`train`), and from a script or a notebook (`spawn`).

    cli → train.train → launcher.launch → agent (torch's elastic agent) → python -m lockstep …
    (worker.run_as_worker)

What a process is to be, a rank or a launcher, `roles` says; `refusals` has all that is looked at
before a rank is started.

A worker that fails writes a failure file (`lockstep/failures/`); the launcher reads the files and
prints one message. This room loads torch only when ranks are started.
"""
