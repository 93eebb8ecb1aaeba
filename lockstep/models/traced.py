"""Makes a chain of segments with torch's tracer, for a model without `segments()`.

    model = lockstep.models.traced.trace(model, example_ids)

The result can be trained under a pipeline, or any other strategy.

torch.export captures the forward pass for training and for evaluation. Each graph is divided where
a repeated block begins, and after the last one. Segments borrow their parameters from the model
(`lockstep.models.chain`): checkpoints are those of the original. It draws the original's random
numbers, too: each block from the key of its name, what follows from the key that hooks set after it
(`lockstep.randomness.key_segments`); so it becomes a segment if it draws.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lockstep.errors import UsageError, first_line
from lockstep.models.chain import look_up, run_segments
from lockstep.models.observed import note_losses
from lockstep.models.protocol import blocks_of
from lockstep.torch_compat.module_state import persistent_buffers
from lockstep.torch_compat.operators import schema_of
from lockstep.torch_compat.pytree import TreeSpec, tree_unflatten

_SEEDED = torch.Tag.nondeterministic_seeded


def trace(model: nn.Module, *example: Tensor) -> "Chain":
    """Make a chain of a model with torch.export.

    UsageError if torch can't, or a block that draws runs twice.

    The model is on the CPU, with values; its parameters become the chain's, by the same names.
    `example`: positional arguments of its forward pass; dim 0 of each is the micro-batch, of two
    samples or more. The chain takes only these sizes of the other dims.
    """
    blocks = [name for name, _ in blocks_of(model)]
    if not blocks:
        raise UsageError(
            "there are no repeated blocks to cut between",
            fix="give the model segments() of its own",
        )
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    was_training = model.training
    try:
        training, evaluation = (_exported(model.train(mode), example) for mode in (True, False))
    finally:
        model.train(was_training)
    cutter = _Cutter(*training, blocks, parameters)
    gaps = cutter.gaps_that_draw()
    cuts = cutter.cut(gaps), _Cutter(*evaluation, blocks, parameters).cut(gaps)
    pieces = {
        name: TracedSegment(random_key, for_training, for_evaluation, model)
        for (name, random_key), for_training, for_evaluation in zip(
            _random_keys(blocks, gaps).items(), *cuts, strict=True
        )
    }
    return Chain(model, {name: piece for name, piece in pieces.items() if piece.computes}, example)


class Chain(nn.Module):
    """A traced model: its parameters in their places, its forward pass in pieces."""

    def __init__(
        self, model: nn.Module, pieces: Mapping[str, "TracedSegment"], example: Sequence[Tensor]
    ) -> None:
        super().__init__()
        persistent = persistent_buffers(model)
        tensors = (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))
        if taken := [
            name for name, _ in (*tensors, *model.named_children()) if hasattr(self, name)
        ]:
            what = (
                f"{type(model).__name__} has a member named {taken[0]}, and so has a traced model"
            )
            raise UsageError(
                what, fix="give that member another name, or the model segments() of its own"
            )
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in persistent)
        for name, child in model.named_children():
            self.add_module(name, child)
        self._names = list(pieces)
        self._pieces = nn.ModuleList(pieces.values())
        self._borrows = {name: piece.borrows for name, piece in pieces.items()}
        self._arguments = list(inspect.signature(model.forward).parameters)[: len(example)]
        self._pieces[0].register_forward_pre_hook(_only_shapes_of(example))
        for key in ("inputs", "loss", "count", "loss_reduction"):
            if hasattr(model, key):
                setattr(self, key, getattr(model, key))

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the traced model's inputs.

        They are members of a mapping by their names, or the first members of a tuple.
        """
        if isinstance(batch, Mapping):
            return tuple(batch[name] for name in self._arguments)
        return tuple(batch[: len(self._arguments)]) if isinstance(batch, tuple | list) else (batch,)

    def segments(self) -> list[tuple[str, nn.Module]]:
        return list(zip(self._names, self._pieces, strict=True))

    def shared_parameters(self) -> dict[str, dict[str, str]]:
        return self._borrows

    def forward(self, *inputs: Any) -> Any:
        return run_segments(self, self.segments(), self.shared_parameters(), *inputs)


