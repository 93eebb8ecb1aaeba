"""`lockstep/torch_compat/data_workers.py`: an iterator's workers are found, and end
when told to.
"""

import torch
from torch.utils.data import DataLoader

from lockstep.torch_compat.data_workers import end_workers, workers_of


def test_workers_end_and_the_next_iteration_starts_new_ones() -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(
        torch.arange(4),  # type: ignore[arg-type]
        num_workers=1,
        persistent_workers=True,
    )
    iterator = iter(loader)
    (worker,) = workers_of(iterator)
    assert worker.is_alive()
    end_workers(loader, iterator)
    assert not worker.is_alive()
    again = iter(loader)
    assert [int(item) for item in again] == [0, 1, 2, 3]
    end_workers(loader, again)


def test_an_iterator_that_reads_in_this_process_has_none() -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(torch.arange(4))  # type: ignore[arg-type]
    assert workers_of(iter(loader)) == workers_of(None) == []
    end_workers(loader, None)
