"""Carries activations and gradients between pipeline stages, as a rank's program says when.

A `Transport` starts a send after the pass that has made the message, and a receive before the pass
that needs it (`lockstep.parallel.execution.programs` has their order). Three of them:

    PeerToPeer   messages of known shapes, into buffers that wait for them: training
    Described    messages of any shapes, each after its description: the first batch of a new shape
    Rehearsed    no messages: a dry run, or a rank without a pipeline

What is sent is contiguous: gloo refuses other tensors, and the peer would wait for ever. What
arrives gets the strides that it had, on which the bits of the next kernel may depend. Those of
activations follow from shapes, as the ranks have learned them; those of gradients travel with the
first ones of each shape, where bits count.

Tests: tests/parallel/execution/test_transport.py
"""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import RunError
from lockstep.parallel.execution.programs import Message
from lockstep.parallel.strides import laid_out
from lockstep.process_group.collectives import message_device

Tensors = tuple[Tensor, ...]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Meta:
    """The description of a tensor, by which a buffer is made before the tensor arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...] = field(compare=False)

    @staticmethod
    def of(tensor: Tensor) -> "Meta":
        """Return a tensor's description."""
        return Meta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.stride())

    def empty(self, device: torch.device) -> Tensor:
        """Return a contiguous buffer."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def as_gradient(self) -> "Meta":
        """Return the description of a gradient of such a tensor, which lies row by row."""
        sizes = [max(size, 1) for size in self.shape]
        strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        return Meta(self.shape, self.dtype, requires_grad=False, strides=strides)

    def leaf_of(self, arrived: Tensor) -> Tensor:
        """Return what has arrived as a leaf of a graph, with the strides that it had."""
        return laid_out(arrived, self.strides).requires_grad_(self.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Metas = tuple[Meta, ...]


@dataclass(frozen=True)
class KnownMessages:
    """Describes the messages of a run that a rank knows before they are sent."""

    arriving: Mapping[Message, Metas] = field(default_factory=dict)
    leaving: Mapping[Message, Metas] = field(default_factory=dict)  # those of activations
    # Messages that bring the strides of their tensors; both ranks of a message know it.
    with_strides: AbstractSet[Message] = frozenset()


class Transport(Protocol):
    """Carries messages between ranks."""

    def begin(self, known: KnownMessages) -> None:
        """Begin a run of passes, of whose messages so much is known."""

    def send(self, message: Message, peer: int, tensors: Tensors) -> None:
        """Start to send tensors that nothing else writes to."""

    def receive(self, message: Message, peer: int) -> None:
        """Start to receive a message."""

    def take(self, message: Message) -> Tensors:
        """Return a message's tensors, once they are there."""

    def finish(self) -> None:
        """Wait until all that was sent is through."""

    def forget(self) -> None:
        """Forget messages that are under way, after an error."""


@dataclass
class PeerToPeer:
    """Messages of known shapes over a process group.

    Both ranks start those between them in the same order.
    """

    group: dist.ProcessGroup
    device: torch.device
    carried_on: torch.device = field(init=False)  # where messages lie on their way
    # the strides of tensors, that have come with messages of the run
    strides: dict[Message, list[tuple[int, ...]]] = field(default_factory=dict, init=False)
    _known: KnownMessages = field(default_factory=KnownMessages)
    _arriving: dict[Message, tuple[Tensors, list[dist.Work | None]]] = field(default_factory=dict)
    # kept until they are through
    _leaving: list[tuple[dist.Work | None, Tensor]] = field(default_factory=list)
    _last: int = 0  # how many of them are of the message that was sent last

    def __post_init__(self) -> None:
        self.carried_on = message_device(self.group, self.device)

    def begin(self, known: KnownMessages) -> None:
        """Begin a run of passes, of whose messages all shapes are known."""
        self._known = known
        self.strides = {}

    def send(self, message: Message, peer: int, tensors: Tensors) -> None:
        """Start to send tensors; on a CPU wait for the message before the last one.

        A RunError if they are activations of other shapes than the next stage waits for.
        """
        expected = self._known.leaving.get(message)
        if expected is not None:
            _check_shapes(message, tensors, expected)
        if self.carried_on.type == "cpu":
            # gloo says that a send is through only to those who wait for it, so tensors would pile
            # up. The order of messages allows to wait for each at once; one is let to run beside
            # the computation.
            before = len(self._leaving) - self._last
            _wait([work for work, _ in self._leaving[:before]])
            del self._leaving[:before]
        else:  # waiting would hold up the computation, and the device says what is through
            self._leaving = [(work, kept) for work, kept in self._leaving if not _is_through(work)]
        sent = [tensor.detach().contiguous().to(self.carried_on) for tensor in tensors]
        if message in self._known.with_strides:
            strides = [stride for tensor in tensors for stride in tensor.stride()]
            # once for each shape of a batch
            # host waits for the device
            sent.append(torch.tensor(strides, dtype=torch.int64, device=self.carried_on))
        # Kept until they are through: the transport reads the memory while the pass goes on.
        self._leaving += [
            (dist.isend(tensor, group=self.group, group_dst=peer), tensor) for tensor in sent
        ]
        self._last = len(sent)

    def receive(self, message: Message, peer: int) -> None:
        """Start to receive a message into new buffers."""
        into = tuple(meta.empty(self.carried_on) for meta in self._known.arriving[message])
        if message in self._known.with_strides:
            count = sum(tensor.ndim for tensor in into)
            into = (*into, torch.empty(count, dtype=torch.int64, device=self.carried_on))
        self._arriving[message] = (
            into,
            [dist.irecv(tensor, group=self.group, group_src=peer) for tensor in into],
        )

    def take(self, message: Message) -> Tensors:
        """Return a message's tensors, once they are there."""
        tensors, works = self._arriving.pop(message)
        _wait(works)
        metas = self._known.arriving[message]
        if message in self._known.with_strides:
            # host waits for the device, in the first run of these shapes
            flat = iter(tensors[-1].tolist())
            tensors = tensors[:-1]
            strides = [tuple(next(flat) for _ in range(tensor.ndim)) for tensor in tensors]
            self.strides[message] = strides
            metas = replace_strides(metas, strides)
        on_device = [tensor.to(self.device) for tensor in tensors]
        return tuple(meta.leaf_of(tensor) for meta, tensor in zip(metas, on_device, strict=True))

    def finish(self) -> None:
        """Wait until all that was sent is through."""
        _wait([work for work, _ in self._leaving])
        self._leaving = []
        self._last = 0

    def forget(self) -> None:
        """Forget messages that are under way, after an error."""
        self._arriving = {}
        self._leaving = []
        self._last = 0


