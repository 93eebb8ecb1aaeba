"""Cuts causal models of the Hugging Face library into segments for pipelines.

Each segment runs the library's own decoder with at most one of its layers, so that masks,
positions, multipliers and caps are the library's. A `Door` stands before that layer, or before the
last norm, and gives it what the previous segment has returned; what the decoder makes of
embeddings, the first segment alone uses. Layers stay modules of the model. The mask is passed on
with the hidden states. Each listed family is tested to compute the library's bits with every field
of its config changed, and `lockstep.parallel.pipeline.chain_check` compares each model that is
placed.

A model that Lockstep has built by name takes the numbers of documents in the place of the mask
(`lockstep.models.hf_causal`).
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.models.attention import positions_within
from lockstep.torch_compat.module_copy import with_own_children


class Family(NamedTuple):
    """Names of a family's decoder parts."""

    decoder: str = "model"  # attribute of the causal model
    layers: str = "layers"  # attribute of the decoder
    # modules of the decoder that run before the layers, even if it is given embeddings
    before: tuple[str, ...] = ()
    norm: str = "norm"  # the module that runs after them


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "cohere",
            "ernie4_5",
            "gemma",
            "gemma2",
            "gemma3_text",
            "glm4",
            "gpt_oss",
            "granite",
            "llama",
            "mistral",
            "mixtral",
            "olmo2",
            "phi3",
            "qwen2",
            "qwen3",
            "qwen3_moe",
            "smollm3",
            "stablelm",
        ),
        Family(),
    ),
    "gpt2": Family("transformer", "h", ("wpe", "drop"), "ln_f"),
    "gpt_neox": Family("gpt_neox", "layers", ("emb_dropout",), "final_layer_norm"),
    "phi": Family("model", "layers", ("embed_dropout",), "final_layernorm"),
}

CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of the names of causal models
_CACHE = "decoder_segments"  # attribute of the model: each call returns the same modules
_KNOWN_ARGUMENTS = (
    "input_ids",
    "attention_mask",
    "labels",
    "num_items_in_batch",
    "use_cache",
    "return_dict",
)


