"""Parameters and buffers of pipeline stages: which ranks hold them, and sums of shared gradients.

Names and identities are read from the unsplit model, before anything is cut. A parameter that
segments of several stages use (it is registered in several modules, or lent to several segments) is
held, whole or as the same shard, once by each of these stages' ranks. They make the same update
from the same sum; norms count it on the first of them alone.

Tests: tests/parallel/pipeline/test_pipeline_hybrid.py, tests/checkpoint/test_own_forms.py
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.facts import ModelFacts, Named
from lockstep.parallel.initial import FirstValues
from lockstep.parallel.strides import laid_like
from lockstep.process_group.collectives import create_group
from lockstep.tensors import local


@dataclass(frozen=True)
class Registration:
    """The module and attribute where a tensor is registered.

    Looked up at each use: FSDP2 replaces parameters.
    """

    module: nn.Module
    attribute: str

    def tensor(self) -> Any:
        return getattr(self.module, self.attribute)

    def put(self, tensor: Tensor) -> None:
        setattr(self.module, self.attribute, tensor)


@dataclass
class Survey:
    """The parameters and buffers of the unsplit model, and the segments that use them."""

    parameters: dict[str, list[Registration]]  # canonical name → all places where it is registered
    buffers: dict[str, list[Registration]]
    users: dict[str, list[str]]  # parameter name → names of the segments that use it, in order
    lent: dict[str, dict[str, str]]  # segment name → {keyword: parameter name}
    persistent: frozenset[str]  # names of the buffers that checkpoints keep

    def costs(self, names: Sequence[str]) -> list[float]:
        """Return for each segment the number of elements of the parameters that it uses."""
        costs = dict.fromkeys(names, 0.0)
        for parameter, users in self.users.items():
            for user in users:
                costs[user] += self.parameters[parameter][0].tensor().numel()
        return [costs[name] for name in names]


def survey(facts: ModelFacts) -> Survey:
    """Find where an unsplit model has its tensors, and which segments of its chain use them."""
    model = facts.model
    names = facts.names
    segments = facts.required_chain()
    parameters = _registrations(model, names)
    lent = {segment: dict(wanted) for segment, wanted in facts.borrowed.items()}
    known = set(parameters)
    users: dict[str, list[str]] = {name: [] for name in parameters}
    for segment, module in segments:
        used = {names[id(p)] for p in module.parameters() if id(p) in names} | set(
            lent.get(segment, {}).values()
        )
        if missing := used - known:
            what = (
                f"segment {segment} borrows {', '.join(sorted(missing))}, which the model does not"
                " have"
            )
            raise UsageError(
                what, fix="shared_parameters() must name parameters as named_parameters() does"
            )
        for name in used:
            users[name].append(segment)
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    persistent = facts.persistent & set(buffers.values())
    return Survey(parameters, _registrations(model, buffers), users, lent, persistent)


def _registrations(model: nn.Module, names: Mapping[int, str]) -> dict[str, list[Registration]]:
    registrations: dict[str, list[Registration]] = {name: [] for name in names.values()}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for attribute, tensor in (
            *parameters,
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            if id(tensor) in names:
                registrations[names[id(tensor)]].append(Registration(module, attribute))
    return registrations


class Borrowed(nn.Module):
    """Registers parameters of which this rank has uses, but not the module that owns them."""

    def add(self, parameter: nn.Parameter) -> Registration:
        attribute = f"parameter_{sum(1 for _ in self.named_parameters(remove_duplicate=False))}"
        self.register_parameter(attribute, parameter)
        return Registration(self, attribute)


@dataclass
class StageParameters:
    """The parameters and buffers that one rank holds."""

    # canonical name → the places on this rank where it is registered
    parameters: dict[str, list[Registration]]
    buffers: dict[str, list[Registration]]
    # used on several ranks → these, ascending
    across: dict[str, list[int]] = field(default_factory=dict)
    doubled: set[str] = field(default_factory=set)  # used by several stages, here or elsewhere
    # owns parameters that segments of several stages only borrow
    extra: Borrowed = field(default_factory=Borrowed)
    # owns what only this stage's segments borrow
    of_stage: dict[int, Borrowed] = field(default_factory=dict)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return name → the tensor that is registered now."""
        return {name: registrations[0].tensor() for name, registrations in self.parameters.items()}

    def named_buffers(self) -> dict[str, Tensor]:
        return {name: registrations[0].tensor() for name, registrations in self.buffers.items()}

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        for registration in self.parameters[name]:
            registration.put(parameter)


