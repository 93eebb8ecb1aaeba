"""Collectives of the simulated accelerator: backend `simccl`, which computes by gloo and follows
NCCL's rules.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated_device import device
from tests.simulated_device.device import NAME, SimTensor, Stream, current_stream


class SimWork(dist.Work):
    """A collective that is queued; `wait` makes the current stream wait for it, not the host."""

    def __init__(self, stream: Stream, result: Any) -> None:
        super().__init__()
        self._end = stream.record_event()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        self._end.wait()
        return True

    def is_completed(self) -> bool:
        return self._end.query()

    def get_future(self) -> Any:
        """Return a future that is done: C++ waits for it where no stream of this file can be made
        to.
        """
        self.wait()
        done: Any = torch.futures.Future()
        done.set_result(self._result)
        return done


class SimGroup(dist.ProcessGroup):
    """A communicator with a stream of its own; tensors of the host go to gloo at once.

    They go through a group of their own: on a rank whose stream is late they would overtake what is
    queued there.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("sim", store), rank, size, timeout)
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("sim-host", store), rank, size, timeout)
        self._checks = dist.ProcessGroupGloo(
            dist.PrefixStore("sim-check", store), rank, size, timeout
        )
        self._calls = 0
        self._sending = []  # what is sent has to live on
        self.stream = Stream()

    def getBackendName(self) -> str:  # noqa: N802 — torch's name
        return "simccl"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _queue(
        self,
        name: str,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        compute: Callable[[dist.ProcessGroupGloo], Any],
        result: Any,
        *,
        together: bool = True,
    ) -> Any:
        tensors = [*read, *written]
        if not any(isinstance(each, SimTensor) for each in tensors):
            return compute(self._host)
        assert all(isinstance(each, SimTensor) for each in tensors), (
            "NCCL takes no tensors of the host"
        )
        assert all(each.is_contiguous() for each in tensors), "NCCL takes contiguous tensors only"
        self._calls += 1
        call = f"{self._calls}: {name} {[(tuple(each.shape), str(each.dtype)) for each in tensors]}"
        self.stream.wait_stream(current_stream())

        def work() -> None:
            if together:
                self._compare(call)
            done = compute(self._gloo)
            if done is not None:
                done.wait()
            del tensors[:]  # the communicator keeps them until it is done

        number = self.stream.queue(work)
        device._touch(self.stream, number, read, written, name)
        return SimWork(self.stream, result)

    def _compare(self, call: str) -> None:
        """Raise where ranks call other collectives: NCCL would hang, or mix up their memory."""
        mine = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=7).digest(), "little")
        least = torch.tensor([mine, -mine])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._checks.allreduce([least], options).wait()
        if least[0] != -least[1]:
            raise RuntimeError(
                f"simccl: the ranks call different collectives, and NCCL would hang; here {call}"
            )

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        raws = _raws(tensors)
        opts = opts or dist.AllreduceOptions()
        average = opts.reduceOp == dist.ReduceOp.AVG

        def compute(gloo: dist.ProcessGroupGloo) -> Any:
            if not average:
                return gloo.allreduce(raws, opts)
            options = dist.AllreduceOptions()
            gloo.allreduce(raws, options).wait()
            for raw in raws:
                raw.div_(self.size())
            return None

        return self._queue("all_reduce", [], tensors, compute, tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        raws = _raws(tensors)
        return self._queue(
            "broadcast", [], tensors, lambda gloo: gloo.broadcast(raws, opts), tensors
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        raws = [_raws(each) for each in outputs]
        raw_inputs = _raws(inputs)
        flat = [one for each in outputs for one in each]
        return self._queue(
            "all_gather", inputs, flat, lambda gloo: gloo.allgather(raws, raw_inputs), outputs
        )

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        to = _raws([output])[0]
        of = _raws([input])[0]
        pieces = list(to.view(-1).chunk(self.size()))
        return self._queue(
            "all_gather_into_tensor",
            [input],
            [output],
            lambda gloo: gloo.allgather([pieces], [of.view(-1)]),
            output,
        )

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        to = _raws([output])[0]
        of = _raws([input])[0]
        average = opts is not None and opts.reduceOp == dist.ReduceOp.AVG

        def compute(gloo: dist.ProcessGroupGloo) -> None:
            whole = of.clone().view(-1)
            gloo.allreduce([whole]).wait()
            piece = whole.chunk(self.size())[self.rank()]
            to.view(-1).copy_(piece / self.size() if average else piece)

        return self._queue("reduce_scatter_tensor", [input], [output], compute, output)

    def all_to_all_single(
        self, output: Any, input: Any, out_splits: Any, in_splits: Any, opts: Any = None
    ) -> Any:
        to = _raws([output])[0]
        of = _raws([input])[0]
        return self._queue(
            "all_to_all_single",
            [input],
            [output],
            lambda gloo: gloo.alltoall_base(to, of, out_splits, in_splits),
            output,
        )

    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        """Send without waiting for the receiver: NCCL starts the calls of a batch together, here
        they are single.
        """
        raws = _raws(tensors)

        def compute(gloo: dist.ProcessGroupGloo) -> Any:
            sent = [raw.clone() for raw in raws]
            self._sending.append((gloo.send(sent, to, tag), sent))

        if not any(isinstance(each, SimTensor) for each in tensors):
            return self._host.send(raws, to, tag)
        return self._queue("send", tensors, [], compute, tensors, together=False)

    def recv(self, tensors: Any, of: int, tag: int = 0) -> Any:
        raws = _raws(tensors)
        return self._queue(
            "recv", [], tensors, lambda gloo: gloo.recv(raws, of, tag), tensors, together=False
        )

    def barrier(self, opts: Any = None) -> Any:
        return self._host.barrier()


def _raws(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.raw if isinstance(each, SimTensor) else each for each in tensors]


def _progress() -> None:
    """Run what is late: ranks wait for one another, so that no stream may be left for ever."""
    while True:
        time.sleep(device.LATE / 2)
        for each in list(Stream.every):
            while each.work and each.work[0][0] < time.monotonic() - device.LATE:
                each.run(each.done + 1)


def install() -> None:
    """Register the backend; after the device's own `install`."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> SimGroup:
        return SimGroup(store, rank, size, timeout)

    dist.Backend.register_backend("simccl", make, devices=[NAME])
    threading.Thread(target=_progress, daemon=True, name="sim").start()
