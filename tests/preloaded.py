"""Imported by the server whose forks are the ranks of tests (`tests/ranks.py`): what nearly all of them use."""

import gc

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import transformers.models.llama.modeling_llama  # noqa: F401 - two seconds of a core for each rank that has such a model

import lockstep.launch.worker
import lockstep.parallel.pipeline
import lockstep.trainer
import lockstep.verify  # noqa: F401

torch.set_num_threads(1)
gc.freeze()  # imports make objects that stay: collections would look at them again and again, and unshare their memory
