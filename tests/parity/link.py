"""What the same bits cost on a link: plain and reproducible trainers step in turn; functions here
run on ranks.
"""

import time
from statistics import median
from typing import Any

import torch.distributed as dist

from lockstep.trainer import Trainer
from tests.hosts import sent_bytes
from tests.parity.same_bits import trainer_for
from tests.parity.toy import Tokens

SIZE = {"n_embd": 192, "n_layer": 6, "mlp_hidden": 768}
LENGTH = 64  # tokens a sample
WARM_UP = 2  # steps; DDP cuts its buckets anew in the second
SIDES = (False, True)


def _settled() -> int:
    """Bytes sent so far, once nothing is on its way any more."""
    dist.barrier()
    time.sleep(0.3)
    return sent_bytes()


def plain_and_reproducible(topology: str, rounds: int, steps: int, layers: int) -> dict[str, Any]:
    """Steps of a plain and of a reproducible trainer, in turn.

    Returns:
        bytes that this host sent per step (medians of the rounds), seconds per step, and the ratio
        of each round.
    """
    length = WARM_UP + rounds * steps
    sides = []
    for exact in SIDES:
        settings = {
            "distributed.reproducible": exact,
            "training.global_batch_size": 8,
            "training.max_steps": length + 1,
        }
        trainer = trainer_for(topology, "transformer", settings, **{**SIZE, "n_layer": layers})
        assert isinstance(trainer, Trainer)
        sides.append(iter(trainer.steps(Tokens(LENGTH))))
        for _ in range(WARM_UP):
            next(sides[-1])
    sent: list[list[float]] = [[], []]
    seconds: list[list[float]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):  # neither always has the warmer caches
            before = _settled()
            begin = time.perf_counter()
            for _ in range(steps):
                next(sides[side])
            dist.barrier()
            seconds[side].append((time.perf_counter() - begin) / steps)
            sent[side].append((_settled() - before) / steps)
    return {
        "bytes": [median(side) for side in sent],
        "seconds": [median(side) for side in seconds],
        "time ratio": median(b / a for a, b in zip(*seconds, strict=True)),
    }


def all_of(
    topologies: list[str], rounds: int, steps: int, layers: int = SIZE["n_layer"]
) -> list[dict[str, Any]]:
    """`plain_and_reproducible` for each, one after the other."""
    return [plain_and_reproducible(topology, rounds, steps, layers) for topology in topologies]
