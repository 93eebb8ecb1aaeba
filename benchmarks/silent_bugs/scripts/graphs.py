"""A graph network that classifies nodes: graphs of unequal sizes are one block-diagonal graph.

The loss is a mean over the nodes of all ranks. `mean of nodes`: over those of each rank.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CLASSES = 4
Graph = tuple[Tensor, Tensor, Tensor]


class Graphs(Dataset[Graph]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.graphs: list[Graph] = []
        for size in torch.randint(3, 12, (64,), generator=numbers).tolist():
            edges = (torch.rand(size, size, generator=numbers) < 0.4).float()
            edges = ((edges + edges.T + torch.eye(size)) > 0).float()
            nodes = torch.randn(size, 6, generator=numbers)
            labels = torch.randint(0, CLASSES, (size,), generator=numbers)
            self.graphs.append((nodes, edges / edges.sum(1, keepdim=True), labels))

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> Graph:
        return self.graphs[index]


def collate(graphs: list[Graph]) -> Graph:
    nodes, edges, labels = zip(*graphs, strict=True)
    return torch.cat(nodes), torch.block_diag(*edges), torch.cat(labels)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = F.relu(edges @ self.first(nodes))
        logits: Tensor = edges @ self.second(hidden)
        return logits


def node_loss(logits: Tensor, labels: Tensor) -> Tensor:
    if FAULT == "mean of nodes":
        return F.cross_entropy(logits, labels)
    nodes = torch.tensor(float(len(labels)))
    dist.all_reduce(nodes)
    return F.cross_entropy(logits, labels, reduction="sum") * dist.get_world_size() / nodes


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Convolutions())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = Graphs()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for nodes, edges, labels in loader:
            loss = node_loss(model(nodes, edges), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