def replace_strides(metas: Metas, strides: Sequence[tuple[int, ...]]) -> Metas:
    """Return descriptions of tensors with other strides."""
    return tuple(replace(meta, strides=own) for meta, own in zip(metas, strides, strict=True))


def _check_shapes(message: Message, tensors: Tensors, expected: Metas) -> None:
    """Raise a RunError unless activations match those of earlier inputs of these shapes."""
    received = tuple(map(Meta.of, tensors))
    if received == expected:
        return
    now = ", ".join(map(str, received)) or "nothing"
    before = ", ".join(map(str, expected)) or "nothing"
    raise RunError(
        f"stage {message.stage - 1} put out {now}, but before, from inputs of the same shapes,"
        f" {before}",
        why="the next stage waits for tensors of the earlier shapes",
        fix="let the shapes in the middle of the model depend on the shapes of its inputs alone",
    )


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _is_through(work: dist.Work | None) -> bool:
    return work is None or work.is_completed()


@dataclass
class Described:
    """Messages of any shapes, each after a description of its tensors.

    `take` receives them, and waits.
    """

    group: dist.ProcessGroup
    device: torch.device  # of the tensors
    objects_on: torch.device  # the device on which the group carries pickled objects
    carried_on: torch.device = field(init=False)  # where messages lie on their way
    _sources: dict[Message, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.carried_on = message_device(self.group, self.device)

    def begin(self, known: KnownMessages) -> None:
        """Do nothing: descriptions are sent with the messages."""

    def send(self, message: Message, peer: int, tensors: Tensors) -> None:
        """Send a description and the tensors, and wait until they are through."""
        described = [tuple(map(Meta.of, tensors))]
        dist.send_object_list(described, group_dst=peer, group=self.group, device=self.objects_on)
        for tensor in tensors:
            dist.send(
                tensor.detach().contiguous().to(self.carried_on), group_dst=peer, group=self.group
            )

    def receive(self, message: Message, peer: int) -> None:
        """Note from whom a message comes."""
        self._sources[message] = peer

    def take(self, message: Message) -> Tensors:
        """Receive a message; its tensors need gradients where those that were sent do."""
        peer = self._sources.pop(message)
        box: list[Any] = [None]
        dist.recv_object_list(box, group_src=peer, group=self.group, device=self.objects_on)
        metas: Metas = box[0]
        tensors = [meta.empty(self.carried_on) for meta in metas]
        for tensor in tensors:
            dist.recv(tensor, group_src=peer, group=self.group)
        on_device = [tensor.to(self.device) for tensor in tensors]
        return tuple(meta.leaf_of(tensor) for tensor, meta in zip(on_device, metas, strict=True))

    def finish(self) -> None:
        """Do nothing: all that was sent is through."""

    def forget(self) -> None:
        """Forget messages that are under way, after an error."""
        self._sources.clear()


@dataclass
class Rehearsed:
    """The messages of a dry run, or a rank without a pipeline, which are made when taken."""

    device: torch.device = _CPU
    metas: Callable[[Message], Metas] = lambda _message: ()

    def begin(self, known: KnownMessages) -> None:
        """Do nothing."""

    def send(self, message: Message, peer: int, tensors: Tensors) -> None:
        """Do nothing."""

    def receive(self, message: Message, peer: int) -> None:
        """Do nothing."""

    def take(self, message: Message) -> Tensors:
        """Return new tensors without values."""
        return tuple(meta.leaf_of(meta.empty(self.device)) for meta in self.metas(message))

    def finish(self) -> None:
        """Do nothing."""

    def forget(self) -> None:
        """Do nothing."""
