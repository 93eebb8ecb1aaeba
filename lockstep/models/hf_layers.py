"""How causal models of Hugging Face are sharded over the axes `tensor` and `context`.

The library's own plan (`base_model_tp_plan` of a config) is translated for
`lockstep.parallel.tensor.plan`, and what it leaves out is added: GPT-2, weights in which several
layers lie side by side, embeddings, heads and losses. Some models are cut only if Lockstep builds
them by name (`hf:`), and not as the library's objects: errors say so.

Tests: tests/models/test_hf.py, tests/models/test_hf_decoder.py, tests/parity/test_tensor.py
"""

import copy
import re
import sys
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.hf_decoder import CAUSAL, FAMILIES, Family

# Families that attend through `Attend` if they are built by name, each tested. Others have a
# window, a softcap, sinks or learned positions.
ATTENDING = ("llama", "mistral", "olmo2", "qwen2", "qwen3")

# Before, the library's plans left out norms of heads, and named experts one by one.
PLANS_ARE_WHOLE_SINCE = 5

# What transformers calls the ways in which a layer is cut, and `lockstep.parallel.tensor.plan`
# does.
_WAYS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "head",
    "colwise_gather_output": "head",
    "replicated_with_grad_allreduce": "inner",
    "moe_tp_experts": "routed",
}
_GPT2 = {
    "h.*.attn.c_attn": "fused_heads",
    "h.*.attn.c_proj": "row",
    "h.*.mlp.c_fc": "column",
    "h.*.mlp.c_proj": "row",
}
_PHI3 = {
    "layers.*.self_attn.qkv_proj": "fused_heads",
    "layers.*.self_attn.o_proj": "row",
    "layers.*.mlp.gate_up_proj": "fused",
    "layers.*.mlp.down_proj": "row",
}
_FURTHER = {"qwen2_moe": Family()}
_OWN = {"gpt2": _GPT2, "phi3": _PHI3}
_SHARED = {f"layers.*.mlp.shared_expert.{name}_proj": "column" for name in ("gate", "up")} | {
    "layers.*.mlp.shared_expert.down_proj": "row"
}


def hf_tensor_plan(model: nn.Module) -> dict[str, str] | None:
    """Return how a causal model of the library is cut over ranks.

    None where neither it nor Lockstep says.
    """
    config: Any = getattr(model, "config", None)
    family = {**FAMILIES, **_FURTHER}.get(getattr(config, "model_type", ""))
    named = type(model).__name__.endswith(CAUSAL)
    if family is None or not named or getattr(config, "add_cross_attention", False):
        return None
    decoder = getattr(model, family.decoder)
    ways = _ways(decoder, config)
    embeds = decoder.get_input_embeddings()
    embedding = next(name for name, module in decoder.named_modules() if module is embeds)
    if not ways or not (type(embeds) is nn.Embedding or hasattr(embeds, "product")):
        return None
    _note_layouts(decoder, ways, config)
    loss = {"token_losses": "loss"} if hasattr(model, "token_losses") else {}
    inner = {
        f"{family.decoder}.{name}": way for name, way in {embedding: "vocabulary", **ways}.items()
    }
    return {**inner, "lm_head": "head", **loss}


def _ways(decoder: nn.Module, config: Any) -> dict[str, str]:
    return _OWN.get(config.model_type) or _translated(
        decoder, getattr(config, "base_model_tp_plan", None) or {}
    )


