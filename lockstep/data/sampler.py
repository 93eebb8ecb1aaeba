"""A sampler for a user's own loop: `DataLoader(dataset, sampler=lockstep.DistributedSampler(dataset))`."""

from collections.abc import Iterator, Sized

import torch.distributed as dist
from torch.utils.data import Sampler

from lockstep.data.order import epoch_permutation
from lockstep.environment import rank_facts
from lockstep.errors import UsageError


class DistributedSampler(Sampler[int]):
    """Yields this rank's samples of each epoch, in the trainer's own order.

    Rank r of W takes the places r, r + W, r + 2W … of the epoch's order, so that the W ranks' k-th batches together
    hold the samples of the trainer's k-th step. No sample is repeated or left out: if the number of ranks does not
    divide the number of samples, the first ranks have one sample more (`len` differs by one), and a loop that
    communicates at each batch must allow for that (`torch.distributed.algorithms.Join`) or set `drop_last`.

    Each iteration moves on to the next epoch by itself; `set_epoch` sets the next one (after a resume).

    Args:
        dataset_or_size: the dataset, or its number of samples.
        num_replicas, rank: unset: those of the process group, else of the environment.
        shuffle: a different order in each epoch.
        seed: the same on all ranks.
        drop_last: leave out samples that the ranks can't share evenly: `dropped_per_epoch` samples.

    Raises:
        UsageError: an empty dataset, or a rank that is not below `num_replicas`.
    """

    def __init__(
        self,
        dataset_or_size: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        world, own = _place()
        self.num_samples = dataset_or_size if isinstance(dataset_or_size, int) else len(dataset_or_size)
        self.num_replicas = world if num_replicas is None else num_replicas
        self.rank = own if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0  # of the next iteration
        if not 0 <= self.rank < self.num_replicas:
            raise UsageError(
                f"rank {self.rank} is not below num_replicas {self.num_replicas}",
                fix="ranks count from 0; leave both out, and they are those of the process group",
            )
        self.dropped_per_epoch = self.num_samples % self.num_replicas if drop_last else 0
        if self.num_samples - self.dropped_per_epoch < 1:
            raise UsageError(
                f"{self.num_samples} samples leave nothing for {self.num_replicas} ranks to share",
                fix="use fewer ranks, more samples, or drop_last=False",
            )

    def __len__(self) -> int:
        return len(range(self.rank, self.num_samples - self.dropped_per_epoch, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        stop = self.num_samples - self.dropped_per_epoch
        if not self.shuffle:
            return iter(range(self.rank, stop, self.num_replicas))
        order = epoch_permutation(self.num_samples, self.seed, epoch)
        return iter(order[self.rank : stop : self.num_replicas].tolist())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iteration."""
        self.epoch = epoch


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    facts = rank_facts()
    return facts.world_size, facts.rank
