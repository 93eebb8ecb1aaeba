"""The loop of Accelerate's nlp_example, and of its by_feature/gradient_accumulation with a number
as argument.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.small import WORDS, padded, texts

accumulate = int(sys.argv[1]) if len(sys.argv) > 1 else 1
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
set_seed(42)
loader = DataLoader(texts(), shuffle=True, collate_fn=padded, batch_size=8, drop_last=True)  # type: ignore[arg-type]
config = BertConfig(
    vocab_size=WORDS,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=2,
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, len(loader) // accumulate)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
model.train()
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
