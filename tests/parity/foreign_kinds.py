"""Foreign models, one for each kind of mistake that was once made with such a model; and all foreign models."""

from torch import nn

from tests.parity import foreign
from tests.parity.foreign import (
    SIZES,
    WITHOUT_CONTEXT,
    WITHOUT_PLANS,
    Foreign,
    as_it_is,
    library,
    padded_text,
    seeded,
    text,
)


def adapted() -> nn.Module:
    """A model of PEFT, whose adapters are in the layers of another."""
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(library("AutoModelForCausalLM", "mistral", **SIZES)(), config)


KINDS: dict[str, Foreign] = {
    # Numbers of the config that the library uses outside of the layers.
    "granite": Foreign(
        "Granite, all its multipliers set",
        library(
            "AutoModelForCausalLM",
            "granite",
            **SIZES,
            embedding_multiplier=12.0,
            logits_scaling=0.5,
            residual_multiplier=0.3,
            attention_multiplier=0.2,
            initializer_range=0.1,
        ),
        padded_text,
        piped=as_it_is,
        refused_by=WITHOUT_CONTEXT,
    ),
    # A wrapper that hands attributes on to the model within, under other names of parameters.
    "peft": Foreign("Mistral with LoRA of peft", seeded(adapted), text, piped=as_it_is, refused_by=WITHOUT_PLANS),
}

MODELS: dict[str, Foreign] = {**foreign.MODELS, **KINDS}
