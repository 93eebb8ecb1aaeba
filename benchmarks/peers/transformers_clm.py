"""What transformers' run_clm trains: blocks of one length, through its Trainer."""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.small import WORDS

set_seed(42)
ids = torch.randint(1, WORDS, (128, 16), generator=torch.Generator().manual_seed(1))
blocks = [{"input_ids": row, "labels": row.clone()} for row in ids]
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
)
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e-3,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(
    model=model, args=arguments, train_dataset=blocks, data_collator=default_data_collator
).train()
