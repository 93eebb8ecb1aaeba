"""The seam to torch.distributed.pipelining: its schedules drive the stages defined here, through public names only.

In contrast to torch's own stage, receive buffers are made in each micro-batch's own shapes, which are never inferred by
running the model on uninitialised memory. What is sent is contiguous, as gloo refuses other tensors and the peer would
wait for ever; what arrives gets the strides that it had, on which the bits of the next kernel may depend. And gradients
are reduced once a step, not once a run of the schedule.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from lockstep.errors import RunError
from lockstep.parallel.pipeline.trees import StageTrees
from lockstep.parallel.strides import laid_out, lay_gradients
from lockstep.torch_compat.fsdp_state import expect_reduction

Gradients = tuple[Tensor | None, ...]

# In torch 2.11 the operation of an `autograd.Function` is gone with the graph before it, though Python still names it.
_KEEPS_FUNCTIONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

# torch 2.13's kernel of GroupNorm on a CPU, with channels last, crashes if its weights' gradients alone are wanted.
_CRASHES_ALONE = ("NativeGroupNormBackward0",)


@dataclass
class Backward:
    """A backward pass of one micro-batch through one stage, whole or in two halves.

    The first half computes gradients of the inputs, and keeps the gradient that reached each operation with a weight.
    The second half continues from there: torch finds these operations for each weight. It fails where a weight has
    several of them in a row (layers that share it): the part of the graph between them is traversed again, and freed,
    for each such weight. It skips a weight that has none, because its gradient does not meet the inputs'. And torch
    2.11 adds up the gradients of an operation's several outputs, and can't continue from an `autograd.Function`. In
    these cases the second half starts from the outputs.
    """

    outputs: tuple[Tensor, ...]
    sent_back: Gradients | None  # None: the output is the loss
    inputs: tuple[Tensor, ...]
    groups: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.differentiable = any(output.requires_grad for output in self.outputs)
        self.nothing: Gradients = (None,) * len(self.inputs)

    def arguments(self) -> dict[str, Any]:
        sent_back = (None,) if self.sent_back is None else self.sent_back
        return {"stage_output": self.outputs, "output_grads": sent_back, "input_values": list(self.inputs)}

    def first_half(self, run: Callable[[dict[str, Any]], tuple[Gradients, list[dict[str, Any]] | None]]) -> Gradients:
        """Return the gradients of the inputs, None for those without one; keep what the second half needs.

        `run` is torch's first half, which detaches the outputs. That of torch 2.11 stops at tensors that have no
        gradient, like integers, or leaves them out of what it returns, so it gets none of them.
        """
        pairs = zip(self.outputs, self.sent_back or (None,), strict=True)
        kept = [(output, gradient) for output, gradient in pairs if output.requires_grad]
        self._edges = [get_gradient_edge(output) for output, _ in kept]
        self._gradients = [gradient for _, gradient in kept]
        leaves = _leaves(self._edges)
        used = {id(node.variable) for node in leaves}
        uses = [id(value) in used for value in self.inputs]
        if not any(uses):
            return self.nothing
        gradients, groups = run({
            "stage_output": [output for output, _ in kept],
            "output_grads": None if self.sent_back is None else self._gradients,
            "input_values": [value for value, is_used in zip(self.inputs, uses, strict=True) if is_used],
        })  # fmt: skip
        assert groups is not None
        inputs = {id(value) for value in self.inputs}
        weights = {node for node in leaves if id(node.variable) not in inputs}
        reached = {node for group in groups for node in group["params"]}
        if reached >= weights and all(map(_is_simple, groups)):  # then torch's second half is right for this graph
            self.groups = groups
            self._edges.clear()  # what lies behind the weights' operations can go
        found = iter(gradients)
        return tuple(next(found) if is_used else None for is_used in uses)

    def weights_anew(self, weights: list[Tensor]) -> None:
        found = torch.autograd.grad(self._edges, weights, self._gradients, allow_unused=True)
        for weight, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def _is_simple(group: dict[str, Any]) -> bool:
    """Return whether a group has one operation to start from, of whose outputs only the first has a gradient."""
    operations, gradients = list(group["intermediates"]), group["grads"]
    if operations[0].name() in _CRASHES_ALONE:
        return False
    if len(operations) != 1 or not (_KEEPS_FUNCTIONS or not isinstance(operations[0], BackwardCFunction)):
        return False
    return all(gradient is None for gradient in gradients[0][1:])


def _leaves(edges: Sequence[Any]) -> set[Any]:
    """Return the nodes of a graph that accumulate gradients."""
    seen: set[Any] = set()
    open_nodes = [edge.node for edge in edges]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_nodes += [following for following, _ in node.next_functions]
    return {node for node in seen if hasattr(node, "variable")}


@dataclass(frozen=True)
class Meta:
    """The description of a tensor, by which a buffer is made before the tensor arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...] = field(compare=False)

    @staticmethod
    def of(tensor: Tensor) -> "Meta":
        return Meta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.stride())

    def empty(self, device: torch.device) -> Tensor:
        """Return a contiguous buffer."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def input_of(self, arrived: Tensor) -> Tensor:
        """Return what has arrived, as the next stage's input: a leaf with the strides that it had."""
        return laid_out(arrived, self.strides).requires_grad_(self.requires_grad)


