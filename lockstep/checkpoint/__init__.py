"""Checkpoints: what is committed is whole, what is not whole is invisible.

    checkpoints/step-00000100/
      manifest.json        format version, files {size, crc32}, parameters {shape, dtype, aliases}; last its checksum
      model/               the tensors of the model      (torch.distributed.checkpoint's format)
      optimizer/NAME/      the state of an optimizer     "
      extra/NAME/          EMA, compression state, …     "
      state.json           everything that is no tensor
      config.yaml          the resolved config of the run

`save` and `load` are for all ranks of a run at once; the rest looks at files, and needs no process group.
"""

from lockstep.checkpoint.background import AsyncSaver
from lockstep.checkpoint.describe import inspect
from lockstep.checkpoint.digest import digest, digest_tensors
from lockstep.checkpoint.export import export_safetensors, export_torch, weights
from lockstep.checkpoint.gathered import gather, hand_out, is_shared, scatter
from lockstep.checkpoint.importing import import_weights
from lockstep.checkpoint.keep import newest, resume_point, rotate, set_aside
from lockstep.checkpoint.manifest import DamagedError, verify
from lockstep.checkpoint.names import list_checkpoints
from lockstep.checkpoint.optimizers import (
    has_optimizer,
    optimizer_state,
    optimizer_targets,
    optimizers_in,
    restore_optimizer,
)
from lockstep.checkpoint.restore import config_text, has_extra, load, read_state
from lockstep.checkpoint.saving import Manner, save, save_as
from lockstep.checkpoint.snapshot import Snapshot

__all__ = [
    "AsyncSaver",
    "DamagedError",
    "Manner",
    "Snapshot",
    "config_text",
    "digest",
    "digest_tensors",
    "export_safetensors",
    "export_torch",
    "gather",
    "hand_out",
    "has_extra",
    "has_optimizer",
    "import_weights",
    "inspect",
    "is_shared",
    "list_checkpoints",
    "load",
    "newest",
    "optimizer_state",
    "optimizer_targets",
    "optimizers_in",
    "read_state",
    "restore_optimizer",
    "resume_point",
    "rotate",
    "save",
    "save_as",
    "scatter",
    "set_aside",
    "verify",
    "weights",
]
