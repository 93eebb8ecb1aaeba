"""Finds what has failed, and why: one message, about the first cause.

A rank that fails writes a file (`failure`); where none ends and none goes forward, the launcher
looks at who waits for whom (`hang`), and asks for stacks (`stacks`). In a script or a notebook,
what Lockstep knows of an error is added to it (`explanations`). This room does not load torch.
"""