class TracedSegment(nn.Module):
    """One segment: a graph for training and one for evaluation, which own nothing but constants."""

    def __init__(
        self, random_key: str, training: "_GraphPiece", evaluation: "_GraphPiece", model: nn.Module
    ) -> None:
        super().__init__()
        self.random_key = random_key
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
        self._training, self._evaluation = (
            fx.GraphModule(cut.inner, cut.graph) for cut in (training, evaluation)
        )
        self._structures = {True: training.structure, False: evaluation.structure}

    def forward(self, *values: Any, **borrowed: Tensor) -> Any:
        """Run the graph; positional arguments are the previous piece's result."""
        tensors = {
            key: borrowed[key] if key in borrowed else getattr(self, key)
            for key in self._wanted[self.training]
        }
        outputs = (self._training if self.training else self._evaluation)(*values, **tensors)
        structure = self._structures[self.training]
        return outputs if structure is None else tree_unflatten(outputs, structure)


def _only_shapes_of(example: Sequence[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Return a hook that rejects inputs of other shapes than those traced.

    A graph holds the shapes as constants.
    """
    traced = [tuple(tensor.shape[1:]) for tensor in example]

    def check(_piece: nn.Module, inputs: tuple[Any, ...]) -> None:
        given = [tuple(tensor.shape[1:]) for tensor in inputs]
        if given != traced:
            what = (
                f"the model was traced with samples of the shapes {traced}, and gets samples of"
                f" {given}"
            )
            fix = "trace it with an example from the data, and make all samples of one length"
            raise UsageError(
                what, why="a traced model takes any number of samples, of one shape", fix=fix
            )

    return check


def _exported(model: nn.Module, example: tuple[Tensor, ...]) -> tuple[fx.GraphModule, TreeSpec]:
    """Return a captured forward pass, and the structure of its result."""
    dims = tuple({0: torch.export.Dim.DYNAMIC} for _ in example)
    parameters = inspect.signature(model.forward).parameters.values()
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    try:
        program = torch.export.export(model, example, dynamic_shapes=(dims,) if variadic else dims)
    except Exception as error:  # anything that torch.export meets in the model's own code
        what = f"torch can't export {type(model).__name__}"
        fix = (
            "give the model a method segments() -> [(name, module)], each taking what the one"
            " before it returns"
        )
        raise UsageError(what, why=first_line(error), fix=fix) from error
    running = [
        name
        for name, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None
    ]
    if changed := [*program.graph_signature.buffers_to_mutate.values(), *running]:
        what = f"{type(model).__name__} changes buffers in its forward pass: {', '.join(changed)}"
        fix = "give the model segments() of its own, or use a normalisation without them"
        raise UsageError(what, why="a traced model keeps no running statistics", fix=fix)
    module = program.module()
    structure = program.call_spec.out_spec
    assert isinstance(module, fx.GraphModule)
    assert structure is not None
    note_losses(module)
    return module, structure


def _random_keys(blocks: Sequence[str], gaps: Sequence[int]) -> dict[str, str]:
    """Return name → random key for the pieces of the chain, in order.

    The key is that of the piece's random numbers in the original model.
    """
    keys = {"inputs": ""}
    for number, block in enumerate(blocks):
        keys[block] = block
        if number in gaps:
            keys[f"{block}.after"] = f"{block}/after"
    return {**keys, "outputs": f"{blocks[-1]}/after"}


@dataclass
class _GraphPiece:
    """One piece of a graph."""

    graph: fx.Graph  # takes live values, then `attributes` by keyword; returns live values
    attributes: dict[str, tuple[str, Tensor]]  # keyword → (name in the model, tensor)
    # name → graph that this one calls: what runs without gradients, or autocast
    inner: dict[str, fx.GraphModule]
    computes: bool  # whether it does more than pass values on
    structure: TreeSpec | None  # of the last piece's flattened result; None for the others


class _Cutter:
    """Divides an exported graph where blocks begin, and after the last one.

    Tensors made of inputs or parameters are computed in one piece, and passed to the pieces that
    need them. Sizes, and tensors made of constants alone (masks, positions), are computed again in
    each piece.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        structure: TreeSpec,
        blocks: Sequence[str],
        parameters: Iterable[str],
    ) -> None:
        self._module = module
        self._structure = structure
        self._blocks = blocks
        self._parameters = set(parameters)
        graph = self._module.graph
        self._nodes = [n for n in graph.nodes if n.op in ("placeholder", "call_function")]
        [self._output] = [n for n in graph.nodes if n.op == "output"]
        self._repeated: set[fx.Node] = set()  # computed again in each piece
        # Of a node: 0 before all blocks, 2i + 1 in block i, 2i + 2 after it.
        self._region: dict[fx.Node, int] = {}
        self._piece: dict[fx.Node, int] = {}
        current = 0
        for node in self._nodes:
            current = max(current, self._region_of(node, current))
            if self._repeats(node):
                self._repeated.add(node)
            else:
                self._region[node] = 0 if node.op == "placeholder" else current

    def gaps_that_draw(self) -> list[int]:
        """Return the numbers of the blocks after which, before the next block, numbers are drawn.

        The last block is not among them.
        """
        drawing = {region for node, region in self._region.items() if self._draws(node)}
        return [number for number in range(len(self._blocks) - 1) if 2 * number + 2 in drawing]

    def cut(self, gaps: Sequence[int]) -> list[_GraphPiece]:
        """Divide the graph into pieces, in order.

        What follows the blocks with the numbers `gaps` is one of its own.
        """
        piece_of = {0: 0}
        count = 0
        for number in range(len(self._blocks)):
            count += 1
            piece_of[2 * number + 1] = count
            count += number in gaps or number == len(self._blocks) - 1
            piece_of[2 * number + 2] = count
        self._last = count
        self._piece = {node: piece_of[region] for node, region in self._region.items()}
        self._refuse_changes_across()
        return [self._cut(piece) for piece in range(count + 1)]

    def _region_of(self, node: fx.Node, current: int) -> int:
        """Return the region of a node: block i is 2i + 1, and what stands before it 2i."""
        stack = node.meta.get("nn_module_stack", {})
        for call, (path, _) in stack.items():
            if path in self._blocks:
                if "@" in call and self._draws(node):  # torch numbers a module's repeated runs
                    what = f"{path} runs more than once in a forward pass, and draws random numbers"
                    fix = "give the model segments() of its own, or switch its dropout off"
                    raise UsageError(
                        what, why="the traced model would draw others than the model", fix=fix
                    )
                return 2 * self._blocks.index(path) + 1
        return current + current % 2 if stack else current

    def _draws(self, node: fx.Node) -> bool:
        """Return whether a node draws random numbers, itself or in a graph that it calls."""
        if _SEEDED in getattr(node.target, "tags", ()):
            return True
        inner = [_inner_graph(self._module, argument) for argument in node.all_input_nodes]
        return any(
            _SEEDED in getattr(each.target, "tags", ())
            for module in inner
            if module is not None
            for each in module.graph.nodes
        )

    def _repeats(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return False
        if not isinstance(node.meta.get("val"), Tensor | tuple | list):
            return True  # a size
        if self._draws(node):
            return False
        return all(
            n in self._repeated or (n.op == "get_attr" and n.target not in self._parameters)
            for n in node.all_input_nodes
        )

    def _refuse_changes_across(self) -> None:
        """Reject in-place changes that another piece would not see."""
        for node in self._nodes:
            schema = schema_of(node.target)
            if schema is None or not schema.is_mutable:
                continue
            changed = node.args[0]
            assert isinstance(changed, fx.Node)
            if len({self._piece.get(user, -1) for user in changed.users}) > 1:
                raise UsageError(
                    f"{node.name} changes in place what another segment uses",
                    fix="write it out of place",
                )

    def _live(self, piece: int) -> list[fx.Node]:
        """Return the inputs of a piece: values made before it, and used in it or later."""
        return [
            node
            for node, made in self._piece.items()
            if made < piece and any(self._used_in(user) >= piece for user in node.users)
        ]

    def _used_in(self, user: fx.Node) -> int:
        if user.op == "output":
            return self._last
        return self._piece.get(user, -1)  # sizes are read from any tensor at hand

    def _cut(self, piece: int) -> _GraphPiece:
        """Return one piece of the graph, which computes from what earlier pieces computed.

        The inputs of a piece are what is live at its begin, then its parameters and constants; its
        outputs are what is live at the begin of the next. Of a chain `embed → linear → head`, cut
        before and after `linear`, the middle piece has two placeholders, the embedded values and
        the weight, one call, and returns its result.
        """
        graph = fx.Graph()
        copies = dict[fx.Node, fx.Node]()
        own = [node for node, made in self._piece.items() if made == piece]
        live = self._live(piece) if piece else [node for node in own if node.op == "placeholder"]
        for node in live:
            copies[node] = graph.placeholder(node.name)
        is_last = piece == self._last
        constants = self._constants_of([*own, self._output] if is_last else own)
        attributes, inner = self._copy_constants(constants, graph, copies)

        def copied(node: fx.Node) -> fx.Node:
            """Return the copy of a node, which is made with all that it needs."""
            if node not in copies:
                is_size = node.target is torch.ops.aten.sym_size.int
                if is_size and node.args[0] not in copies:
                    size = _same_size(node, live, copies)
                    copies[node] = graph.call_function(torch.ops.aten.sym_size.int, size)
                else:
                    copies[node] = graph.node_copy(node, copied)
            return copies[node]

        for node in own:
            copied(node)
        if is_last:
            [values] = self._output.args
            assert isinstance(values, tuple | list)
            graph.output(
                tuple(copied(value) if isinstance(value, fx.Node) else value for value in values)
            )
            return _GraphPiece(graph, attributes, inner, True, self._structure)
        outputs = tuple(copied(value) for value in self._live(piece + 1))
        graph.output(outputs[0] if len(outputs) == 1 else outputs)
        computes = any(node.op != "placeholder" for node in own)
        return _GraphPiece(graph, attributes, inner, computes, None)

    def _copy_constants(
        self,
        constants: Iterable[fx.Node],
        graph: fx.Graph,
        copies: dict[fx.Node, fx.Node],
    ) -> tuple[dict[str, tuple[str, Tensor]], dict[str, fx.GraphModule]]:
        """Copy parameters and constants into a graph: tensors as inputs, inner graphs as they are.

        Return name of the input → name and tensor in the model, and name → inner graph.
        """
        attributes: dict[str, tuple[str, Tensor]] = {}
        inner: dict[str, fx.GraphModule] = {}
        for node in constants:
            name = str(node.target)
            module = _inner_graph(self._module, node)
            if module is not None:
                inner[name] = module
                copies[node] = graph.get_attr(name)
            else:
                copies[node] = graph.placeholder(node.name)
                attributes[node.name] = (name, look_up(self._module, name))
        return attributes, inner

    def _constants_of(self, nodes: Sequence[fx.Node]) -> Iterable[fx.Node]:
        """Return the parameters and constants that nodes need, also through repeated nodes."""
        seen = dict.fromkeys(nodes)
        queue = list(nodes)
        while queue:
            for node in queue.pop().all_input_nodes:
                if node not in seen and (node.op == "get_attr" or node in self._repeated):
                    seen[node] = None
                    queue.append(node)
        return [node for node in seen if node.op == "get_attr"]


def _inner_graph(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a node names for another node to call.

    None if it names a tensor, or nothing.
    """
    member = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return member if isinstance(member, fx.GraphModule) else None


def _same_size(
    node: fx.Node, live: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]
) -> tuple[fx.Node, int]:
    """Return an available tensor and its dim with the size that `node` reads."""
    wanted = str(node.meta["val"])
    for tensor in live:
        for dim, size in enumerate(tensor.meta["val"].shape):
            if str(size) == wanted:
                return copies[tensor], dim
    what = f"a segment needs the size {wanted}, and no tensor that it gets has it"
    raise UsageError(
        what, fix="give the model segments(), or sizes that do not depend on the batch"
    )
