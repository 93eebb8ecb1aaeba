"""Cuts causal models of the Hugging Face library: into segments for pipelines, and their layers over ranks.

Each segment runs the library's own decoder with at most one of its layers, so that masks, positions, multipliers and
caps are the library's. A `Door` stands before that layer, or before the last norm, and gives it what the previous
segment has returned; what the decoder makes of embeddings, the first segment alone uses. Layers stay modules of the
model. The mask is passed on with the hidden states. Each listed family is tested to compute the library's bits with
every field of its config changed, and `lockstep.parallel.chain_check` compares each model that is placed.

Over ranks (`lockstep.parallel.tensor_plan`) the library's own plan (`base_model_tp_plan` of a config) is translated,
and what it leaves out is added: GPT-2, weights in which several layers lie side by side, embeddings, heads and losses.
"""

import copy
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.torch_compat.module_copy import with_own_children


class Family(NamedTuple):
    """Names of a family's decoder parts."""

    decoder: str = "model"  # attribute of the causal model
    layers: str = "layers"  # attribute of the decoder
    before: tuple[str, ...] = ()  # modules of the decoder that run before the layers, even if it is given embeddings
    norm: str = "norm"  # the module that runs after them


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            "cohere", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral",
            "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm",
        ),
        Family(),
    ),
    "gpt2": Family("transformer", "h", ("wpe", "drop"), "ln_f"),
    "gpt_neox": Family("gpt_neox", "layers", ("emb_dropout",), "final_layer_norm"),
    "phi": Family("model", "layers", ("embed_dropout",), "final_layernorm"),
}  # fmt: skip

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of the names of causal models
_CACHE = "decoder_segments"  # attribute of the model: each call returns the same modules
_KNOWN_ARGUMENTS = ("input_ids", "attention_mask", "labels", "num_items_in_batch", "use_cache", "return_dict")


