"""Starting ranks: on this machine and on several (`local`), from a script or a notebook (`spawn`).

    cli → train → local.launch → agent (torch's elastic agent) → python -m lockstep … (worker.run_as_worker)

A worker writes what went wrong to a file (`failures`); the launcher reads the files and prints one message. Nothing
here loads torch until ranks are started.
"""