def advice_for_object(model: nn.Module, axis: str) -> str | None:
    """Return what to write where an object of the library can't be cut over an axis.

    None: another advice fits.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", "")
    if not type(model).__name__.endswith(CAUSAL) or not kind:
        return None
    by_name = (
        'let Lockstep build it by name: model.save_pretrained("folder"), then'
        ' lockstep.models.get_model("hf:folder")(), or model.name: hf:folder in a config; a batch'
        " then has input_ids, and targets that are shifted already"
    )
    if axis == "context":
        known = ", ".join(f"hf:{name}" for name in ATTENDING)
        return by_name if kind in ATTENDING else f"write context_size: 1, or use one of {known}"
    if _has_scaled_embedding(model):
        return by_name
    major = int(version("transformers").partition(".")[0])
    wrapped = kind in FAMILIES and FAMILIES[kind].decoder not in dict(model.named_children())
    if kind in FAMILIES and not wrapped and major < PLANS_ARE_WHOLE_SINCE:
        return (
            f"install transformers {PLANS_ARE_WHOLE_SINCE} or newer, whose plans name the norms of"
            f" heads and the experts of {kind}; or write tensor_size: 1"
        )
    return None


def _has_scaled_embedding(model: nn.Module) -> bool:
    """Return whether only a scaled embedding keeps a model's layers from being sharded.

    Such an embedding multiplies the rows that it looks up.
    """
    config: Any = model.config
    family = FAMILIES.get(config.model_type)
    decoder: Any = getattr(model, family.decoder, None) if family is not None else None
    if decoder is None or not isinstance(
        getattr(decoder.get_input_embeddings(), "embed_scale", None), Tensor
    ):
        return False
    return bool(_ways(decoder, config))


def _translated(decoder: nn.Module, of_library: dict[str, str]) -> dict[str, str]:
    """Return the library's plan in our words, for the modules that this model has.

    The result is empty if the plan can't be followed.
    """
    names = [name for name, _ in decoder.named_modules()]
    plan = {
        pattern: way
        for pattern, way in {**_in_our_words(of_library), **_SHARED}.items()
        if any(map(_expression(pattern).fullmatch, names))
    }
    return plan if _can_be_followed(plan, decoder) else {}


def _in_our_words(of_library: dict[str, str]) -> dict[str, str]:
    """Return pattern of a module's name → how it is cut; empty for a way that we do not have.

    `layers.*.self_attn.q_proj: colwise` is `heads`, as those of keys and values; the stacked
    weights of experts are left out, which are cut with their module.
    """
    routed = {pattern for pattern, way in of_library.items() if _WAYS.get(way) == "routed"}
    ways: dict[str, str] = {}
    for pattern, way in of_library.items():
        if pattern.rpartition(".")[0] in routed:
            continue
        is_of_heads = pattern.endswith(("q_proj", "k_proj", "v_proj")) and way == "colwise"
        ways[pattern] = "heads" if is_of_heads else _WAYS.get(way, "")
    return ways


def _can_be_followed(plan: dict[str, str], decoder: nn.Module) -> bool:
    """Return whether a plan in our words says how to cut all that it has to.

    It needs attention, plain experts, a way for each of its modules, and none for the head, which
    is not in the decoder.
    """
    modules = dict(decoder.named_modules())
    attentions = {name.rpartition(".")[0] for name in modules if _has_way(plan, name, "heads")}
    if not attentions or not all(plan.values()) or "head" in plan.values():
        return False
    experts = [module for name, module in modules.items() if _has_way(plan, name, "routed")]
    if not all(map(_is_plain, experts)):
        return False
    # a norm of heads that the plan does not name would get the gradient of a rank's heads
    owners = {name.rpartition(".")[0] for name, _ in decoder.named_parameters()}
    in_attention = [owner for owner in owners if owner.rpartition(".")[0] in attentions]
    return all(
        any(_expression(pattern).fullmatch(owner) for pattern in plan) for owner in in_attention
    )


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))


def _has_way(ways: dict[str, str], name: str, way: str) -> bool:
    return any(
        each == way and _expression(pattern).fullmatch(name) for pattern, each in ways.items()
    )


def _is_plain(experts: Any) -> bool:
    """Return whether experts are gated layers without biases, stacked in dim 0."""
    odd = any(
        getattr(experts, name, False)
        for name in ("has_bias", "is_transposed", "has_post_expert_norm")
    )
    return not odd and all(
        hasattr(experts, name) for name in ("gate_up_proj", "down_proj", "act_fn", "num_experts")
    )


def _note_layouts(decoder: nn.Module, ways: dict[str, str], config: Any) -> None:
    """Note on each module how its weight is fused, or along which dim its norm sees heads.

    `fused_sizes` are the sizes of the outputs of the layers in a fused weight; `heads_dim` is the
    dim of the heads.
    """
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
    elif hasattr(attention, "num_key_value_heads"):
        # of Phi-3, which reads the queries' in the config
        attention.num_key_value_heads //= ranks
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads //= ranks


class ContiguousActivation(nn.Module):
    """An activation that is applied to a contiguous copy of its input.

    Without the copy, how torch rounds a row's last numbers depends on the row's length.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(x.contiguous())
        return y


def fit_units(mlp: Any) -> None:
    """Make a feed-forward layer's units independent of the number of ranks.

    The layer has a fused weight.
    """
    if hasattr(mlp, "activation_fn"):  # of Phi-3
        mlp.activation_fn = ContiguousActivation(mlp.activation_fn)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a layer's weight is [in, out], as in the library's `Conv1D`."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(module, library.Conv1D)


def refuse_attention_dropout(model: nn.Module) -> None:
    """Refuse dropout within attention where heads are sharded.

    The kernel would not draw the numbers that one process draws.
    """
    config = getattr(model, "config", None)
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(config, name, 0.0):
            what = (
                f"{type(model).__name__} has {name}={getattr(config, name)}, and its heads are cut"
                " over ranks"
            )
            why = (
                "the kernel draws for the heads that a rank has, not what one process draws for all"
                " of them"
            )
            fix = f"write {name}: 0 in the model's arguments, or tensor_size: 1"
            raise UsageError(what, where="distributed.tensor_size", why=why, fix=fix)
