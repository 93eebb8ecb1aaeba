"""A rank's step and calls, written down for the launcher and for the machine's other ranks.

Each rank of a machine has a file in one folder, mapped into memory, in which it notes where it is:
its step, its last calls of public functions, and when its work last went forward. The launcher
reads the files to find ranks that hang. Each rank reads the others' files when it begins a public
function with a collective, since a call that only some ranks make would wait for ever; under
another launcher, in a folder that one of them creates. Long work inside a call, such as a write to
a slow disk, says that it goes forward: then it is slow, and does not hang. The clock is the
machine's monotonic one.

    files.py         what stands in a rank's file, byte by byte
    writer.py        the heartbeat of this process, and what is marked with it
    watcher.py       what the launcher reads
    callers.py       the line of the user's code that made a call
    call_errors.py   the errors about calls that only some ranks make

Nothing here imports torch.
"""
