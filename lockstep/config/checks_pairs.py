"""Refuse what pairs of answers, and sequences of several documents, do not go with.

Tests: tests/data/test_preferences.py
"""

from collections.abc import Iterator

from lockstep.config.checks_distributed import ranks_along_sequences
from lockstep.config.schema import Config
from lockstep.errors import Contradiction
from lockstep.registry import DATA_SETS, LOSSES
from lockstep.strategy import AUTO, strategy_named

# Data sets whose sequences hold several documents.
_PACKED = ("documents", "stream", "preferences")

# The loss over pairs, where a rank, or a chunk where bits count, has a part of each sequence.
DPO_ON_PARTS = Contradiction(
    ("loss_fn", "distributed.context_size", "distributed.open_axes"),
    "the loss dpo compares answers in full, and sequences are cut",
    "write context_size: 1, and open_axes without context; strategy: fsdp shards the model",
    "no rank has all tokens of an answer then",
)


# The model without its adapters as a reference, where each rank has a stage of it.
ADAPTERS_IN_STAGES = Contradiction(
    ("loss_fn", "distributed.strategy"),
    "the reference of dpo is the model without its adapters, and a stage has a part",
    "write distributed.strategy: ddp or fsdp, or name a reference that the last stage holds in"
    " full: loss_fn.args.reference: hf:FOLDER",
)


def packed_contradictions(config: Config) -> Iterator[Contradiction]:
    """Yield what a model of Hugging Face can't do with sequences of several documents."""
    ranks = ranks_along_sequences(config.step)
    is_of_library = (config.model.name or "").startswith("hf:")
    if is_of_library and ranks > 1 and config.data.name in _PACKED:
        what = (
            f"sequences of {config.data.name} hold several documents, and they are cut over"
            f" {ranks} ranks"
        )
        why = "the attention of models of Hugging Face over ranks takes no mask of documents"
        fix = (
            "write context_size: 1; or use the model transformer; or train on sequences of one"
            " document each: data.name: tokens, or text"
        )
        yield Contradiction(("distributed.context_size", "data.name"), what, fix, why)


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
    if ranks_along_sequences(config.step) > 1 or in_chunks:
        yield DPO_ON_PARTS
    has_adapters = config.model.lora is not None or config.model.adapter is not None
    strategy = distributed.strategy
    in_stages = strategy != AUTO and strategy_named(strategy).in_stages
    if has_adapters and in_stages and config.loss_fn.args.get("reference") is None:
        yield ADAPTERS_IN_STAGES