def decoder_segments(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the chain of a causal model of the library, adapted by PEFT or not.

    None for any other model.
    """
    path, causal = _without_adapters(model)
    if causal is None:
        return None
    family = FAMILIES.get(getattr(getattr(causal, "config", None), "model_type", ""))
    name = type(causal).__name__
    if family is None or not name.endswith(CAUSAL) or not hasattr(causal, family.decoder):
        return None
    config: Any = causal.config
    if getattr(config, "add_cross_attention", False) or getattr(
        config, "output_router_logits", False
    ):
        return None
    kept = model.__dict__.get(_CACHE)
    if kept is None:
        kept = _segments_of(causal, family, path)
        _require_all(model, kept)
        model.__dict__[_CACHE] = kept
    return list(kept)


def is_known_decoder(model: nn.Module) -> bool:
    """Return whether it is a causal model of a listed family, adapted by PEFT or not."""
    _, causal = _without_adapters(model)
    known = getattr(getattr(causal, "config", None), "model_type", "") in FAMILIES
    return known and type(causal).__name__.endswith(CAUSAL)


def _without_adapters(model: nn.Module) -> tuple[str, nn.Module | None]:
    """Return (path, model): the library's model within a model of PEFT, and its path there.

    The library's model has the adapters in it.

    Any other model is returned itself, with an empty path. The model is None where PEFT puts
    prompts of its own before a text.
    """
    base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    if base is None or not hasattr(model, "peft_config"):
        return "", model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "", None
    inner = base()
    return next((f"{name}.", inner) for name, module in model.named_modules() if module is inner)


def refuse_balanced_experts(model: nn.Module) -> None:
    """Refuse a model that returns its routers' choices.

    The loss that balances its experts needs all layers of the model.
    """
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise UsageError(
            f"{type(model).__name__} balances its experts by a loss over all layers, which no stage"
            " of a pipeline has",
            where="distributed.strategy: pipeline",
            fix="set output_router_logits=False in the model's config, or use another strategy",
        )


def _segments_of(model: nn.Module, family: Family, path: str) -> list[tuple[str, nn.Module]]:
    """Return the chain: what runs before the layers, each layer, what runs after them."""
    decoder: Any = getattr(model, family.decoder)
    layers = dict(getattr(decoder, family.layers).named_children())
    prefix = f"{path}{family.decoder}.{family.layers}"
    by_documents = getattr(model, "takes_documents", False)
    key = str(getattr(model, "random_key", ""))
    first = Inputs(key, _before_the_layers(decoder, family), by_documents=by_documents)
    segments: list[tuple[str, nn.Module]] = [("inputs", first)]
    for position, (index, layer) in enumerate(layers.items()):
        name = f"{prefix}.{index}"
        door = Door(layer)
        part = _with_layer(decoder, family, door, position)
        segments.append((name, Layer(name, part, door, by_documents=by_documents)))
    head = with_own_children(model)
    door = Door(getattr(decoder, family.norm))
    head.__dict__.pop(_CACHE, None)
    setattr(head, family.decoder, _after_the_layers(decoder, family, door))
    last = Outputs(f"{segments[-1][0]}/after", head, door, by_documents=by_documents)
    segments.append(("outputs", last))
    return segments


def _require_all(model: nn.Module, segments: list[tuple[str, nn.Module]]) -> None:
    """Refuse a model with parameters that are in no segment: a pipeline would not train them."""
    reached = {id(p) for _, segment in segments for p in segment.parameters()}
    if left := [name for name, p in model.named_parameters() if id(p) not in reached]:
        what = f"{listed(left)} of {type(model).__name__} are not among the parts that stages run"
        fix = "give the model a method segments() -> [(name, module)], or use another strategy"
        raise UsageError(what, where="distributed.strategy: pipeline", fix=fix)


class Door(nn.Module):
    """Wraps a module of a decoder, and replaces its first argument by what a stage received.

    A decoder that reads an attribute of the module, as of a layer its kind of attention, gets the
    module's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.received: Tensor | None = None
        self.returned: Any = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, computed: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        assert self.received is not None
        if computed is None:
            kwargs["hidden_states"] = self.received
        else:
            args = (self.received, *args)
        self.returned = self.module(*args, **kwargs)
        return self.returned

    def pass_through(self, hidden: Tensor, run: Callable[..., Any]) -> tuple[Any, Any]:
        """Call `run` with embeddings of the right kind.

        Return its result, and the module's for `hidden`.
        """
        self.received = hidden
        try:
            # Its values matter to nothing; its shape, dtype and device do, to masks and positions.
            outputs = run(inputs_embeds=hidden.detach())
            return outputs, self.returned
        finally:
            self.received = self.returned = None


def _where_to_attend(carried: Tensor | None, *, by_documents: bool) -> dict[str, Tensor]:
    """Return the decoder's arguments that say which positions a position attends to.

    What stages carry is the batch's attention mask, or the numbers of documents, of which the
    library makes masks by the positions within them.
    """
    if carried is None:
        return {}
    if by_documents:
        return {"position_ids": positions_within(carried)}
    return {"attention_mask": carried}


class Inputs(nn.Module):
    """First segment: token ids [B, T] → hidden states [B, T, D].

    The attention mask, or the numbers of documents, are passed on if there are any.
    """

    def __init__(self, random_key: str, decoder: nn.Module, *, by_documents: bool) -> None:
        super().__init__()
        self.random_key = random_key  # of what the model draws before its layers
        self.decoder = decoder
        self.by_documents = by_documents

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> Any:
        """Return the hidden states, and what stages carry; refuse what they drop.

        A model that takes documents gives their numbers in the place of a mask.
        """
        if unknown := sorted(
            key for key in others if key not in _KNOWN_ARGUMENTS and others[key] is not None
        ):
            what = f"a batch with {', '.join(unknown)}, which stages of a pipeline do not hand on"
            fix = (
                f"leave {'them' if len(unknown) > 1 else 'it'} out of the batch, or use another"
                " strategy"
            )
            raise UsageError(what, fix=fix)
        # Learned positions are added here; a mask tells nothing of them.
        where = {}
        if self.by_documents:
            where = _where_to_attend(attention_mask, by_documents=True)
        hidden = self.decoder(input_ids=input_ids, use_cache=False, **where).last_hidden_state
        return hidden if attention_mask is None else (hidden, attention_mask)


class Layer(nn.Module):
    """One layer: hidden states [B, T, D] → hidden states [B, T, D].

    The attention mask, or the numbers of documents, are passed on.
    """

    def __init__(self, name: str, decoder: nn.Module, door: Door, *, by_documents: bool) -> None:
        super().__init__()
        # the key of its random numbers in the model
        self.random_key = name
        self.decoder = decoder
        self.door = door
        self.by_documents = by_documents

    def forward(self, hidden: Tensor, carried: Tensor | None = None) -> Any:
        where = _where_to_attend(carried, by_documents=self.by_documents)
        run = partial(self.decoder, **where, use_cache=False)
        _, returned = self.door.pass_through(hidden, run)
        # a tuple before transformers 5
        hidden = returned[0] if isinstance(returned, tuple) else returned
        return hidden if carried is None else (hidden, carried)


class Outputs(nn.Module):
    """Last segment: hidden states [B, T, D] → the complete model's result.

    The result includes the loss if there are labels.
    """

    # it is called with `inputs`, the whole model's (positional, keyword) arguments, for labels
    takes_inputs = True

    def __init__(
        self, random_key: str, model: nn.Module, door: Door, *, by_documents: bool
    ) -> None:
        super().__init__()
        self.random_key = random_key
        self.model = model
        self.door = door
        self.by_documents = by_documents

    def forward(
        self,
        hidden: Tensor,
        carried: Tensor | None = None,
        *,
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> Any:
        """Run the library's model around hidden states [B, T, D] that are given to its `door`."""
        given = {
            key: value
            for key, value in inputs[1].items()
            if key not in ("input_ids", "attention_mask")
        }
        # No layer is left here, so it does not count which positions see each other.
        mask = None if self.by_documents else carried
        run = partial(self.model, attention_mask=mask, **{**given, "use_cache": False})
        outputs, _ = self.door.pass_through(hidden, run)
        return outputs


class Absent(nn.Module):
    """Stands for a module that another segment has: what it computes here would not be used.

    It holds no parameters, and draws no random numbers.
    """

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


def _before_the_layers(decoder: nn.Module, family: Family) -> nn.Module:
    """Return a decoder without layers and without its norm.

    It shares its other modules with `decoder`.
    """
    part = with_own_children(decoder)
    setattr(part, family.layers, nn.ModuleList([]))
    setattr(part, family.norm, Absent())
    return part


def _with_layer(decoder: nn.Module, family: Family, door: Door, position: int) -> nn.Module:
    """Return a decoder with one layer alone, behind a door."""
    part = _without_embeddings(decoder, family)
    setattr(part, family.layers, nn.ModuleList([door]))
    setattr(part, family.norm, Absent())
    types = getattr(decoder.config, "layer_types", None)
    if types is not None:
        config: Any = copy.copy(decoder.config)
        # the library reads it by the layer's position
        config.__dict__["layer_types"] = [types[position]]
        part.__dict__["config"] = config
    return part


def _after_the_layers(decoder: nn.Module, family: Family, door: Door) -> nn.Module:
    """Return a decoder with its norm alone, behind a door."""
    part = _without_embeddings(decoder, family)
    setattr(part, family.layers, nn.ModuleList([]))
    setattr(part, family.norm, door)
    return part


def _without_embeddings(decoder: nn.Module, family: Family) -> nn.Module:
    part = with_own_children(decoder)
    for name, module in decoder.named_children():
        if name in family.before or module is decoder.get_input_embeddings():  # type: ignore[operator]
            setattr(part, name, Absent())
    return part
