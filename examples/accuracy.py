"""Digits, and an accuracy of one's own: `python accuracy.py`, or `lockstep launch --nproc-per-node
4 accuracy.py`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from lockstep import Trainer

digits = load_digits()
data = TensorDataset(torch.tensor(digits.images).float() / 16, torch.tensor(digits.target))
train, test = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
trainer = Trainer(model, loss_fn=nn.CrossEntropyLoss(), learning_rate=3e-3, global_batch_size=48)
trainer.train(train, epochs=5)
found = trainer.evaluate(test, {"accuracy": lambda outputs, targets: outputs.argmax(-1) == targets})
if trainer.is_main_process:
    print(f"loss {found['loss']:.4f}, accuracy {found['accuracy']:.4f}")
