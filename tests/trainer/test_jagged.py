"""Batches of jagged nested tensors train: they have no slices, which the check of the
loss takes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.trainer import Trainer


class Lengths(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(2 + index % 3, 4, generator=torch.Generator().manual_seed(index))
        return x, x.sum().reshape(1) / 10


def jagged(items: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    nested = torch.nested.nested_tensor([x for x, _ in items], layout=torch.jagged)
    return nested, torch.stack([y for _, y in items])


class Means(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([each.mean() for each in self.linear(x).unbind()])[:, None]


def test_micro_batches_of_jagged_tensors_are_halved() -> None:
    model = Means().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, nn.MSELoss(), global_batch_size=8, max_steps=2)
    data = torch.utils.data.DataLoader(Lengths(), batch_size=4, collate_fn=jagged)
    assert len([record.loss for record in trainer.steps(data)]) == 2
