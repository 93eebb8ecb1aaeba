"""Imported by the server whose forks are the ranks and the launchers of tests (`tests/forked.py`):
what they use.
"""

import gc
import importlib
import pkgutil
from contextlib import suppress

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.elastic.rendezvous.static_tcp_rendezvous
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import transformers.models.llama.modeling_llama  # noqa: F401 - two seconds of a core for each rank that has such a model

import lockstep
from lockstep.errors import UsageError

# what ranks and workers of pytest import beside these: seconds of a core for each
for _name in (
    "functorch.compile",
    "torch._inductor.compile_fx",
    "torchmetrics.classification",
    "peft",
    "lightning",
):
    with suppress(ImportError):
        importlib.import_module(_name)
for _module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
    if not _module.name.endswith(("__main__", ".sitecustomize")):
        with suppress(UsageError):  # one that says which package it needs, and none here has
            importlib.import_module(_module.name)
torch.set_num_threads(1)
# imports make objects that stay: collections would look at them again and again, and unshare their
# memory
gc.freeze()
