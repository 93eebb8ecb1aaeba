"""A small Llama on padded texts with the Trainer of transformers, which accumulates gradients.

The loss is divided by the words of the whole step. `count ignored`: compute_loss() is overridden,
as guides do to add a loss, and takes the model's own mean.
"""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 32
LENGTH = 10


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.words = torch.randint(1, WORDS, (64, LENGTH), generator=numbers)
        self.lengths = torch.randint(3, LENGTH + 1, (64,), generator=numbers).tolist()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        mask = torch.arange(LENGTH) < self.lengths[index]
        labels = words.masked_fill(~mask, -100)
        return {"input_ids": words, "attention_mask": mask.long(), "labels": labels}


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        if FAULT != "count ignored":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def main() -> None:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    OwnLoss(LlamaForCausalLM(config), arguments, train_dataset=Texts()).train()


if __name__ == "__main__":
    main()