Metas = tuple[Meta, ...]
At = Callable[[int, int], AbstractContextManager[None]]  # (stage, place in the run) → what its computation runs inside


class Stage(PipelineStage):
    """One stage of a pipeline, as torch's schedules call it.

    `part`: tensors in, a tuple of tensors out; the last stage returns its loss. `halves`: compute the gradients of
    weights apart from those of inputs, when a schedule wants them apart; else they come together, with the first.
    """

    def __init__(
        self, part: nn.Module, index: int, count: int, device: torch.device, group: dist.ProcessGroup, *,
        forward_at: At, backward_at: At, trees: StageTrees | None = None, halves: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(part, index, count, device, group=group)
        self._forward_at, self._backward_at, self._trees, self._halves = forward_at, backward_at, trees, halves
        self._reduces = True
        self._strides: dict[tuple[int, int], list[int]] = {}  # (shapes of a micro-batch, output) → of its gradient
        self._known: set[int] = set()  # shapes of which the gradients' strides have been sent
        self._forget()

    def _forget(self) -> None:
        # Each by place in the run:
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._output_gradients: dict[int, Gradients] = {}
        self._carried: dict[int, tuple[Tensor, ...]] = {}
        self._input_gradients: dict[int, Gradients] = {}
        self._half_done: dict[int, Backward] = {}  # inputs' gradients are there, weights' are still to come
        self._arriving: dict[int, dict[int, Tensor]] = {}  # strides of outputs' gradients, by output
        self._laid: dict[tuple[int, int], list[int]] = {}  # (place, input) → strides of its gradient

    def begin(
        self, keys: Sequence[int], inputs: Sequence[Metas], outputs: Sequence[Metas], *, reduces: bool
    ) -> None:  # fmt: skip
        """Prepare for a run: what each micro-batch brings and sends on, and whether it reduces gradients at its end.

        `keys` stand for the micro-batches' shapes. Where bits count, the strides of gradients are sent with the first
        ones of each shape.
        """
        self._forget()
        self._keys, self._input_metas, self._output_metas, self._reduces = keys, inputs, outputs, reduces
        self._sends_strides = [self._trees is not None and key not in self._known for key in keys]
        self._known.update(keys)

    # ---- what is sent and received ----

    def _operations(self, kind: Any, tensors: Sequence[Tensor | None], stage: int) -> list[dist.P2POp]:
        assert self.group is not None
        peer = dist.get_global_rank(self.group, self.stage_index_to_group_rank[stage])
        return [dist.P2POp(kind, tensor, peer, self.group) for tensor in tensors if tensor is not None]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self._inputs[fwd_chunk_id] = tuple(meta.empty(self.device) for meta in self._input_metas[fwd_chunk_id])
        return self._operations(dist.irecv, self._inputs[fwd_chunk_id], self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        sent = [output.detach().contiguous() for output in self._outputs[fwd_chunk_id]]
        return self._operations(dist.isend, sent, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        metas = self._output_metas[bwd_chunk_id]
        buffers = tuple(meta.empty(self.device) if meta.requires_grad else None for meta in metas)
        carried = () if self._trees is None else self._trees.buffers(self.stage_index)
        self._output_gradients[bwd_chunk_id], self._carried[bwd_chunk_id] = buffers, carried
        strides: dict[int, Tensor] = {}
        if self._sends_strides[bwd_chunk_id]:
            sizes = {place: buffer.ndim for place, buffer in enumerate(buffers) if buffer is not None}
            strides = {p: torch.empty(ndim, dtype=torch.int64, device=self.device) for p, ndim in sizes.items() if ndim}
        self._arriving[bwd_chunk_id] = strides
        return self._operations(dist.irecv, (*buffers, *carried, *strides.values()), self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        handed_on = self._input_gradients.pop(bwd_chunk_id)
        sent = [None if value is None else value.contiguous() for value in handed_on]
        if self._sends_strides[bwd_chunk_id]:
            gradients = handed_on[: len(self._input_metas[bwd_chunk_id])]
            of_each = [gradient.stride() for gradient in gradients if gradient is not None and gradient.ndim]
            sent += [torch.tensor(strides, device=self.device) for strides in of_each]
        return self._operations(dist.isend, sent, self.stage_index - 1)

    # Between two stages of one rank nothing is sent.

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._inputs[mb_index] = tuple(output.detach() for output in prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Gradients:
        return self._input_gradients.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Gradients, mb_index: int) -> None:
        count = len(self._output_metas[mb_index])
        self._output_gradients[mb_index] = next_stage_bwd_outputs[:count]
        self._carried[mb_index] = tuple(value for value in next_stage_bwd_outputs[count:] if value is not None)

    # ---- what is computed ----

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:  # fmt: skip
        metas = self._input_metas[fwd_chunk_id]
        received = () if self.is_first else self._inputs.pop(fwd_chunk_id)
        inputs = tuple(meta.input_of(tensor) for tensor, meta in zip(received, metas, strict=True))
        for place, value in enumerate(inputs if self._trees is not None else ()):
            if value.requires_grad:
                value.register_hook(partial(self._note_strides, fwd_chunk_id, place))  # type: ignore[no-untyped-call]
        _reduces_by_hand(self.submod)
        with self._forward_at(self.stage_index, fwd_chunk_id):
            output = self.forward_maybe_with_nosync(*inputs)  # type: ignore[no-untyped-call]
        outputs = (output,) if isinstance(output, Tensor) else output
        if not self.is_last:
            self._check(outputs, self._output_metas[fwd_chunk_id])
        self._inputs[fwd_chunk_id], self._outputs[fwd_chunk_id] = inputs, outputs
        return output

    def _note_strides(self, chunk: int, place: int, gradient: Tensor) -> None:
        """Note how an input's gradient lies as it is made: autograd lays it like the input where it stores it."""
        self._laid[chunk, place] = list(gradient.stride())

    def _check(self, outputs: tuple[Tensor, ...], expected: Metas) -> None:
        found = tuple(Meta.of(output) for output in outputs)
        if found != expected:
            what = f"stage {self.stage_index} put out {_shapes(found)}, but before, from inputs of the same shapes, "
            what += f"{_shapes(expected)}"
            fix = "let the shapes in the middle of the model depend on the shapes of its inputs alone"
            raise RunError(what, why="the next stage waits for tensors of the earlier shapes", fix=fix)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        outputs, inputs = self._outputs.pop(bwd_chunk_id), self._inputs.pop(bwd_chunk_id)
        if self.is_last:
            assert loss is not None
            outputs, sent_back = (loss,), None
        else:
            sent_back = self._as_made(bwd_chunk_id, self._output_gradients.pop(bwd_chunk_id))
        carried = self._carried.pop(bwd_chunk_id, ())
        call = Backward(outputs, sent_back, inputs)
        whole = full_backward or not self._halves
        with self._backward_at(self.stage_index, bwd_chunk_id):
            if whole:
                gradients = self._whole(call, carried)
            else:  # gradients of the weights wait for `backward_weight_one_chunk`
                self._half_done[bwd_chunk_id], gradients = call, call.nothing
                if call.differentiable and not self.is_first:
                    gradients = call.first_half(partial(self.backward_maybe_with_nosync, "input"))
        handed_on = self._done(bwd_chunk_id, carried) if whole else ()
        found = [
            _sendable(value, gradient, self._laid.pop((bwd_chunk_id, place), None))
            for place, (value, gradient) in enumerate(zip(inputs, gradients, strict=True))
        ]
        self._input_gradients[bwd_chunk_id] = (*found, *handed_on)

    def _as_made(self, chunk: int, gradients: Gradients) -> Gradients:
        """Return gradients that have arrived with the strides that they had where they were made, if these are sent."""
        key = self._keys[chunk]
        for place, strides in self._arriving.pop(chunk, {}).items():
            self._strides[key, place] = strides.tolist()  # host waits for the device, in the first run of these shapes
        return tuple(
            laid_out(gradient, self._strides[key, place])
            if gradient is not None and (key, place) in self._strides
            else gradient
            for place, gradient in enumerate(gradients)
        )

    def _done(self, chunk: int, carried: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        return () if self._trees is None else self._trees.done(self.stage_index, chunk, carried)

    def _whole(self, call: Backward, carried: tuple[Tensor, ...] = ()) -> Gradients:
        if not call.differentiable:
            return call.nothing
        arguments = call.arguments()
        if carried and self._trees is not None:
            for weight, running_sum in self._trees.roots(self.stage_index, carried):
                arguments["stage_output"] += (weight,)
                arguments["output_grads"] += (running_sum,)
        gradients, _ = self.backward_maybe_with_nosync("full", arguments)
        if self.is_last:
            call.outputs[0].detach_()  # or the schedule keeps the loss's graph until the end of the run
        return gradients

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self._halves:
            return
        call = self._half_done.pop(bwd_chunk_id)
        if call.differentiable:
            with self._backward_at(self.stage_index, bwd_chunk_id):
                if self.is_first:  # it has no inputs whose gradients come first
                    self.backward_maybe_with_nosync("full", call.arguments())
                elif call.groups is not None:
                    arguments = {"stage_output": call.outputs, "param_groups": call.groups}
                    self.backward_maybe_with_nosync("weight", arguments)
                else:
                    call.weights_anew([p for p in self.submod.parameters() if p.requires_grad])
                lay_gradients(self.submod.parameters())
        self._done(bwd_chunk_id)

    def clear_runtime_states(self) -> None:
        """Do nothing: `begin` has reset the state before the schedule starts."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self._reduces:
            super().perform_reduce_grad(grad_scale_factor)

    # From torch 2.15 on, schedules with several stages a rank call its two halves.

    def start_gradient_reduction(self) -> None:
        if self._reduces:
            super().start_gradient_reduction()  # type: ignore[misc]

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        if self._reduces:
            super().wait_for_gradient_reduction(grad_scale_factor)  # type: ignore[misc]


def _sendable(value: Tensor, gradient: Tensor | None, strides: Sequence[int] | None) -> Tensor | None:
    """Return a gradient as the previous stage waits for it, with the strides as it was made, where bits count.

    It is zeros for an input that was not used.
    """
    if not value.requires_grad:
        return None
    if gradient is None:
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    return gradient.contiguous() if strides is None else laid_out(gradient, strides)


def _shapes(metas: Metas) -> str:
    return ", ".join(f"{str(m.dtype).removeprefix('torch.')}{list(m.shape)}" for m in metas) or "nothing"


def _reduces_by_hand(unit: Any) -> None:
    """Announce, before a forward pass, that gradients are reduced on request; FSDP2 needs this from torch 2.15 on."""
    if hasattr(unit, "set_manual_backward_finalization") and torch.is_grad_enabled():
        unit.set_manual_backward_finalization(True)


def reduce_gradients(unit: Any) -> None:
    """Sum the gradients of an FSDP2 unit, whose backward passes are over, over its replicas and shards."""
    if not hasattr(unit, "finalize_backward"):  # before torch 2.15
        PipelineStage.perform_reduce_grad(SimpleNamespace(submod=unit), 1)  # type: ignore[arg-type]
        return
    _reduces_by_hand(unit)
    unit.set_requires_gradient_sync(True)
    unit.set_reshard_after_backward(True)
    expect_reduction(unit)  # its own forward pass, which would announce it, does not run in this step
    unit.finalize_backward()
    unit.set_manual_backward_finalization(False)
