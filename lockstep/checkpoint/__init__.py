"""Save, load and look after checkpoints: a committed one is complete, any other is invisible.

A save takes four stops: this rank's blocks (`snapshot`), each rank's share (planned on rank 0),
files in an invisible draft (`write`), and state, config and, last, the manifest (`commit`): then
the checkpoint exists.

    checkpoints/step-00000100/
      manifest.json        format version, files {size, crc32, that of each MiB}, parameters {shape,
                           dtype, aliases}; its own checksum is the last line
      model/               the tensors of the model      (torch.distributed.checkpoint's format)
      optimizer/NAME/      the state of an optimizer     "
      extra/NAME/          EMA, compression state, …     "
      state.json           everything that is not a tensor
      config.yaml          the resolved config of the run

A load goes the other way: each rank finds what it reads into its tensors (`targets`), rank 0
refuses what does not fit (`fit`), and then they are filled (`restore`).

Every rank of a run calls `save` and `load`; the rest looks at files, and needs no process group. A
folder of checkpoints may be given as a path or a `Storage`, a checkpoint as a path or a `Location`.

Tests: tests/checkpoint/test_round_trip.py, tests/checkpoint/test_room.py
"""

from lockstep.checkpoint.background import AsyncSaver
from lockstep.checkpoint.commit import SaveOptions, is_shared, save
from lockstep.checkpoint.convert import (
    digest,
    digest_tensors,
    export_hugging_face,
    export_safetensors,
    import_weights,
    loss_weights,
    read_weights,
    weights,
)
from lockstep.checkpoint.fetch import fetched
from lockstep.checkpoint.host_disks import HostDisks
from lockstep.checkpoint.keep import (
    copy_to_hosts,
    list_checkpoints,
    load_newest,
    newest,
    resume_point,
    rotate,
    set_aside,
)
from lockstep.checkpoint.manifest import (
    HUGGING_FACE,
    LOSS_NAMES,
    OWN_FORM,
    DamagedError,
    UnreachableError,
    config_text,
    read_manifest,
    read_state,
    verify,
)
from lockstep.checkpoint.memory import MemoryStorage, copies_of, save_newest
from lockstep.checkpoint.memory_hosts import agree_on_copy, leads_host
from lockstep.checkpoint.memory_writer import MemoryWriter
from lockstep.checkpoint.object_store import ObjectStorage, in_bucket
from lockstep.checkpoint.optimizer_state import (
    add_missing_groups,
    optimizer_state,
    optimizer_targets,
    optimizers_in,
    restore_optimizer,
)
from lockstep.checkpoint.ranks import Ranks, gather, scatter
from lockstep.checkpoint.restore import load
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.storage import (
    MANIFEST,
    Checkpoint,
    CheckpointPath,
    Directory,
    Location,
    Storage,
    build_storage,
    step_of,
)
from lockstep.files.damaged_bytes import DamagedBytesError

__all__ = [
    "HUGGING_FACE",
    "LOSS_NAMES",
    "MANIFEST",
    "OWN_FORM",
    "AsyncSaver",
    "Checkpoint",
    "CheckpointPath",
    "DamagedBytesError",
    "DamagedError",
    "Directory",
    "HostDisks",
    "Location",
    "MemoryStorage",
    "MemoryWriter",
    "ObjectStorage",
    "Ranks",
    "SaveOptions",
    "Snapshot",
    "Storage",
    "UnreachableError",
    "add_missing_groups",
    "agree_on_copy",
    "build_storage",
    "config_text",
    "copies_of",
    "copy_to_hosts",
    "digest",
    "digest_tensors",
    "export_hugging_face",
    "export_safetensors",
    "fetched",
    "gather",
    "import_weights",
    "in_bucket",
    "is_shared",
    "leads_host",
    "list_checkpoints",
    "load",
    "load_newest",
    "loss_weights",
    "newest",
    "optimizer_state",
    "optimizer_targets",
    "optimizers_in",
    "read_manifest",
    "read_state",
    "read_weights",
    "restore_optimizer",
    "resume_point",
    "rotate",
    "save",
    "save_newest",
    "scatter",
    "set_aside",
    "step_of",
    "verify",
    "weights",
]
