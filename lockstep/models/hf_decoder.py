"""Runs decoders of the Hugging Face library as chains of segments for pipelines, with the library's own forward pass.

    inputs → model.layers.0 → … → model.layers.n-1 → outputs

A segment is the library's decoder with one of its layers: instead of token ids it takes the previous layer's result
(`inputs_embeds`), and computes masks and positions itself. `inputs` looks the tokens up; `outputs` normalises, computes
logits and, if the batch has labels, the loss. So a stage computes what the library computes, including scales or caps
of a family, and layers stay modules of the model: blocks can be recomputed, compiled and sharded.

The attention mask is passed on with the hidden states, because middle stages have no batch. Layers draw the same
random numbers as in the whole model.

Families are listed, and each is tested to compute the library's bits, because families differ between their layers.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.torch_compat.module_copy import with_own_children


class Family(NamedTuple):
    """Names of a family's decoder parts.

    Attributes:
        decoder: attribute of the causal model.
        layers: attribute of the decoder.
        before: modules of the decoder that run before the layers, even if it is given embeddings.
        after: modules of the decoder that run after them.
    """

    decoder: str = "model"
    layers: str = "layers"
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ("norm",)


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "cohere", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral",
            "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm",
        ),
        Family(),
    ),
    "gpt2": Family("transformer", "h", ("wpe", "drop"), ("ln_f",)),
    "gpt_neox": Family("gpt_neox", "layers", ("emb_dropout",), ("final_layer_norm",)),
    "phi": Family("model", "layers", ("embed_dropout",), ("final_layernorm",)),
}  # fmt: skip

_CACHE = "decoder_segments"  # attribute of the model: each call returns the same modules
_KNOWN_ARGUMENTS = ("input_ids", "attention_mask", "labels", "num_items_in_batch", "use_cache", "return_dict")


def decoder_segments(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the chain of a causal model of the library; None for any other model."""
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    name = type(model).__name__
    if family is None or not name.endswith(("ForCausalLM", "LMHeadModel")) or not hasattr(model, family.decoder):
        return None
    config: Any = model.config
    if getattr(config, "add_cross_attention", False) or getattr(config, "output_router_logits", False):
        return None
    kept = model.__dict__.get(_CACHE)
    if kept is None:
        kept = model.__dict__[_CACHE] = _cut(model, family)
    return list(kept)


def refuse_balanced_experts(model: nn.Module) -> None:
    """Reject a loss that needs all layers of a model.

    Raises:
        UsageError: the model returns the choices of its routers, and adds a loss that balances them.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise UsageError(
            f"{type(model).__name__} balances its experts by a loss over all layers, which no stage of a pipeline has",
            where="distributed.strategy: pipeline",
            fix="set output_router_logits=False in the model's config, or use another strategy",
        )


def _cut(model: nn.Module, family: Family) -> list[tuple[str, nn.Module]]:
    decoder: Any = getattr(model, family.decoder)
    layers = dict(getattr(decoder, family.layers).named_children())
    prefix = f"{family.decoder}.{family.layers}"
    found: list[tuple[str, nn.Module]] = [("inputs", Inputs(_reduced(decoder, family, first=True)))]
    for place, (index, layer) in enumerate(layers.items()):
        name = f"{prefix}.{index}"
        found.append((name, Layer(name, _reduced(decoder, family, layer=layer, place=place))))
    head = _copied(model)
    setattr(head, family.decoder, _reduced(decoder, family, last=True))
    found.append(("outputs", Outputs(f"{found[-1][0]}/after", head)))
    reached = {id(p) for _, segment in found for p in segment.parameters()}
    assert reached == {id(p) for p in model.parameters()}, "a parameter belongs to no segment"
    return found


class Inputs(nn.Module):
    """First segment: token ids [B, T] → hidden states [B, T, D], with the attention mask if there is one."""

    random_key = ""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        """Look up the tokens."""
        if unknown := sorted(key for key in others if key not in _KNOWN_ARGUMENTS and others[key] is not None):
            raise UsageError(
                f"a batch with {', '.join(unknown)}, which stages of a pipeline do not hand on",
                fix=f"leave {'them' if len(unknown) > 1 else 'it'} out of the batch, or use another strategy",
            )
        hidden = self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden if attention_mask is None else (hidden, attention_mask)


class Layer(nn.Module):
    """One layer: hidden states [B, T, D] → hidden states [B, T, D]; the attention mask is passed on.

    Attributes:
        random_key: the layer's name, the key of its random numbers in the whole model.
    """

    def __init__(self, random_key: str, decoder: nn.Module) -> None:
        super().__init__()
        self.random_key, self.decoder = random_key, decoder

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Run the layer."""
        arguments = {"inputs_embeds": hidden, "attention_mask": attention_mask, "use_cache": False}
        hidden = self.decoder(**arguments).last_hidden_state
        return hidden if attention_mask is None else (hidden, attention_mask)


class Outputs(nn.Module):
    """Last segment: hidden states [B, T, D] → the whole model's result.

    Attributes:
        takes_inputs: it is called with `inputs`, the whole model's (positional, keyword) arguments, for labels.
    """

    takes_inputs = True

    def __init__(self, random_key: str, model: nn.Module) -> None:
        super().__init__()
        self.random_key, self.model = random_key, model

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, *,
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> Any:  # fmt: skip
        """Return the logits, and the loss if there are labels."""
        given = {key: value for key, value in inputs[1].items() if key not in ("input_ids", "attention_mask")}
        return self.model(inputs_embeds=hidden, attention_mask=attention_mask, **{**given, "use_cache": False})


class _NoPositions(nn.Module):
    """Stands for learned positions that the first segment has added: −0.0, which changes no bit of a sum."""

    def forward(self, positions: Tensor) -> Tensor:
        """Return zeros."""
        return torch.tensor(-0.0, device=positions.device)


def _reduced(
    decoder: nn.Module, family: Family, *, layer: nn.Module | None = None, place: int = 0, first: bool = False,
    last: bool = False,
) -> nn.Module:  # fmt: skip
    """Return a decoder that shares its modules with `decoder`, and has at most one of its layers."""
    part = _copied(decoder)
    setattr(part, family.layers, nn.ModuleList([] if layer is None else [layer]))
    if not first:
        for name, module in decoder.named_children():
            if name in family.before:
                setattr(part, name, _NoPositions() if isinstance(module, nn.Embedding) else nn.Identity())
            elif module is decoder.get_input_embeddings():  # type: ignore[operator]
                setattr(part, name, None)
    if not last:
        for name in family.after:
            setattr(part, name, nn.Identity())
    types = getattr(decoder.config, "layer_types", None)
    if layer is not None and types is not None:
        config: Any = copy.copy(decoder.config)
        config.__dict__["layer_types"] = [types[place]]  # the library reads it by the layer's place
        part.__dict__["config"] = config
    return part


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of the object whose children can be replaced."""
    found = with_own_children(module)
    found.__dict__.pop(_CACHE, None)
    return found
