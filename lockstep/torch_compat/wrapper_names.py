"""Attributes under which torch's wrappers of a module hold it.

They stand in the keys of its state dict.

Public torch: none; each wrapper strips its own name from a state dict, in a process that has the
wrapped module. Checkpoints of others are read without it. Seen to work: torch 2.11.0 to 2.15.0.
When gone: keys of an imported checkpoint match no parameter, and the import lists them.
"""

WRAPPER_NAMES = (
    "_orig_mod",  # torch.compile
    "_checkpoint_wrapped_module",  # activation checkpointing of torch.distributed.algorithms
    "_fsdp_wrapped_module",  # torch.distributed.fsdp.FullyShardedDataParallel
)
