"""Places a model under any strategy for a user's own training loop (`lockstep.place`).

    placed = lockstep.place(model, strategy="fsdp", loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(placed.parameters())
    loss = placed.backward(*micro_batches)      # this rank's of the step
    placed.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

After `backward`, `.grad` holds the gradient of the mean loss over all valid targets of all ranks,
as in the `Trainer`.

Tests: tests/trainer/test_own_loop.py
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.config import Config, apply_flags
from lockstep.config.loading import with_settings
from lockstep.config.names import foreign_key
from lockstep.data import StepBatches
from lockstep.errors import UsageError, warn_at_caller
from lockstep.files.paths import local_path
from lockstep.heartbeat.writer import called_by_all_ranks, write_limits
from lockstep.layout import Layout
from lockstep.models.loss_modules import hidden_parameters
from lockstep.parallel.facts import facts_of
from lockstep.parallel.gradient_hooks import run_hooks
from lockstep.parallel.loss_accumulator import at_most, divisor_of, mean_of, tensor_of
from lockstep.parallel.loss_weights import refuse_hidden
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.place import place as place_over
from lockstep.precision import Precision, resolve_mode
from lockstep.process_group import cluster
from lockstep.process_group.cluster import Cluster
from lockstep.strategy import layout_of_ranks, strategy_named
from lockstep.torch_compat import foreach
from lockstep.trainer import no_effect
from lockstep.trainer.arguments import check_loss_fn, check_model
from lockstep.trainer.caller_batches import MicroBatchAssigner
from lockstep.trainer.evaluation import WINDOW, evaluate, evaluating, sample
from lockstep.trainer.loss_check import LossCheck
from lockstep.trainer.modes import ModelModes
from lockstep.trainer.named_loss import loss_fn_of
from lockstep.trainer.plain_state import (
    load_imported,
    load_plain_state_dict,
    load_state_of_model,
    plain_state_dict,
    state_of_model,
)
from lockstep.trainer.settings import PlacementSettings

_SECTIONS = ("distributed", "precision")
_OF_TRAINER = ("scheduler", "scheduler_metric", "output_dir", "after_update", "freeze_until")
_OF_TRAINING = ("seed", "compile", "gradient_checkpointing", "gradient_checkpointing_every")


@called_by_all_ranks
def place(
    model: nn.Module,
    strategy: str | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    config: Config | None = None,
    **settings: Unpack[PlacementSettings],
) -> "PlacedModel":
    """Place a model on the ranks, for a user's own training loop.

    All ranks call it, and join if necessary.

    Args:
        model: any `nn.Module`, not wrapped. On `meta` if it has `init_weights()`.
        strategy: single, dp, ddp, fsdp, pipeline or accelerate; unset: the config's.
        loss_fn: `(outputs, targets) -> loss`; unset: the one that the config names, else the
            model's own.
        config: its `loss_fn` and its sections `distributed` and `precision` count, and the keys of
            `training` about the model (seed, compile, gradient_checkpointing).
        settings: single keys of these by their short names, as in the `Trainer`.

    Raises:
        UsageError: settings contradict each other or the model, or concern what the loop itself
            decides.
    """
    check_model(
        model, "lockstep.place", has_loss_fn=(loss_fn or (config and config.loss_fn)) is not None
    )
    check_loss_fn(loss_fn, "lockstep.place")
    given = _dotted({**settings, **({} if strategy is None else {"strategy": strategy})})
    config = with_settings(config, given)
    here = cluster.setup(config.distributed)
    hang = config.distributed.hang
    seconds = config.distributed.timeout_seconds
    write_limits(hang.factor, hang.seconds, seconds)
    mode, _ = resolve_mode(config.precision.mode, here.device)
    layout = layout_of_ranks(config.distributed, here.facts)
    _refuse_what_needs_the_step(config, layout, mode)
    precision = Precision(mode, here.device.type)
    beside_others = no_effect.beside_others(config, layout)
    no_effect.report(beside_others, no_effect.asked_keys(config, given), is_main=here.facts.is_main)
    loss_fn = loss_fn or loss_fn_of(config)
    facts = facts_of(model, loss_fn)
    hidden = hidden_parameters(loss_fn, facts.names)
    placed = place_over(facts, layout, config.step, device=here.device, precision=precision)
    refuse_hidden(placed, hidden)
    for line in placed.warnings() if here.facts.is_main else ():
        warn_at_caller(line.removeprefix("warning: "))
    return PlacedModel(placed, mode, config, here)


def _refuse_what_needs_the_step(config: Config, layout: Layout, mode: str) -> None:
    """Refuse settings that need a step of Lockstep's, where the loop is the caller's.

    `mode`: of the precision.
    """
    if not strategy_named(layout.strategy).own_loops:
        what = f"strategy {layout.strategy}"
        why = "each worker updates a model of its own"
    elif config.distributed.reproducible:
        what = "distributed.reproducible"
        why = "the same bits need the same update, too"
    elif mode == "fp16":
        what = "precision fp16"
        why = "its loss scale decides which updates are skipped"
    else:
        return
    raise UsageError(
        f"{what} is not supported by lockstep.place()",
        where="lockstep.place",
        why=why,
        fix="let lockstep.Trainer run the step" + (", or write bf16" if mode == "fp16" else ""),
    )


class PlacedModel:
    """A model that `lockstep.place` has placed on the ranks.

    Every rank makes the same calls in the same order; only one of them prints and writes files.
    `step` counts the calls of `backward`: random numbers follow from it. `log_lines` are about the
    placement.
    """

    def __init__(self, placed: ParallelModel, mode: str, config: Config, here: Cluster) -> None:
        self._placed = placed
        self._mode = mode
        self._config = config
        self.step = 0
        self._assigner = MicroBatchAssigner(placed)
        self._cluster = here
        self._modes = ModelModes(placed)
        self._loss_check = LossCheck(
            placed, compiled=config.training.compile, coarse=mode != "fp32"
        )
        self.log_lines = placed.log_lines

    def __repr__(self) -> str:
        placed = self._placed
        device = placed.random_state.device.type
        return (
            f"PlacedModel({placed.layout} on {device}, {self._mode}, {placed.num_parameters:,}"
            " parameters)"
        )

    @property
    def device(self) -> torch.device:
        """The device of this rank, to which micro-batches are moved."""
        return self._placed.random_state.device

    @property
    def data_parallel_rank(self) -> int:
        """This rank's part of the data; the ranks of one pipeline share it."""
        return self._assigner.dp_rank

    @property
    def data_parallel_size(self) -> int:
        """The number of parts of the data."""
        return self._assigner.dp_size

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return this rank's parameters for optimizers, sharded ones as DTensors."""
        return iter(self._placed.parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's parameters with their names in the model."""
        return iter(self._placed.parameters.items())

    @called_by_all_ranks
    def backward(self, *batches: Any) -> Tensor:
        """Run forward and backward of one step.

        `.grad` is then the gradient of its mean loss, on all ranks.

        Args:
            batches: this rank's micro-batches. Their number may differ between ranks; a rank
                without any calls `backward()`.

        Returns:
            the mean loss over all valid targets of all ranks, 0-dim, the same on all of them.

        Raises:
            UsageError: gradients of the call before are still there.
        """
        placed = self._placed
        self._cluster.check()
        if any(parameter.grad is not None for parameter in placed.parameters.values()):
            why = (
                "one call is one step: its mean is over all that it is given, and does not add up"
                " over calls"
            )
            fix = (
                "pass all micro-batches of a step to one backward(…), and zero_grad() after the"
                " update"
            )
            raise UsageError("the gradients of the last backward are still there", why=why, fix=fix)
        self._modes.before_step(self.step + 1)
        for look in placed.checks:
            look(self.step)
        micro_batches, micro_batches_per_step = self._assigner.assign(
            batches, self.step, "backward"
        )
        if not micro_batches:
            raise UsageError(
                "no rank brings a micro-batch",
                fix="end the loop when all ranks have run out of data",
            )
        self._loss_check.check(micro_batches, micro_batches_per_step, self.step)
        if placed.objective.observed is not None:
            placed.objective.observed.begin_step(micro_batches_per_step)
        accumulator = placed.loss_accumulator(micro_batches_per_step)
        nominal = self._assigner.nominal
        with placed.random_state.running("train", self.step):
            placed.forward_backward(micro_batches, accumulator, 1.0 / nominal)
        loss_sum, valid = accumulator.totals()
        loss = mean_of(loss_sum, valid)
        valid = divisor_of(valid)
        placed.finish_gradients()
        if gradients := placed.gradients():
            foreach.mul_(gradients, tensor_of(nominal / valid))
        run_hooks(placed.gradient_hooks, placed.parameters)
        placed.finish_update(False)
        self.step += 1
        return tensor_of(loss)

    @called_by_all_ranks
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`.

        Return the norm of all ranks before, 0-dim.
        """
        placed = self._placed
        norm = placed.norm(placed.counted_gradients())
        if gradients := placed.gradients():
            foreach.mul_(gradients, tensor_of(at_most(max_norm / (norm + 1e-6), 1.0)))
        return tensor_of(norm)

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters, of all optimizers."""
        self._placed.clear_gradients()

    @called_by_all_ranks
    def evaluate(self, micro_batches: Iterable[Any]) -> float:
        """Return the mean loss over all valid targets of all ranks' micro-batches.

        The model is in evaluation mode.

        `micro_batches` are this rank's, a DataLoader for instance.
        """
        return evaluate(self._placed, self._windows(iter(micro_batches)))

    @called_by_all_ranks
    def __call__(self, *inputs: Any, **more: Any) -> Any:
        """Return the model's outputs, in evaluation mode and without a graph.

        The same arguments on all ranks.
        """
        return sample(self._placed, self.step, *inputs, **more)

    @called_by_all_ranks
    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers, gathered on the CPU.

        The plain model's `load_state_dict` takes them.

        All of them are on rank 0; other ranks get none, since they would fill the host's memory.
        """
        return plain_state_dict(self._placed)

    @called_by_all_ranks
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, or the plain model's; what rank 0 passes counts.

        Raises:
            UsageError: on every rank; names or shapes are not the model's.
        """
        with evaluating(self._placed):
            load_plain_state_dict(self._placed, state)

    @called_by_all_ranks
    def save_checkpoint(
        self,
        path: str | Path,
        optimizers: Mapping[str, Optimizer] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Path:
        """Write the checkpoint `path/step-00000100`, and return it; all ranks share the folder.

        On return it is whole.

        Args:
            optimizers: by names of your own.
            metadata: further data to restore; JSON.
        """
        state = {
            "step": self.step,
            "metadata": metadata or {},
            **state_of_model(self._placed),
        }
        snapshot = self._snapshot(state)
        names = _names(self._placed)
        for name, optimizer in (optimizers or {}).items():
            snapshot.optimizers[name], snapshot.groups[name] = checkpoint.optimizer_state(
                optimizer, names
            )
        saved = checkpoint.save(
            local_path(path, "save_checkpoint"),
            self.step,
            snapshot,
            config_yaml=self._config.to_yaml(),
        )
        assert isinstance(saved, Path)
        return saved

    @called_by_all_ranks
    def load_checkpoint(
        self, path: str | Path, optimizers: Mapping[str, Optimizer] | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint of `save_checkpoint` of any layout.

        Set `step`, and return the checkpoint's metadata.

        Args:
            path: a checkpoint, or a folder of them, whose newest whole one is loaded.
            optimizers: as they were saved, over this model's parameters; those that are left out
                stay as they are.

        Raises:
            UsageError: there is none; it is of another model, or lacks an optimizer.
        """
        path = local_path(path, "load_checkpoint")
        optimizers = optimizers or {}
        is_checkpoint = (path / checkpoint.MANIFEST).exists()
        saved = path if is_checkpoint else checkpoint.resume_point(path)
        if saved is None:
            what = f"there is no checkpoint in {path}"
            raise UsageError(what, fix="give a checkpoint, or the folder that was saved to")
        target = self._snapshot()
        names = _names(self._placed)
        for name, optimizer in optimizers.items():
            if name not in checkpoint.optimizers_in(saved):
                raise UsageError(
                    f"{saved} holds no optimizer {name!r}",
                    fix="name the optimizers as they were saved",
                )
            checkpoint.add_missing_groups(optimizer, self._placed.parameters, saved, name)
            own = {
                names[id(p)]: p
                for group in optimizer.param_groups
                for p in group["params"]
                if id(p) in names
            }
            target.optimizers[name] = checkpoint.optimizer_targets(saved, name, own)
        parts = [
            "model",
            *(f"optimizer/{name}" for name in optimizers),
            *(f"extra/{name}" for name in target.extra),
        ]
        with evaluating(self._placed), torch.no_grad():
            state = load_imported(self._placed, saved) or checkpoint.load(
                saved, target, only=parts, is_verified=not is_checkpoint
            )
            load_state_of_model(self._placed, state)
        for name, optimizer in optimizers.items():
            checkpoint.restore_optimizer(
                optimizer, names, target.optimizers[name], state["optimizer_groups"][name]
            )
        self.step = int(state["step"])
        loaded = state["metadata"]
        return dict(loaded)

    def _snapshot(self, state: dict[str, Any] | None = None) -> checkpoint.Snapshot:
        placed = self._placed
        return checkpoint.Snapshot(
            placed.kept(),
            state=state or {},
            extra=dict(placed.state),
            aliases=placed.named_aliases,
        )

    def _windows(self, batches: Iterator[Any]) -> Generator[StepBatches, None, None]:
        """Yield windows of micro-batches, until no rank brings any."""
        each = max(1, WINDOW // self.data_parallel_size)
        for window in count():
            mine, micro_batches_per_step = self._assigner.assign(
                list(islice(batches, each)), self.step, "evaluate"
            )
            if not mine and window == 0:
                raise UsageError(
                    "there is nothing to evaluate on", why="no rank brings a micro-batch"
                )
            if not mine:
                return
            yield StepBatches(window, 0, micro_batches_per_step, 0, False, mine)


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key.

    A UsageError if one is no setting of `place`, by whichever name.
    """
    for name, value in settings.items():
        try:
            keys = list(apply_flags({name: value}, "lockstep.place"))
        except UsageError:  # its advice is for a Trainer
            meant = foreign_key(name)
            if name not in _OF_TRAINER and (meant is None or _is_taken(meant)):
                raise
            keys = [name]
        if others := [key for key in keys if not _is_taken(key)]:
            what = f"{others[0]} means nothing to lockstep.place"
            why = "data, optimizers, schedules, clipping and checkpoints are the loop's own"
            raise UsageError(
                what, why=why, fix="leave it out, or let lockstep.Trainer run the step"
            )
    return apply_flags(settings, "lockstep.place")


def _is_taken(key: str) -> bool:
    section, _, name = key.partition(".")
    return section in _SECTIONS or (section == "training" and name in _OF_TRAINING)


def _names(placed: ParallelModel) -> dict[int, str]:
    return {id(parameter): name for name, parameter in placed.parameters.items()}
