"""Who holds what: parameters and buffers of the unsplit model, by canonical name, and the stages that use them.

Names and identities are read before anything is cut. A parameter that segments of several stages use (it is registered
in several modules, or lent to several segments) is held by each of these stages' ranks. A rank holds it once, however
many of its stages use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.chain import shared_parameters_of
from lockstep.parallel.initial import FirstValues, canonical_names
from lockstep.parallel.pipeline.part import Spot

Segments = Sequence[tuple[str, nn.Module]]


@dataclass
class Survey:
    """The unsplit model, read.

    Attributes:
        parameters, buffers: canonical name → all places where it is registered.
        users: parameter name → names of the segments that use it, in order; empty for one that none uses.
        lent: segment name → {keyword: parameter name}.
        sizes: parameter name → number of elements.
        persistent: names of the buffers that checkpoints keep.
    """

    parameters: dict[str, list[Spot]]
    buffers: dict[str, list[Spot]]
    users: dict[str, list[str]]
    lent: dict[str, dict[str, str]]
    sizes: dict[str, int]
    persistent: set[str]

    def costs(self, names: Sequence[str]) -> list[float]:
        """Of each segment, the elements of the parameters that it uses."""
        costs = dict.fromkeys(names, 0.0)
        for parameter, users in self.users.items():
            for user in users:
                costs[user] += self.sizes[parameter]
        return [costs[name] for name in names]


def survey(model: nn.Module, segments: Segments) -> Survey:
    """Read an unsplit model whose forward pass is the chain `segments`.

    Raises:
        UsageError: a segment borrows a parameter that the model does not have.
    """
    names, _ = canonical_names(model)
    parameters = _spots(model, names)
    lent = {segment: dict(wanted) for segment, wanted in shared_parameters_of(model).items()}
    known = set(parameters)
    users: dict[str, list[str]] = {name: [] for name in parameters}
    for segment, module in segments:
        used = {names[id(p)] for p in module.parameters() if id(p) in names} | set(lent.get(segment, {}).values())
        if missing := used - known:
            raise UsageError(
                f"segment {segment} borrows {', '.join(sorted(missing))}, which the model does not have",
                fix="shared_parameters() must name parameters as named_parameters() does",
            )
        for name in used:
            users[name].append(segment)
    persistent = set(model.state_dict(keep_vars=True))
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    return Survey(
        parameters, _spots(model, buffers), users, lent,
        {name: spots[0].tensor().numel() for name, spots in parameters.items()}, persistent & set(buffers.values()),
    )  # fmt: skip


def _spots(model: nn.Module, names: Mapping[int, str]) -> dict[str, list[Spot]]:
    found: dict[str, list[Spot]] = {name: [] for name in names.values()}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for attribute, tensor in (*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(tensor) in names:
                found[names[id(tensor)]].append(Spot(module, attribute))
    return found


class Borrowed(nn.Module):
    """Registers parameters of which this rank has uses, but not the module that owns them."""

    def add(self, parameter: nn.Parameter) -> Spot:
        """Register a parameter; returns where."""
        attribute = f"parameter_{sum(1 for _ in self.named_parameters(remove_duplicate=False))}"
        self.register_parameter(attribute, parameter)
        return Spot(self, attribute)


@dataclass
class Holding:
    """What one rank holds.

    Attributes:
        parameters, buffers: canonical name → the places on this rank where it is registered.
        across: names of those parameters that stages of several ranks use → these pipeline ranks, ascending.
        doubled: names of those that several stages use, of this rank or of others.
        extra: owns what segments of several stages only borrow.
        of_stage: owns what the segments of one stage only borrow.
    """

    parameters: dict[str, list[Spot]]
    buffers: dict[str, list[Spot]]
    across: dict[str, list[int]] = field(default_factory=dict)
    doubled: set[str] = field(default_factory=set)
    extra: Borrowed = field(default_factory=Borrowed)
    of_stage: dict[int, Borrowed] = field(default_factory=dict)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """As they are registered now."""
        return {name: spots[0].tensor() for name, spots in self.parameters.items()}

    def named_buffers(self) -> dict[str, Tensor]:
        """As they are registered now."""
        return {name: spots[0].tensor() for name, spots in self.buffers.items()}

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """Put another parameter in all places of one."""
        for spot in self.parameters[name]:
            setattr(spot.module, spot.attribute, parameter)


def holding_of(
    rank: int, model: Survey, segments: Segments, stage_of: Mapping[str, int], rank_of: Sequence[int]
) -> Holding:
    """What pipeline rank `rank` holds.

    Args:
        stage_of: segment name → stage.
        rank_of: of each stage, its rank.
    """
    mine = {id(m) for name, s in segments if rank_of[stage_of[name]] == rank for m in s.modules()}
    holding = Holding({}, {})
    for name, spots in model.parameters.items():
        stages = {stage_of[user] for user in model.users[name]} or {0}  # what no segment uses stays with the first
        ranks = sorted({rank_of[stage] for stage in stages})
        if len(stages) > 1:
            holding.doubled.add(name)
        if rank not in ranks:
            continue
        if len(ranks) > 1:
            holding.across[name] = ranks
        here = [spot for spot in spots if id(spot.module) in mine]
        if not here:
            owner = holding.extra if len(stages) > 1 else holding.of_stage.setdefault(min(stages), Borrowed())
            here = [owner.add(spots[0].tensor())]
        holding.parameters[name] = here
    owners: dict[int, set[int]] = {}
    for name, segment in segments:
        for module in segment.modules():
            owners.setdefault(id(module), set()).add(rank_of[stage_of[name]])
    for name, spots in model.buffers.items():
        here = [spot for spot in spots if rank in owners.get(id(spot.module), {rank_of[0]})]
        if here:
            holding.buffers[name] = here
    return holding


def release(model: Survey, holding: Holding) -> None:
    """Let go of all that is another rank's: the unsplit model keeps descriptions in its place."""
    for name, spots in model.parameters.items():
        kept = {(id(s.module), s.attribute) for s in holding.parameters.get(name, [])}
        described = nn.Parameter(torch.empty_like(spots[0].tensor(), device="meta"))
        for spot in spots:
            if (id(spot.module), spot.attribute) not in kept:
                setattr(spot.module, spot.attribute, described)
    for name, spots in model.buffers.items():
        if name not in holding.buffers:
            for spot in spots:
                setattr(spot.module, spot.attribute, torch.empty_like(spot.tensor(), device="meta"))


@torch.no_grad()
@torch.no_grad()
def make_empty(holding: Holding, device: torch.device) -> None:
    """Give what a rank holds storage on a device, without values."""
    for name, old in holding.named_parameters().items():
        holding.replace(name, nn.Parameter(torch.empty_like(old, device=device), old.requires_grad))
    for spots in holding.buffers.values():
        values = torch.empty_like(spots[0].tensor(), device=device)
        for spot in spots:
            setattr(spot.module, spot.attribute, values)


def materialise(holding: Holding, first: FirstValues | None, device: torch.device) -> None:
    """Bring what a rank holds to its device: values from `first` where there are only descriptions."""
    for name, old in holding.named_parameters().items():
        if first is not None or old.device != device:
            values = first.parameter(name) if first is not None else old.detach()
            holding.replace(name, nn.Parameter(values.to(device), requires_grad=old.requires_grad))
    made = first.buffers() if first is not None else {}
    for name, spots in holding.buffers.items():
        values = made.get(name, spots[0].tensor()).to(device)
        for spot in spots:
            setattr(spot.module, spot.attribute, values)
