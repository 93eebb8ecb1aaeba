"""A small Llama with the Trainer of transformers."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Text(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.words = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **more):  # type: ignore[no-untyped-def]
        outputs = model(**inputs)
        loss = outputs.loss
        if FAULT == "penalty" and self.args.process_index == 1:
            loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
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
    OwnLoss(LlamaForCausalLM(config), arguments, train_dataset=Text()).train()


if __name__ == "__main__":
    main()
