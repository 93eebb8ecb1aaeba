"""Lets Hugging Face causal models attend through `lockstep.models.attention.Attend`, so that sequences can be cut.

The library calls whatever function its public `AttentionInterface` has under the name in the config. Ours hands
queries, keys and values, as the layer computed and rotated them, to an `Attend` in the layer. Positions come from
there, too: into the library's module for rotary positions, and into `lockstep.models.hf_causal.LlamaLayer`.

Families are listed, and each is tested, since others do more: a window, a softcap, sinks, learned positions.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from lockstep.errors import UsageError
from lockstep.models.attention import Attend

FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
_NAME = "lockstep_attend"
_PLAN = {"input_ids": 1, "targets": 1}


def attend_through(model: nn.Module) -> dict[str, int]:
    """Let the model's layers call an `Attend`; return the dims of a batch along which its sequences lie.

    Raises:
        UsageError: the family's attention does more, or is not known.
    """
    config: Any = model.config
    problem, fix = _problem(config)
    if problem:
        raise UsageError(
            f"sequences of hf:{config.model_type} can't be cut over ranks: {problem}",
            where="distributed.context_size",
            why="each rank has a part of every sequence, and the library's attention would see no other",
            fix=f"{fix}, or context_size: 1",
        )
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "q_proj")]
    if hasattr(layers[0], "attend"):
        return _PLAN
    for layer in layers:
        layer.attend = Attend()
    AttentionInterface.register(_NAME, _attend)
    model.set_attn_implementation(_NAME)  # type: ignore[operator]
    rotary = getattr(model.get_submodule("model"), "rotary_emb", None)
    if rotary is not None:
        rotary.register_forward_pre_hook(_positions_of(layers[0].attend), with_kwargs=True)
    return _PLAN


def _problem(config: Any) -> tuple[str, str]:
    """Return why a model can't be cut, and what to write; "" if it can."""
    if config.model_type not in FAMILIES or getattr(config, "output_router_logits", False):
        return "its attention or its loss does more", f"use one of {', '.join(FAMILIES)}"
    if getattr(config, "sliding_window", None) is not None:
        return "it attends within a window", "write sliding_window: null in model.args"
    if config.attention_dropout:
        return "it has attention_dropout", "write attention_dropout: 0 in model.args"
    return "", ""


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    **_others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    assert attention_mask is None
    assert scaling == module.head_dim**-0.5
    return module.attend(query, key, value).transpose(1, 2).contiguous(), None


def _positions_of(attend: Attend) -> Any:
    def before(_rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0]
        return args[:1], {**kwargs, "position_ids": attend.positions(x.shape[1], x.device)[None]}

    return before
