"""A causal model fine-tuned with peft's LoRA and Accelerate, as peft's examples do it.

`unprepared loader`: the loader is not handed to `prepare`.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Text(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.words = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(LlamaForCausalLM(config), lora)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Text(), batch_size=4, shuffle=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if FAULT != "unprepared loader":
        loader = accelerator.prepare(loader)
    for _epoch in range(2):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
