"""`before.py` on any number of ranks: `lockstep launch --nproc-per-node 4 after.py` for four."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lockstep import Trainer

digits = load_digits()
images = torch.from_numpy(digits.images).float().div(16)
labels = torch.from_numpy(digits.target)
seen, unseen = random_split(
    TensorDataset(images, labels), [1500, 297], torch.Generator().manual_seed(0)
)
train_data = DataLoader(seen, batch_size=25, shuffle=True)  # a step takes 50, on 1 rank and on 2
val_data = DataLoader(unseen, batch_size=50)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss()
    trainer = Trainer(model, optimizer, loss_fn, batch_size=25, global_batch_size=50)
    trainer.train(train_data, epochs=5)
    loss = trainer.evaluate(val_data)
    if trainer.is_main_process:
        print(f"loss on digits that it never saw: {loss:.3f}")
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
