"""Training scripts in the idiom of public examples, which know nothing of Lockstep.

    torchrun --nproc-per-node 2 benchmarks/silent_bugs/scripts/NAME.py [FAULT]

Without a fault they are sound. Each is of our own writing and stands alone, as its kind is
published. `benchmarks.silent_bugs.idioms` lists them, with the cause of each fault and where it is
planted.
"""
