"""The Trainer of transformers with a loader of its own for training.

`plain loader`: it is returned as it is, and not as `accelerator.prepare` returns it.
"""

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.words = torch.randint(0, 40, (64, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


class OwnTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        assert self.train_dataset is not None
        loader: Any = DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_size=self.args.per_device_train_batch_size,
            shuffle=True,
            drop_last=True,
        )
        return loader if FAULT == "plain loader" else self.accelerator.prepare(loader)


def main() -> None:
    set_seed(0)
    config = GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        max_steps=6,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    OwnTrainer(GPT2LMHeadModel(config), arguments, train_dataset=Texts()).train()


if __name__ == "__main__":
    main()
