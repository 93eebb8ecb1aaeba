"""Decoders of transformers whose blocks are recomputed: no cache of keys and values is filled a
second time.
"""

from typing import Any

import pytest
from torch import nn

from lockstep.models.hf_cache import switch_cache_off
from lockstep.models.protocol import blocks_of
from lockstep.randomness import RandomState
from lockstep.trainer import Trainer
from tests.models.decoders import decoder
from tests.parity.foreign import VOCAB, library, padded_text
from tests.parity.test_foreign import Samples, settings_of
from tests.sampled import quick_and_full


def losses(model: nn.Module, mode: str) -> list[float]:
    settings = settings_of("single", False).replaced({"training.gradient_checkpointing": mode})
    return [
        float(record.loss) for record in Trainer(model, config=settings).steps(Samples(padded_text))
    ]


@pytest.mark.parametrize(
    "family", quick_and_full(["gpt2", "gpt_neox", "gemma2", "llama"], ["gpt2", "llama"])
)
def test_a_recomputed_decoder_has_the_losses_of_one_that_is_not(family: str) -> None:
    """transformers 4 fills a cache in training unless it is told not to."""
    args: dict[str, Any] = {"vocab_size": VOCAB}
    assert losses(decoder(family, **args), "full") == losses(decoder(family, **args), "none")


def test_a_recomputed_encoder_and_decoder_has_the_losses_of_one_that_is_not() -> None:
    make = library(
        "AutoModelForSeq2SeqLM",
        "t5",
        vocab_size=VOCAB,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    assert losses(make(), "full") == losses(make(), "none")


def test_the_cache_is_off_in_steps_and_evaluations_unless_it_is_asked_for() -> None:
    model: Any = decoder("gpt2")
    given: list[Any] = []
    switch_cache_off(model, blocks_of(model))
    switch_cache_off(model, blocks_of(model))
    assert len(model._forward_pre_hooks) == 1
    model.transformer.register_forward_pre_hook(
        lambda _m, _a, kwargs: given.append(kwargs["use_cache"]), with_kwargs=True
    )
    ids = model.dummy_inputs["input_ids"] % 4
    with RandomState(0, ids.device).running("train", 0):
        model(ids)
        model.eval()(ids)
        model(ids, use_cache=True)
    model(ids)
    assert given == [False, False, True, None]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_decoder_that_can_be_cut_is_trained_and_evaluated_without_a_cache(family: str) -> None:
    """By its own object, and by PEFT's around it; a forward pass by hand, after training, has its
    cache.
    """
    model: Any = decoder(family, vocab_size=VOCAB)
    seen: list[bool] = []
    model.register_forward_hook(
        lambda _m, _a, outputs: seen.append(outputs.past_key_values is not None)
    )
    trainer = Trainer(model, config=settings_of("single", False))
    for _ in trainer.steps(Samples(padded_text)):
        trainer.evaluate(Samples(padded_text))
    assert seen
    assert not any(seen)
    model(input_ids=model.dummy_inputs["input_ids"] % 4, use_cache=None)
    assert seen[-1]
