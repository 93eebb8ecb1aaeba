"""A ResNet-50 with narrow layers in plain DDP, as torch's ImageNet example trains it.

Rank 0 evaluates after the first step, on the model inside of the wrapper.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CLASSES = 4


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        layers = []
        inputs = width
        for stage, number in enumerate(blocks):
            for block in range(number):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(inputs, width * 2**stage, stride))
                inputs = 4 * width * 2**stage
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(torch.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.fc(y.mean((2, 3)))
        return out


def images(number: int, seed: int) -> TensorDataset:
    numbers = torch.Generator().manual_seed(seed)
    pixels = torch.randn(number, 3, 8, 8, generator=numbers)
    return TensorDataset(pixels, torch.randint(0, CLASSES, (number,), generator=numbers))


def validate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for pixels, _ in DataLoader(images(8, 2), batch_size=8):
            model(pixels)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(ResNet())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    data = images(96, 1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for number, (pixels, targets) in enumerate(loader):
            loss = criterion(model(pixels), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number == 0 and dist.get_rank() == 0:
                validate(model.module)
                if FAULT != "evaluation mode":
                    model.module.train()


if __name__ == "__main__":
    main()
