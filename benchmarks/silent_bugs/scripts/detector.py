"""Detection as a set: queries are matched to each image's boxes, as DETR does it.

The loss of boxes is divided by the mean number of boxes over ranks. `own boxes`: each rank divides
by its own.
"""

import sys

import torch
import torch.distributed as dist
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
QUERIES = 5
CLASSES = 3
Target = dict[str, Tensor]


class Images(Dataset[tuple[Tensor, Target]]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.images = torch.randn(64, 3, 8, 8, generator=numbers)
        counts = torch.randint(1, 5, (64,), generator=numbers).tolist()
        self.targets = [
            {
                "boxes": torch.rand(count, 4, generator=numbers),
                "labels": torch.randint(0, CLASSES, (count,), generator=numbers),
            }
            for count in counts
        ]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        return self.images[index], self.targets[index]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.classes = nn.Linear(72, QUERIES * (CLASSES + 1))
        self.boxes = nn.Linear(72, QUERIES * 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        logits = self.classes(features).unflatten(-1, (QUERIES, -1))
        boxes = self.boxes(features).unflatten(-1, (QUERIES, 4)).sigmoid()
        return logits, boxes


def collate(samples: list[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


@torch.no_grad()
def matched(logits: Tensor, boxes: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    cost = torch.cdist(boxes, target["boxes"], p=1) - logits.softmax(-1)[:, target["labels"]]
    rows, columns = linear_sum_assignment(cost.numpy())
    return torch.as_tensor(rows), torch.as_tensor(columns)


def number_of_boxes(targets: list[Target]) -> Tensor:
    count = torch.tensor(float(sum(len(target["labels"]) for target in targets)))
    if FAULT != "own boxes":
        dist.all_reduce(count)
        count = count / dist.get_world_size()
    return count.clamp(min=1)


def set_loss(logits: Tensor, boxes: Tensor, targets: list[Target]) -> Tensor:
    classes = torch.full(logits.shape[:2], CLASSES)
    error = torch.zeros(())
    for at, target in enumerate(targets):
        rows, columns = matched(logits[at], boxes[at], target)
        classes[at, rows] = target["labels"][columns]
        error = error + (boxes[at, rows] - target["boxes"][columns]).abs().sum()
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten()) + 5 * error / number_of_boxes(
        targets
    )


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Images()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            logits, boxes = model(images)
            optimizer.zero_grad()
            set_loss(logits, boxes, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


if __name__ == "__main__":
    main()
