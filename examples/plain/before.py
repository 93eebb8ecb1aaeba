"""Handwritten digits in plain PyTorch, in one process; `after.py` is for any number of ranks."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

digits = load_digits()
images = torch.from_numpy(digits.images).float().div(16)
labels = torch.from_numpy(digits.target)
seen, unseen = random_split(
    TensorDataset(images, labels), [1500, 297], torch.Generator().manual_seed(0)
)
train_data = DataLoader(seen, batch_size=50, shuffle=True)
val_data = DataLoader(unseen, batch_size=50)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(5):
        for x, y in train_data:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        total = sum(loss_fn(model(x), y).item() * len(y) for x, y in val_data)
    print(f"loss on digits that it never saw: {total / len(unseen):.3f}")
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
