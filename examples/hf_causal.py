"""A Hugging Face causal language model, sharded over ranks, and back to Hugging Face's own format.

    lockstep launch --nproc-per-node 2 examples/hf_causal.py

A small Llama with random values learns Python's language reference, byte by byte; nothing is
downloaded. With a model of your own: `AutoModelForCausalLM.from_pretrained(FOLDER)` in its place,
and its tokenizer in `Windows`.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lockstep import Trainer, checkpoint, is_main_process

RUN = Path("runs/hf_causal")


class Windows(Dataset[dict[str, Tensor]]):
    """Samples {"input_ids", "labels"}, int64 [128] each and the same: these models shift the labels
    themselves.
    """

    def __init__(self, text: str, length: int = 128) -> None:
        self.tokens = torch.tensor(list(text.encode()))
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens[index * self.length :][: self.length]
        return {"input_ids": ids, "labels": ids}


def train(run: Path, steps: int = 200) -> None:
    """Train under FSDP; every rank calls it. Leaves a folder for `from_pretrained` in the run
    directory.
    """
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(
        model,
        strategy="fsdp",
        output_dir=run,
        batch_size=8,
        global_batch_size=16,
        max_steps=steps,
        warmup_steps=steps // 10,
        learning_rate=2e-3,
        lr_schedule="cosine",
        weight_decay=0.1,
        grad_clip=1.0,
        precision="auto",
        save_strategy="none",
    )
    trainer.train(Windows("\n".join(topics.values())))
    saved = trainer.save_checkpoint(run / "checkpoints")
    if trainer.is_main_process:
        (run / "pretrained").mkdir()
        config.save_pretrained(run / "pretrained")
        checkpoint.export_safetensors(saved, run / "pretrained/model.safetensors")


def write(run: Path, prompt: str = "The ") -> str:
    """What the trained model makes of a prompt, with nothing but Hugging Face's library."""
    model = AutoModelForCausalLM.from_pretrained(run / "pretrained")
    ids = torch.tensor([list(prompt.encode())])
    torch.manual_seed(0)
    made = model.generate(
        ids, max_new_tokens=120, do_sample=True, temperature=0.7, top_k=40, pad_token_id=0
    )
    return bytes(made[0].tolist()).decode(errors="replace")


def main() -> int:
    train(RUN)
    if is_main_process():
        print(write(RUN))
    return 0


if __name__ == "__main__":
    sys.exit(main())
