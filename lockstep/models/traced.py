"""A chain of segments made by torch's tracer, for a model that has no `segments()` and that can't be given any.

    model = lockstep.models.traced.trace(model, example_ids)    # then train it under a pipeline, or any strategy

torch.export captures the forward pass twice, for training and for evaluation. Each graph is cut where a repeated block
begins, and behind the last one; what later segments still need travels along as further outputs. Parameters stay in
the model under their names, and segments borrow them (`lockstep.models.chain`): checkpoints are those of the model that
was traced. Blocks are graphs then: FSDP takes a stage as one unit, and recomputation of blocks is not to be had.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lockstep.errors import UsageError
from lockstep.models.chain import look_up, run_segments
from lockstep.models.protocol import blocks_of

_SEEDED = torch.Tag.nondeterministic_seeded


def trace(model: nn.Module, *example: Tensor) -> "Chain":
    """Make a chain of a model.

    Args:
        model: real, on the CPU; its parameters become the chain's, by the same names.
        example: positional arguments of its forward pass; dim 0 of each is the micro-batch, of two samples or more.

    Raises:
        UsageError: torch can't export it, or its outputs are no tensors, or it keeps running statistics.
    """
    blocks = [name for name, _ in blocks_of(model)]
    if not blocks:
        raise UsageError("there are no repeated blocks to cut between", fix="give the model segments() of its own")
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    was_training = model.training
    try:
        cuts = [_Cutter(_exported(model.train(mode), example), blocks, parameters).cut() for mode in (True, False)]
    finally:
        model.train(was_training)
    names = ["inputs", *blocks, "outputs"]
    pieces = {name: Piece(one, other, model) for name, one, other in zip(names, *cuts, strict=True)}
    return Chain(model, {name: piece for name, piece in pieces.items() if piece.computes}, len(example))


class Chain(nn.Module):
    """A traced model: its parameters where they were, its forward pass in pieces."""

    def __init__(self, model: nn.Module, pieces: Mapping[str, "Piece"], num_inputs: int) -> None:
        super().__init__()
        persistent = model.state_dict(keep_vars=True)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in persistent)
        for name, child in model.named_children():
            self.add_module(name, child)
        self._names, self._pieces = list(pieces), nn.ModuleList(pieces.values())
        self._borrows = {name: piece.borrows for name, piece in pieces.items()}
        self._arguments = list(inspect.signature(model.forward).parameters)[:num_inputs]
        for key in ("inputs", "loss", "count", "loss_reduction"):
            if hasattr(model, key):
                setattr(self, key, getattr(model, key))

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """What the model was traced with: members of a mapping by their names, or the first ones of a tuple."""
        if isinstance(batch, Mapping):
            return tuple(batch[name] for name in self._arguments)
        return tuple(batch[: len(self._arguments)]) if isinstance(batch, tuple | list) else (batch,)

    def segments(self) -> list[tuple[str, nn.Module]]:
        """The pieces, by the names of the blocks that they compute."""
        return list(zip(self._names, self._pieces, strict=True))

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """None: blocks are graphs here, and nothing runs their modules."""
        return []

    def shared_parameters(self) -> dict[str, dict[str, str]]:
        """What pieces borrow: all that they use."""
        return self._borrows

    def forward(self, *inputs: Any) -> Any:
        """The whole pass."""
        return run_segments(self, *inputs)


class Piece(nn.Module):
    """One segment: a graph for training and one for evaluation, which own nothing but constants."""

    def __init__(self, training: "_Cut", evaluation: "_Cut", model: nn.Module) -> None:
        super().__init__()
        self.computes = training.computes or evaluation.computes
        self.borrows: dict[str, str] = {}  # keyword → canonical name
        self._wanted = {True: list(training.attributes), False: list(evaluation.attributes)}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        canonical = {id(parameter): name for name, parameter in model.named_parameters()}
        for cut in (training, evaluation):
            for keyword, (name, tensor) in cut.attributes.items():
                if name in parameters:
                    self.borrows[keyword] = canonical[id(parameters[name])]
                else:
                    self.register_buffer(keyword, tensor, persistent=False)
        self._training, self._evaluation = (fx.GraphModule({}, cut.graph) for cut in (training, evaluation))

    def forward(self, *values: Any, **borrowed: Tensor) -> Any:
        """Positional: what the piece before returns."""
        tensors = {key: borrowed[key] if key in borrowed else getattr(self, key) for key in self._wanted[self.training]}
        graph = self._training if self.training else self._evaluation
        return graph(*values, **tensors)


def _exported(model: nn.Module, example: tuple[Tensor, ...]) -> fx.GraphModule:
    dims = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
    try:
        program = torch.export.export(model, example, dynamic_shapes=(dims,) if _variadic(model) else dims)
    except Exception as error:  # whatever torch.export meets in the model's own code
        raise UsageError(
            f"torch can't export {type(model).__name__}", why=str(error).strip().splitlines()[0],
            fix="give the model a method segments() -> [(name, module)], each taking what the one before it returns",
        ) from error  # fmt: skip
    running = [name for name, module in model.named_modules() if getattr(module, "running_mean", None) is not None]
    if changed := [*program.graph_signature.buffers_to_mutate.values(), *running]:
        raise UsageError(
            f"{type(model).__name__} changes buffers in its forward pass: {', '.join(changed)}",
            why="a traced model keeps no running statistics",
            fix="give the model segments() of its own, or use a normalisation without them",
        )
    spec = program.call_spec.out_spec
    if spec is None or not (spec.is_leaf() or (spec.type is tuple and spec.num_children == spec.num_leaves)):
        raise UsageError(
            f"{type(model).__name__} returns something else than a tensor or a tuple of them",
            fix="wrap it in a module that returns tensors",
        )
    graph = program.module()
    assert isinstance(graph, fx.GraphModule)
    return graph


def _variadic(model: nn.Module) -> bool:
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_POSITIONAL in kinds


@dataclass
class _Cut:
    """One piece of a graph.

    Attributes:
        graph: takes live values, then `attributes` by keyword; returns live values.
        attributes: keyword → (name in the model, tensor).
        computes: it does more than hand on what it gets.
    """

    graph: fx.Graph
    attributes: dict[str, tuple[str, Tensor]]
    computes: bool


class _Cutter:
    """Cuts an exported graph where blocks begin, and behind the last one.

    Tensors made of inputs or parameters are computed in one piece, and travel to where they are needed. Sizes, and what
    is made of constants alone (masks, positions), are computed anew in each piece.
    """

    def __init__(self, module: fx.GraphModule, blocks: Sequence[str], parameters: Iterable[str]) -> None:
        self._module, self._blocks, self._parameters = module, blocks, set(parameters)
        self._last = len(blocks) + 1
        self._nodes = [n for n in module.graph.nodes if n.op in ("placeholder", "call_function")]
        self._repeated: set[fx.Node] = set()  # computed anew in each piece
        self._piece: dict[fx.Node, int] = {}
        current = 0
        for node in self._nodes:
            current = max(current, self._piece_of(node, current))
            if self._repeats(node):
                self._repeated.add(node)
            else:
                self._piece[node] = 0 if node.op == "placeholder" else current
        self._refuse_changes_across()
        [self._output] = [n for n in module.graph.nodes if n.op == "output"]

    def cut(self) -> list[_Cut]:
        """All pieces, in order."""
        return [self._cut(piece) for piece in range(self._last + 1)]

    def _piece_of(self, node: fx.Node, current: int) -> int:
        stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        for i, block in enumerate(self._blocks, start=1):
            if block in stack:
                return i
        # Between blocks a node belongs to the one before it; behind the last, to the end.
        return self._last if stack and current == len(self._blocks) else current

    def _repeats(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return False
        if not isinstance(node.meta.get("val"), Tensor | tuple | list):
            return True  # a size
        if _SEEDED in getattr(node.target, "tags", ()):
            return False
        return all(self._is_constant(n) or n in self._repeated for n in node.all_input_nodes)

    def _is_constant(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and node.target not in self._parameters

    def _refuse_changes_across(self) -> None:
        """What is changed in place must not be seen by another piece: it would see it as it was."""
        for node in self._nodes:
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                continue
            changed = node.args[0]
            assert isinstance(changed, fx.Node)
            if len({self._piece.get(user, -1) for user in changed.users}) > 1:
                raise UsageError(f"{node.name} changes in place what another segment uses", fix="write it out of place")

    def _live(self, piece: int) -> list[fx.Node]:
        """What goes into a piece: made before it, and used in it or later."""
        return [
            node
            for node, made in self._piece.items()
            if made < piece and any(self._used_in(user) >= piece for user in node.users)
        ]

    def _used_in(self, user: fx.Node) -> int:
        if user.op == "output":
            return self._last
        return self._piece.get(user, -1)  # sizes are read off whatever is there

    def _cut(self, piece: int) -> _Cut:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        attributes: dict[str, tuple[str, Tensor]] = {}
        own = [node for node, made in self._piece.items() if made == piece]
        live = self._live(piece) if piece else [node for node in own if node.op == "placeholder"]
        for node in live:
            copies[node] = graph.placeholder(node.name)
        wanted = list(self._constants_of(own if piece < self._last else [*own, self._output]))
        for node in wanted:
            copies[node] = graph.placeholder(node.name)
            attributes[node.name] = (str(node.target), look_up(self._module, str(node.target)))

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                if node.target is torch.ops.aten.sym_size.int and node.args[0] not in copies:
                    copies[node] = graph.call_function(torch.ops.aten.sym_size.int, _same_size(node, live, copies))
                else:
                    copies[node] = graph.node_copy(node, copied)
            return copies[node]

        for node in own:
            copied(node)
        if piece == self._last:
            [values] = self._output.args
        else:
            values = tuple(self._live(piece + 1))
        assert isinstance(values, tuple | list)
        returned = tuple(copied(value) for value in values)
        graph.output(returned[0] if len(returned) == 1 else returned)
        graph.lint()
        return _Cut(graph, attributes, computes=any(node.op != "placeholder" for node in own))

    def _constants_of(self, nodes: Sequence[fx.Node]) -> Iterable[fx.Node]:
        """Parameters and constants that nodes need, also by way of what is computed anew."""
        seen = dict.fromkeys(nodes)
        queue = list(nodes)
        while queue:
            for node in queue.pop().all_input_nodes:
                if node not in seen and (node.op == "get_attr" or node in self._repeated):
                    seen[node] = None
                    queue.append(node)
        return [node for node in seen if node.op == "get_attr"]


def _same_size(node: fx.Node, live: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]) -> tuple[fx.Node, int]:
    """A tensor at hand, and its dim, that is as long as the one whose size `node` asks for."""
    wanted = str(node.meta["val"])
    for tensor in live:
        for dim, size in enumerate(tensor.meta["val"].shape):
            if str(size) == wanted:
                return copies[tensor], dim
    raise UsageError(
        f"a segment needs the size {wanted}, and no tensor that it gets has it",
        fix="give the model segments(), or sizes that do not depend on the batch",
    )
