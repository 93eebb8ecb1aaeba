"""The axis `shard`: ranks that each hold a share of parameters, gradients and optimizer states.

With `replicate` beside it, shards are replicated. A model is cut as a whole, or stage by stage
under a pipeline. How FSDP2 cuts and gathers is in `lockstep.parallel.fsdp.sharding`.

Tests: tests/parallel/fsdp/test_fsdp.py, tests/parity/test_data_parallel.py
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lockstep.config import StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import Pieces, StepTime, sharded_step
from lockstep.data.batches import AssignAnyRank, assign_strided
from lockstep.errors import UsageError, listed
from lockstep.layout import Layout
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.comm.gloo import GlooMessages
from lockstep.parallel.fsdp.calls import around_units
from lockstep.parallel.fsdp.sharding import Scalars, apply_fsdp
from lockstep.parallel.fsdp.units import Unit, contained_units, in_order
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.placement import AppliedStrategy, placed_in_order
from lockstep.parallel.reproducible.gradient_trees import ShardTree
from lockstep.parallel.reproducible.tree import assign_in_groups
from lockstep.parallel.site import Site
from lockstep.registry import BY_SIZE


class ShardAxis(Axis):
    """Shards of the model, and replicas of them.

    First values are made one parameter at a time, and cut.
    """

    name: ClassVar[str] = "shard"
    goes_with: ClassVar[frozenset[str]] = frozenset(BY_SIZE)

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        return None if site.layout.data_parallel_size == 1 else cls(site)

    def place_model(self) -> ParallelModel | None:
        """Shard the model by FSDP2, with what stands around its passes."""
        site = self.site
        model = site.model
        mesh = site.mesh
        layout = site.layout
        options = site.config.distributed.fsdp
        assert mesh is not None
        if site.has_values:
            model.to(site.device)  # a shard is cut on the device that it stays on
        scalars = _without_a_dim(model)
        lines = apply_fsdp(
            site.units,
            mesh,
            options,
            foreign=site.spread_parameters | set(scalars.values()),
            param_dtype=site.config.precision.param_dtype,
            replicas_apart=site.reproducible,
            device_type=site.device_type,
        )
        site.log_lines.extend(lines)
        if not site.has_values:
            site.materialise()
        shards = mesh["shard"].get_group() if layout.shard > 1 else None
        whole = Scalars(_without_a_dim(model), _mesh_of(model)) if scalars else None
        counted = None
        if whole is not None and site.rank % layout.shard:  # the first shard counts them
            counted = {name for name, _ in model.named_parameters()} - set(scalars)
        assign, groups = _assignment(site)
        applied = AppliedStrategy(
            assign,
            around=[*([] if whole is None else [whole]), *around_units(site, shards)],
            tree=ShardTree(model, mesh, groups) if site.reproducible else None,
            norm_groups=[shards] if shards is not None else [],
            parameters={} if whole is None else whole.placed,
            counted=counted,
        )
        return placed_in_order(site, applied)

    @classmethod
    def step_time(
        cls,
        pieces: Pieces,
        config: StepConfig,
        layout: Layout,
        cluster: GpuCluster,
        micro_batches: int,
    ) -> StepTime | None:
        """Return the time of a step that gathers units and reduces gradients as it computes."""
        options = config.distributed.fsdp
        if layout.world_size == 1:
            return None
        return sharded_step(
            pieces,
            layout,
            cluster,
            micro_batches,
            gathers_again=options.sharding_strategy in ("full_shard", "hybrid_shard"),
            width=0.5 if config.precision.param_dtype == "bf16" else 1.0,
            reduces_each=options.accumulate == "sharded",
        )

    def cut_stage(
        self,
        stage: nn.Module,
        inner: Sequence[tuple[str, nn.Module]],
        foreign: set[nn.Parameter],
        frees: bool,
    ) -> tuple[list[Unit], list[str]]:
        """Cut a pipeline's stage, or what stages share.

        Return its units, in order, and lines to log. `inner` ones were chosen before the model was
        cut. `foreign` parameters stay as they are.
        """
        site = self.site
        assert site.mesh is not None
        scalars = _without_a_dim(stage)
        if scalars:
            what = f"the parameter {listed(list(scalars))} has no dim, so FSDP can't cut it"
            fix = "give it one, torch.ones(1) for torch.ones(()), or write strategy: fsdp or ddp"
            raise UsageError(what, where="distributed.strategy: pipeline", fix=fix)
        units = contained_units(stage, inner)
        lines = apply_fsdp(
            units,
            site.mesh,
            site.config.distributed.fsdp,
            foreign=foreign | site.spread_parameters,
            param_dtype=site.config.precision.param_dtype,
            reshard_after_forward=frees,
            device_type=site.device_type,
        )
        units = in_order(units)
        if site.device_type == "cpu":
            GlooMessages(units)
        return units, lines


def _without_a_dim(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name → parameter, of those that FSDP2 can't cut."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 0}


def _mesh_of(model: nn.Module) -> DeviceMesh:
    """Return the mesh over which a model's parameters are cut."""
    return next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))


def _assignment(site: Site) -> tuple[AssignAnyRank, int]:
    """Return how micro-batches go to ranks, and the groups of a replica that run whole nodes."""
    layout = site.layout
    if not site.reproducible:
        return assign_strided, 1
    if not site.spread_names:
        return partial(assign_in_groups, groups=layout.replicate), 1
    # ranks that share out experts run whole nodes, which are the sums that they send
    groups = layout.shard // layout.expert if layout.shard % layout.expert == 0 else 1
    return partial(assign_in_groups, groups=layout.replicate * groups, even=True), groups