def stage_parameters_of(
    rank: int, model: Survey, segments: Named, stage_of: Mapping[str, int], rank_of: Sequence[int]
) -> StageParameters:
    """Return what pipeline rank `rank` holds.

    `stage_of`: segment → stage, `rank_of`: of each stage, its rank.
    """
    mine = {id(m) for name, s in segments if rank_of[stage_of[name]] == rank for m in s.modules()}
    held = StageParameters({}, {})
    for name, registrations in model.parameters.items():
        # what no segment uses stays with the first
        stages = {stage_of[user] for user in model.users[name]} or {0}
        ranks = sorted({rank_of[stage] for stage in stages})
        if len(stages) > 1:
            held.doubled.add(name)
        if rank not in ranks:
            continue
        if len(ranks) > 1:
            held.across[name] = ranks
        held_here = [
            registration for registration in registrations if id(registration.module) in mine
        ]
        if not held_here:
            owner = (
                held.extra if len(stages) > 1 else held.of_stage.setdefault(min(stages), Borrowed())
            )
            held_here = [owner.add(registrations[0].tensor())]
        held.parameters[name] = held_here
    owners: dict[int, set[int]] = {}
    for name, segment in segments:
        for module in segment.modules():
            owners.setdefault(id(module), set()).add(rank_of[stage_of[name]])
    for name, registrations in model.buffers.items():
        held_here = [
            each for each in registrations if rank in owners.get(id(each.module), {rank_of[0]})
        ]
        if held_here:
            held.buffers[name] = held_here
    return held


def release(model: Survey, held: StageParameters) -> None:
    """Replace all that other ranks hold by tensors on meta in the unsplit model."""
    for name, registrations in model.parameters.items():
        kept = {(id(s.module), s.attribute) for s in held.parameters.get(name, [])}
        described = nn.Parameter(torch.empty_like(registrations[0].tensor(), device="meta"))
        for registration in registrations:
            if (id(registration.module), registration.attribute) not in kept:
                registration.put(described)
    for name, registrations in model.buffers.items():
        if name not in held.buffers:
            for registration in registrations:
                registration.put(torch.empty_like(registration.tensor(), device="meta"))


@torch.no_grad()
def materialise(
    held: StageParameters,
    device: torch.device,
    first: FirstValues | None = None,
    *,
    empty: bool = False,
) -> None:
    """Bring what a rank holds to its device, `empty` or with values.

    Values come from `first` if the model is on meta.
    """
    for name, old in held.named_parameters().items():
        if empty:
            values = torch.empty_like(old, device=device)
        elif first is None and old.device == device:
            continue
        else:
            given = old.detach() if first is None else first.parameter(name)
            values = given.to(device)
            if given.stride() != old.stride():
                values = laid_like(old, values)
        held.replace(name, nn.Parameter(values, old.requires_grad))

    first_buffers = {} if first is None else first.buffers()
    for name, registrations in held.buffers.items():
        old = registrations[0].tensor()
        if empty:
            values = torch.empty_like(old, device=device)
        else:
            values = first_buffers.get(name, old).to(device)
        for registration in registrations:
            registration.put(values)


def groups_that_share(
    ranks_of: Mapping[str, Sequence[int]], pipelines: Sequence[Sequence[int]]
) -> dict[str, dist.ProcessGroup]:
    """Return parameter → the group of this pipeline's ranks that share it with this rank.

    `ranks_of`: of *all* parameters that cross ranks, the pipeline ranks: every rank makes every
    group. `pipelines`: the global ranks of each.
    """
    groups = {}
    for ranks in sorted({tuple(ranks) for ranks in ranks_of.values()}):
        groups[ranks] = create_group(
            "shared", [[pipeline[rank] for rank in ranks] for pipeline in pipelines]
        )
    return {
        name: group
        for name, ranks in ranks_of.items()
        if (group := groups[tuple(ranks)]) is not None
    }


@torch.no_grad()
def sum_shared(held: StageParameters, group_of: Mapping[str, dist.ProcessGroup]) -> None:
    """Sum shared parameters' gradients over their ranks, once replicas and shards are reduced."""
    parameters = held.named_parameters()
    works = []
    for name in sorted(group_of):
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        works.append(dist.all_reduce(local(parameter.grad), group=group_of[name], async_op=True))
    wait_for(works)


def wait_for(works: Iterable[dist.Work | None]) -> None:
    """Wait until messages are there; None: this rank is not in the group."""
    for work in works:
        if work is not None:
            work.wait()
