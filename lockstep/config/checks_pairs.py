"""Refuse what pairs of answers do not go with.

Tests: tests/data/test_preferences.py
"""

from collections.abc import Iterator

from lockstep.config.checks_distributed import DPO_ON_PARTS, sequences_are_cut
from lockstep.config.schema import Config
from lockstep.errors import Contradiction
from lockstep.registry import DATA_SETS, LOSSES
from lockstep.strategy import AUTO, strategy_named

# The model without its adapters as a reference, where each rank has a stage of it.
ADAPTERS_IN_STAGES = Contradiction(
    ("loss_fn", "distributed.strategy"),
    "the reference of dpo is the model without its adapters, and a stage has a part",
    "write distributed.strategy: ddp or fsdp, or name a reference that the last stage holds in"
    " full: loss_fn.args.reference: hf:FOLDER",
)


def pair_contradictions(config: Config) -> Iterator[Contradiction]:
    """Yield pairs of answers without a loss over pairs, and that loss on other data that ship."""
    has_pairs = config.data.name == "preferences"
    if has_pairs and config.loss_fn is None:
        yield Contradiction(
            ("loss_fn", "data.name"),
            "the data are pairs of answers, and there is no loss over pairs",
            "write loss_fn: {name: dpo, args: {beta: 0.1}}",
            "both answers of each would be trained alike",
        )
    if config.loss_fn is None or config.loss_fn.name != LOSSES.shipped["dpo"]:
        return
    if not has_pairs and config.data.name in DATA_SETS.shipped:
        yield Contradiction(
            ("loss_fn", "data.name"),
            f"the loss dpo is one over pairs of answers, and {config.data.name} has none",
            "write data: {name: preferences, args: {sources: [pairs.jsonl], tokenizer: FOLDER}}",
        )
    distributed = config.distributed
    in_chunks = distributed.reproducible and distributed.chunks_of_sequences > 1
    if sequences_are_cut(config.step) or in_chunks:
        yield DPO_ON_PARTS
    has_adapters = config.model.lora is not None or config.model.adapter is not None
    strategy = distributed.strategy
    in_stages = strategy != AUTO and strategy_named(strategy).in_stages
    if has_adapters and in_stages and config.loss_fn.args.get("reference") is None:
        yield ADAPTERS_IN_STAGES
