"""The driver of a run on Ray, which Ray starts on the cluster: an actor for each machine.

The machines are the bundles of a placement group. A machine that is lost is replaced by Ray, which
restarts its actor where there is room; then all launchers start again, from the newest checkpoint.
What launchers say is printed here, and becomes the job's log.

Tests: tests/submit/test_real_ray.py, tests/submit/test_ray.py
"""

import json
import os
import signal
import sys
import time
from importlib import import_module
from typing import Any

from lockstep.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, RunError, first_line
from lockstep.submit.ray_job import RayJob

_STOPPING_SECONDS = 60.0  # for launchers to end after a machine was lost; then they are killed
_TELLING_SECONDS = 30.0  # between two lines about what is waited for


class Driver:
    """Runs a job on the machines that Ray has for it."""

    def __init__(self, job: RayJob) -> None:
        self._job = job
        self._ray: Any = import_module("ray")
        self._lost_error: Any = import_module("ray.exceptions").RayActorError
        self._losses = 0
        self._is_stopped = False

    def run(self) -> int:
        """Run until the launchers have ended, and return the job's exit code."""
        os.environ["RAY_DEDUP_LOGS"] = "0"
        self._ray.init()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        machines = self._placed()
        while not self._is_stopped and self._are_there(machines):
            codes = self._attempt(machines)
            if codes is not None:
                return next(
                    (code for code in (EXIT_USAGE, EXIT_FAILED) if code in codes), max(codes)
                )
            if self._losses > self._job.max_losses:
                raise RunError(
                    f"{self._losses} machines were lost",
                    where="--max-losses",
                    why=f"{self._job.max_losses} are replaced",
                    fix="submit the run again: it goes on from its newest checkpoint",
                )
        return EXIT_PREEMPTED

    def _on_signal(self, *_: object) -> None:
        self._is_stopped = True

    def _placed(self) -> list[Any]:
        """Return the actors, each bound to a bundle of the placement group."""
        job = self._job
        util = import_module("ray.util")
        machine = import_module("lockstep.submit.ray_machine").Machine
        group = util.placement_group([job.bundle] * job.nodes, strategy=job.strategy)
        scheduled = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        # Ray restarts an actor for as long as the job runs; `max_losses` bounds it.
        actor = self._ray.remote(max_restarts=-1, max_task_retries=0)(machine)
        return [
            actor.options(
                num_cpus=job.bundle["CPU"],
                num_gpus=job.bundle.get("GPU", 0),
                scheduling_strategy=scheduled(group, placement_group_bundle_index=number),
            ).remote()
            for number in range(job.nodes)
        ]

    def _are_there(self, machines: list[Any]) -> bool:
        """Wait until each actor answers. Return False: the job was told to end meanwhile."""
        asked = {machine.__ray_ready__.remote(): machine for machine in machines}
        told = time.monotonic()
        while asked and not self._is_stopped:
            ready, _ = self._ray.wait(list(asked), timeout=1.0)
            for one in ready:
                machine = asked.pop(one)
                try:
                    self._ray.get(one)
                except self._lost_error:
                    time.sleep(0.5)
                    asked[machine.__ray_ready__.remote()] = machine
            if asked and not ready and time.monotonic() - told > _TELLING_SECONDS:
                bundle = ", ".join(f"{name}: {value:g}" for name, value in self._job.bundle.items())
                nodes = [node for node in self._ray.nodes() if node["Alive"]]
                _log(
                    f"waiting for {len(asked)} of {self._job.nodes} machines with {bundle};"
                    f" the cluster has {len(nodes)} now"
                )
                told = time.monotonic()
        return not asked

    def _attempt(self, machines: list[Any]) -> list[int] | None:
        """Start the launchers, and wait for all to end.

        Return their exit codes; None: a machine was lost.
        """
        ray = self._ray
        codes: dict[int, int] = {}
        lost: set[int] = set()
        reading: dict[Any, int] = {}
        try:
            address, port = ray.get(machines[0].meeting_point.remote())
            for number, machine in enumerate(machines):
                ray.get(machine.start.remote(self._job.words(number, address, port)))
                reading[machine.new_output.remote()] = number
        except self._lost_error:
            lost.add(len(reading))
        ending = _Ending()
        while reading:
            failed = any(codes.values())
            for number in ending.due(lost=bool(lost), stopped=self._is_stopped, failed=failed):
                self._stop(machines, lost, number)
            ready, _ = ray.wait(list(reading), timeout=1.0)
            for one in ready:
                number = reading.pop(one)
                try:
                    text, code = ray.get(one)
                except self._lost_error as error:
                    lost.add(number)
                    _log(f"machine {number} is lost: {first_line(error)}")
                    continue
                for line in text.splitlines():
                    print(f"[{number}] {line}" if self._job.nodes > 1 else line, flush=True)
                if code is None:
                    reading[machines[number].new_output.remote()] = number
                else:
                    codes[number] = code
        if not lost or self._is_stopped:
            return list(codes.values()) or [EXIT_PREEMPTED]
        self._losses += len(lost)
        return None

    def _stop(self, machines: list[Any], lost: set[int], number: int) -> None:
        for index, machine in enumerate(machines):
            if index not in lost:
                machine.stop.remote(int(number))


class _Ending:
    """Decides when launchers are told to end, and when they are killed.

    Those of a job that was told to end have the time that Ray gives the job. Where a launcher has
    failed, the others end by themselves, but for those that wait for it at the start.
    """

    def __init__(self) -> None:
        self._told: float | None = None
        self._failed: float | None = None

    def due(self, *, lost: bool, stopped: bool, failed: bool) -> list[int]:
        """Return the signals that are due now, each once."""
        now = time.monotonic()
        if failed and self._failed is None:
            self._failed = now
        is_late = self._failed is not None and now > self._failed + _STOPPING_SECONDS
        if self._told is None:
            if lost or stopped or is_late:
                self._told = now
                return [signal.SIGTERM]
        elif now > self._told + _STOPPING_SECONDS and not stopped:
            self._told = float("inf")
            return [signal.SIGKILL]
        return []


def _log(text: str) -> None:
    print(f"lockstep: {text}", flush=True)


def main(text: str) -> int:
    """Run the job that the text describes, as JSON."""
    try:
        return Driver(RayJob(**json.loads(text))).run()
    except RunError as error:
        print(f"lockstep: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
