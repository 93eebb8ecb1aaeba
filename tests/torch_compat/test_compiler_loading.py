"""A program that compiles nothing does not import torch's compiler; one that does finds it."""

import subprocess
import sys

import pytest

from tests.hosts import REPOSITORY
from tests.launch.shared import environment

# What training uses that tells the compiler of itself.
TRAINS = """
import hashlib, sys
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from lockstep.torch_compat import compiler_loading

def loaded():
    return "torch._dynamo.eval_frame" in sys.modules

def train():
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with compiler_loading.run_eagerly():
            loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return hashlib.sha256(model.module.weight.detach().numpy().tobytes()).hexdigest()

compiler_loading.put_off()

@torch.compiler.disable
def apart(x):
    '''Says nothing.'''
    return x + 1

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = train()
real = torch.nn.Linear(4, 4)
with FakeTensorMode(allow_non_fake_inputs=True):
    real(torch.ones(2, 4)).sum().backward()
settings = torch._dynamo.config
settings.recompile_limit = 5
apart(torch.ones(1))
print(compiler_loading.is_put_off(), loaded(), apart.__name__, apart.__doc__)

breaks = []
def backend(graph, _inputs):
    breaks.append(len(list(graph.graph.nodes)))
    return graph

stand_in = torch._dynamo
@torch.compile(backend=backend)
def compiled(x):
    return apart(x * 2) * 3

print(compiled(torch.ones(2)).tolist(), len(breaks), compiler_loading.is_put_off(), loaded())
print(stand_in.graph_break is torch._dynamo.graph_break, stand_in.config is torch._dynamo.config)
stand_in.config.verbose = True
print(torch._dynamo.config is settings, settings.cache_size_limit, torch._dynamo.config.verbose)
print(train() == before)
with compiler_loading.run_eagerly():
    breaks.clear()
    compiled(torch.ones(3, 3))
print(len(breaks))
compiler_loading.put_off()
print(compiler_loading.is_put_off())
"""


@pytest.mark.full
def test_the_compiler_comes_when_it_is_asked_for() -> None:
    """The function that is not to be compiled splits the one around it into two graphs."""
    ended = subprocess.run(
        [sys.executable, "-c", TRAINS],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.splitlines() == [
        "True False apart Says nothing.",
        "[9.0, 9.0] 2 False True",
        "True True",
        "True 5 True",
        "True",
        "0",
        "False",
    ], ended.stderr