def decoder_segments(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the chain of a causal model of the library, adapted by PEFT or not; None for any other model."""
    path, causal = _without_adapters(model)
    if causal is None:
        return None
    family = FAMILIES.get(getattr(getattr(causal, "config", None), "model_type", ""))
    name = type(causal).__name__
    if family is None or not name.endswith(_CAUSAL) or not hasattr(causal, family.decoder):
        return None
    config: Any = causal.config
    if getattr(config, "add_cross_attention", False) or getattr(config, "output_router_logits", False):
        return None
    kept = model.__dict__.get(_CACHE)
    if kept is None:
        kept = _cut(causal, family, path)
        _require_all(model, kept)
        model.__dict__[_CACHE] = kept
    return list(kept)


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the argument by which a decoder that can be cut computes as its segments do: without a cache.

    A cache, which the library fills in training too, lays keys and values otherwise in memory than the layers put them
    out, and on some CPUs the bits of a batched product follow from that.
    """
    _, causal = _without_adapters(model)
    known = getattr(getattr(causal, "config", None), "model_type", "") in FAMILIES
    return {"use_cache": False} if known and type(causal).__name__.endswith(_CAUSAL) else {}


def _without_adapters(model: nn.Module) -> tuple[str, nn.Module | None]:
    """Return the path within a model of PEFT to the library's model, which has the adapters in it, and that model.

    Any other model is returned itself, with an empty path; None is, where PEFT puts prompts of its own before a text.
    """
    base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    if base is None or not hasattr(model, "peft_config"):
        return "", model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "", None
    inner = base()
    return next((f"{name}.", inner) for name, module in model.named_modules() if module is inner)


def refuse_balanced_experts(model: nn.Module) -> None:
    """Refuse a model that returns its routers' choices: the loss that balances them needs all layers of the model."""
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise UsageError(
            f"{type(model).__name__} balances its experts by a loss over all layers, which no stage of a pipeline has",
            where="distributed.strategy: pipeline",
            fix="set output_router_logits=False in the model's config, or use another strategy",
        )


def _cut(model: nn.Module, family: Family, path: str) -> list[tuple[str, nn.Module]]:
    decoder: Any = getattr(model, family.decoder)
    layers = dict(getattr(decoder, family.layers).named_children())
    prefix = f"{path}{family.decoder}.{family.layers}"
    found: list[tuple[str, nn.Module]] = [("inputs", Inputs(_before_the_layers(decoder, family)))]
    for position, (index, layer) in enumerate(layers.items()):
        name, door = f"{prefix}.{index}", Door(layer)
        found.append((name, Layer(name, _with_layer(decoder, family, door, position), door)))
    head, door = with_own_children(model), Door(getattr(decoder, family.norm))
    head.__dict__.pop(_CACHE, None)
    setattr(head, family.decoder, _after_the_layers(decoder, family, door))
    found.append(("outputs", Outputs(f"{found[-1][0]}/after", head, door)))
    return found


def _require_all(model: nn.Module, segments: list[tuple[str, nn.Module]]) -> None:
    """Refuse a model with parameters that are in no segment: a pipeline would not train them."""
    reached = {id(p) for _, segment in segments for p in segment.parameters()}
    if left := [name for name, p in model.named_parameters() if id(p) not in reached]:
        what = f"{listed(left)} of {type(model).__name__} are not among the parts that stages run"
        fix = "give the model a method segments() -> [(name, module)], or use another strategy"
        raise UsageError(what, where="distributed.strategy: pipeline", fix=fix)


class Door(nn.Module):
    """Stands before a module of a decoder, and gives it what a stage has received in place of its first argument.

    A decoder that reads an attribute of the module, as of a layer its kind of attention, gets the module's own.
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
        """Call `run` with embeddings of the right kind; return its result, and the module's for `hidden`."""
        self.received = hidden
        try:
            # Its values matter to nothing; its shape, dtype and device do, to masks and positions.
            outputs = run(inputs_embeds=hidden.detach())
            return outputs, self.returned
        finally:
            self.received = self.returned = None


class Inputs(nn.Module):
    """First segment: token ids [B, T] → hidden states [B, T, D], with the attention mask if there is one."""

    random_key = ""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        if unknown := sorted(key for key in others if key not in _KNOWN_ARGUMENTS and others[key] is not None):
            what = f"a batch with {', '.join(unknown)}, which stages of a pipeline do not hand on"
            fix = f"leave {'them' if len(unknown) > 1 else 'it'} out of the batch, or use another strategy"
            raise UsageError(what, fix=fix)
        hidden = self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden if attention_mask is None else (hidden, attention_mask)


class Layer(nn.Module):
    """One layer: hidden states [B, T, D] → hidden states [B, T, D]; the attention mask is passed on."""

    def __init__(self, name: str, decoder: nn.Module, door: Door) -> None:
        super().__init__()
        self.random_key, self.decoder, self.door = name, decoder, door  # the key of its random numbers in the model

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Any:
        run = partial(self.decoder, attention_mask=attention_mask, use_cache=False)
        _, returned = self.door.pass_through(hidden, run)
        hidden = returned[0] if isinstance(returned, tuple) else returned  # a tuple before transformers 5
        return hidden if attention_mask is None else (hidden, attention_mask)


class Outputs(nn.Module):
    """Last segment: hidden states [B, T, D] → the whole model's result, with the loss if there are labels."""

    takes_inputs = True  # it is called with `inputs`, the whole model's (positional, keyword) arguments, for labels

    def __init__(self, random_key: str, model: nn.Module, door: Door) -> None:
        super().__init__()
        self.random_key, self.model, self.door = random_key, model, door

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, *,
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> Any:  # fmt: skip
        given = {key: value for key, value in inputs[1].items() if key not in ("input_ids", "attention_mask")}
        run = partial(self.model, attention_mask=attention_mask, **{**given, "use_cache": False})
        outputs, _ = self.door.pass_through(hidden, run)
        return outputs


class Absent(nn.Module):
    """Stands for a module that another segment has: what it computes here would not be used.

    It holds no parameters, and draws no random numbers.
    """

    def forward(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


def _before_the_layers(decoder: nn.Module, family: Family) -> nn.Module:
    """Return a decoder without layers and without its norm, which shares its other modules with `decoder`."""
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
        config.__dict__["layer_types"] = [types[position]]  # the library reads it by the layer's position
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


# ---- layers cut over ranks ----

# What transformers calls the ways in which a layer is cut, and `lockstep.parallel.tensor_plan` does.
_WAYS = {
    "colwise": "column", "rowwise": "row", "colwise_rep": "head", "colwise_gather_output": "head",
    "replicated_with_grad_allreduce": "inner", "moe_tp_experts": "routed",
}  # fmt: skip
_GPT2 = {"h.*.attn.c_attn": "fused_heads", "h.*.attn.c_proj": "row", "h.*.mlp.c_fc": "column", "h.*.mlp.c_proj": "row"}
_PHI3 = {
    "layers.*.self_attn.qkv_proj": "fused_heads", "layers.*.self_attn.o_proj": "row",
    "layers.*.mlp.gate_up_proj": "fused", "layers.*.mlp.down_proj": "row",
}  # fmt: skip
_FURTHER = {"qwen2_moe": Family()}
_OWN = {"gpt2": _GPT2, "phi3": _PHI3}
_SHARED = {f"layers.*.mlp.shared_expert.{name}_proj": "column" for name in ("gate", "up")} | {
    "layers.*.mlp.shared_expert.down_proj": "row"
}


def hf_tensor_plan(model: nn.Module) -> dict[str, str] | None:
    """Return how a causal model of the library is cut over ranks; None where neither it nor Lockstep says."""
    config: Any = getattr(model, "config", None)
    family = {**FAMILIES, **_FURTHER}.get(getattr(config, "model_type", ""))
    named = type(model).__name__.endswith(_CAUSAL)
    if family is None or not named or getattr(config, "add_cross_attention", False):
        return None
    decoder = getattr(model, family.decoder)
    ways = _OWN.get(config.model_type) or _translated(decoder, getattr(config, "base_model_tp_plan", None) or {})
    embeds = decoder.get_input_embeddings()
    embedding = next(name for name, module in decoder.named_modules() if module is embeds)
    if not ways or not (type(embeds) is nn.Embedding or hasattr(embeds, "product")):
        return None
    _note_layouts(decoder, ways, config)
    loss = {"token_losses": "loss"} if hasattr(model, "token_losses") else {}
    inner = {f"{family.decoder}.{name}": way for name, way in {embedding: "vocabulary", **ways}.items()}
    return {**inner, "lm_head": "head", **loss}


def _translated(decoder: nn.Module, of_library: dict[str, str]) -> dict[str, str]:
    """Return the library's plan in our words, without what this model does not have; empty if it can't be followed."""
    routed = {name for name, way in of_library.items() if _WAYS.get(way) == "routed"}
    ways = {
        name: "heads" if name.endswith(("q_proj", "k_proj", "v_proj")) and way == "colwise" else _WAYS.get(way, "")
        for name, way in of_library.items()
        if name.rpartition(".")[0] not in routed  # the stacked weights of experts are cut with their module
    }
    names = [name for name, _ in decoder.named_modules()]
    there = {name: way for name, way in {**ways, **_SHARED}.items() if any(map(_expression(name).fullmatch, names))}
    experts = [module for name, module in decoder.named_modules() if _has_way(there, name, "routed")]
    plain = all(map(_is_plain, experts))
    attentions = {name.rpartition(".")[0] for name in names if _has_way(there, name, "heads")}
    owners = {name.rpartition(".")[0] for name, _ in decoder.named_parameters()}
    told = all(  # a norm of heads that the plan does not name would get the gradient of a rank's heads
        any(_expression(pattern).fullmatch(owner) for pattern in there)
        for owner in owners
        if owner.rpartition(".")[0] in attentions
    )
    followed = plain and told and bool(attentions) and all(there.values()) and "head" not in there.values()
    return there if followed else {}


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _has_way(ways: dict[str, str], name: str, way: str) -> bool:
    return any(each == way and _expression(pattern).fullmatch(name) for pattern, each in ways.items())


def _is_plain(experts: Any) -> bool:
    """Return whether experts are gated layers without biases, stacked in dim 0."""
    odd = any(getattr(experts, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm"))
    return not odd and all(hasattr(experts, name) for name in ("gate_up_proj", "down_proj", "act_fn", "num_experts"))


def _note_layouts(decoder: nn.Module, ways: dict[str, str], config: Any) -> None:
    """Write down the outputs of each layer that lies in a fused weight, and along which dim a norm sees heads."""
    queries = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    for name, module in decoder.named_modules():
        if _has_way(ways, name, "fused_heads"):
            attention: Any = decoder.get_submodule(name.rpartition(".")[0])
            width = attention.head_dim
            module.fused_sizes = (queries * width, keys * width, keys * width)
        elif _has_way(ways, name, "inner") and config.model_type == "gemma3_text":
            module.heads_dim = 1  # its norms of heads see [B, H, T, D]
        elif _has_way(ways, name, "fused"):
            module.fused_sizes = (config.intermediate_size,) * 2


def fit_heads(attention: Any, ranks: int) -> None:
    """Tell an attention module with a fused weight how many heads a rank has."""
    if hasattr(attention, "split_size"):  # of GPT-2
        attention.split_size //= ranks
    elif hasattr(attention, "num_key_value_heads"):  # of Phi-3, which reads the queries' in the config
        attention.num_key_value_heads //= ranks
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads //= ranks


class ContiguousActivation(nn.Module):
    """An activation of a slice, in memory of its own: torch rounds a row's last numbers by the row's length else."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(x.contiguous())
        return y


def fit_units(mlp: Any) -> None:
    """Let a feed-forward layer with a fused weight compute its units alike on any number of ranks."""
    if hasattr(mlp, "activation_fn"):  # of Phi-3
        mlp.activation_fn = ContiguousActivation(mlp.activation_fn)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a layer's weight is [in, out], as in the library's `Conv1D`."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(module, library.Conv1D)


def refuse_attention_dropout(model: nn.Module) -> None:
    """Refuse dropout within attention where heads are cut: the kernel would not draw what one process draws."""
    config = getattr(model, "config", None)
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(config, name, 0.0):
            what = f"{type(model).__name__} has {name}={getattr(config, name)}, and its heads are cut over ranks"
            why = "the kernel draws for the heads that a rank has, not what one process draws for all of them"
            fix = f"write {name}: 0 in the model's arguments, or tensor_size: 1"
            raise UsageError(what, where="distributed.tensor_size", why=why, fix=fix)
