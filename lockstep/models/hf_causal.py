"""Adapts Hugging Face causal language models to the protocol.

It stays the library's object and its parameters keep their names, so `save_pretrained` and
checkpoints agree with other tools. Its class is replaced by a subclass that takes ids [B, T] and
returns logits [B, T, V], with our own loss: the data shift targets, and the library's loss would
shift them again. A mixture of experts with `output_router_logits` in its config adds a balance
term: there the library's own loss is used, with targets marked as shifted. The term is computed per
micro-batch, and a step weighs it like the mean losses; in evaluation the loss is without it.

The Llama and GPT-2 families are also divided into segments, each a module of the model under its
own name (`chain`). A tied head borrows the embedding's weight (`lockstep.models.chain`).

Tests: tests/models/test_hf.py, tests/models/test_hf_decoder.py,
tests/models/test_hugging_face_loss.py
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.attention import Attend
from lockstep.models.chain import run_segments
from lockstep.models.hf_layers import ATTENDING
from lockstep.models.language import LanguageModel, OutputLayer, TokenLosses, TokenTable
from lockstep.models.observed import LossCalls
from lockstep.models.protocol import IGNORED_TARGET

# With these kinds of rotary positions the angles do not depend on the length of the text.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")

_ATTENTION = "lockstep_attend"
_SEQUENCES = {"input_ids": 1, "targets": 1}


def can_be_cut(config: Any) -> bool:
    """Return whether models of this config can run as a chain of segments."""
    if config.model_type == "llama":
        return _rotary_type(config) in _FIXED_ROTARY
    return bool(config.model_type == "gpt2" and not config.add_cross_attention)


def _rotary_type(config: Any) -> str:
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return str(rotary.get("rope_type") or rotary.get("type") or "default")


def meet_protocol(model: Any) -> nn.Module:
    """Replace the classes of the library's model in place, and return it."""
    kind: type[CausalModel] = (
        MixtureModel if getattr(model.config, "output_router_logits", False) else CausalModel
    )
    if can_be_cut(model.config):
        kind = {"llama": Llama, "gpt2": GPT2}[model.config.model_type]
    _swap_class(model, kind)
    embedding = model.get_input_embeddings()
    if isinstance(getattr(embedding, "embed_scale", None), Tensor):
        _swap_class(embedding, ScaledEmbedding)
    if kind is not MixtureModel:
        model.token_losses = TokenLosses()
    model.block_size = getattr(model.config, "max_position_embeddings", None) or 1024
    if isinstance(model, CutModel):
        model.cut()
    assert isinstance(model, nn.Module)
    return model


class CausalModel(LanguageModel):
    """A causal model of the library: ids [B, T] → logits [B, T, V]."""

    config: Any
    _no_split_modules: Any

    def forward(self, ids: Tensor | None = None, **arguments: Any) -> Tensor:  # type: ignore[override]
        arguments = {"input_ids": ids, "use_cache": False, **arguments}
        logits: Tensor = super(LanguageModel, self).forward(**arguments).logits
        return logits

    def inputs(self, batch: Mapping[str, Tensor]) -> Any:
        return (batch["input_ids"],)

    def context_plan(self) -> dict[str, int]:
        """Let attention know of other ranks.

        Return the dims of a batch along which its sequences lie.
        """
        return attend_through(self)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        names = set(self._no_split_modules or ())
        return [
            (name, module)
            for name, module in self.named_modules()
            if type(module).__name__ in names
        ]


class MixtureModel(CausalModel):
    """A causal mixture of experts, with its library's loss: ids [B, T], targets [B, T] → (logits, mean loss)."""

    averages_in_forward = True  # it returns a mean, which dp can't weigh
    _takes_targets_as_they_are = False  # determined in the first forward pass

    def forward(  # type: ignore[override]
        self, ids: Tensor | None = None, targets: Tensor | None = None, **arguments: Any
    ) -> Any:
        if targets is None:
            return super().forward(ids, **arguments)
        with LossCalls() as calls:
            found = super(LanguageModel, self).forward(
                input_ids=ids,
                labels=targets,
                shift_labels=targets,
                use_cache=False,
                output_router_logits=self.training,
            )
        if not self._takes_targets_as_they_are:
            counted = calls.count(targets, len)
            if counted is None or int(counted) != int((targets != IGNORED_TARGET).sum()):
                what = (
                    f"the loss of {type(self).__name__} in transformers shifts targets that are"
                    " shifted already"
                )
                fix = (
                    "leave it out, and experts are not balanced; or hand the library's model to"
                    " lockstep.Trainer "
                )
                fix += "with batches of input_ids and labels"
                raise UsageError(what, where="model.args.output_router_logits", fix=fix)
            self._takes_targets_as_they_are = True
        return found.logits, found.loss.float()

    def inputs(self, batch: Mapping[str, Tensor]) -> Any:
        return batch["input_ids"], batch["targets"]

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross entropy summed over valid targets, plus the balance term times their number."""
        count = self.count(batch)
        return torch.where(count > 0, outputs[1] * count, 0.0)


class ScaledEmbedding(TokenTable):
    """An embedding whose vectors are multiplied by `embed_scale`: ids [B, T] → [B, T, D]."""

    embed_scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight) * self.embed_scale.to(self.weight.dtype)


class CutModel(CausalModel):
    """A causal model that runs as a chain of its own modules."""

    chain: tuple[str, ...]  # canonical names, in order; "*" stands for all members of a list
    embedding: str  # canonical name of the parameter that a tied head borrows
    tied = False

    def cut(self) -> None:
        """Prepare the parts; called once on the library's model."""
        head = self.get_submodule("lm_head")
        if head.weight is self.get_parameter(self.embedding):
            self.tied = True
            head.register_parameter("weight", None)
            _swap_class(head, OutputLayer)

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]  # its segments take nothing else
        logits: Tensor = run_segments(self, ids)
        return logits

    def segments(self) -> list[tuple[str, nn.Module]]:
        found: list[tuple[str, nn.Module]] = []
        for name in self.chain:
            if name.endswith(".*"):
                members = self.get_submodule(name[:-2]).named_children()
                found += [(f"{name[:-2]}.{index}", module) for index, module in members]
            else:
                found.append((name, self.get_submodule(name)))
        return found

    def shared_parameters(self) -> dict[str, dict[str, str]]:
        return {"lm_head": {"weight": self.embedding}} if self.tied else {}

    def init_weights(self) -> None:
        """Draw like the library: weights ~ N(0, initializer_range), biases 0, norms 1."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=self.std_of(name))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.ones_(parameter)

    def std_of(self, name: str) -> float:
        """Return the standard deviation of the first values of the weight called `name`."""
        return float(self.config.initializer_range)


class Llama(CutModel):
    """A Llama that runs as a chain."""

    chain = ("model.embed_tokens", "model.layers.*", "model.norm", "lm_head")
    embedding = "model.embed_tokens.weight"

    def cut(self) -> None:
        super().cut()
        decoder: Any = self.get_submodule("model")
        rotary_class: Any = type(decoder.rotary_emb)
        make_rotary = functools.partial(rotary_class, config=self.config)
        decoder.rotary_emb = None
        for layer in decoder.layers:
            _swap_class(layer, LlamaLayer)
            layer.prepare(make_rotary)

    def init_weights(self) -> None:
        super().init_weights()
        for layer in self.get_submodule("model.layers").children():
            assert isinstance(layer, LlamaLayer)
            layer.fill_buffers()


class LlamaLayer(nn.Module):
    """One layer, which computes its own angles: x [B, T, D] → x [B, T, D]."""

    inv_freq: Tensor

    def prepare(self, make_rotary: Callable[[], Any]) -> None:
        """Take the frequencies from the library's module for rotary positions, made by `make_rotary`."""
        self.make_rotary = make_rotary
        device = next(self.parameters()).device
        with torch.device("cpu"):
            frequencies = make_rotary().inv_freq
        self.register_buffer(
            "inv_freq", torch.empty_like(frequencies, device=device), persistent=False
        )
        self.fill_buffers()

    def fill_buffers(self) -> None:
        with torch.device("cpu"):
            rotary = self.make_rotary()
        self.inv_freq.copy_(rotary.inv_freq)
        self.rotary_scale = float(rotary.attention_scaling)

    def forward(self, x: Tensor) -> Tensor:
        attend = getattr(self.self_attn, "attend", None)  # of context parallel (`attend_through`)
        position = torch.arange(x.shape[1], device=x.device)
        if attend is not None:
            position = attend.positions(x.shape[1], x.device)
        angle = (position.float()[:, None] * self.inv_freq.float()).repeat(1, 2)[None]
        turn = (
            (angle.cos() * self.rotary_scale).to(x.dtype),
            (angle.sin() * self.rotary_scale).to(x.dtype),
        )
        return _only(super().forward(x, attention_mask=None, position_embeddings=turn))


class GPT2(CutModel):
    """A GPT-2 that runs as a chain."""

    chain = (
        "transformer.wte",
        "transformer.wpe",
        "transformer.drop",
        "transformer.h.*",
        "transformer.ln_f",
        "lm_head",
    )
    embedding = "transformer.wte.weight"

    def cut(self) -> None:
        super().cut()
        _swap_class(self.get_submodule("transformer.wpe"), PositionAdder)
        for layer in self.get_submodule("transformer.h").children():
            _swap_class(layer, GPT2Layer)
            # Versions before 5 have a mask that only the library's own attention reads.
            attention = layer.get_submodule("attn")
            for name, _ in list(attention.named_buffers(recurse=False)):
                delattr(attention, name)

    def std_of(self, name: str) -> float:
        std = super().std_of(name)
        return (
            std / (2 * self.config.num_hidden_layers) ** 0.5
            if name.endswith("c_proj.weight")
            else std
        )


class PositionAdder(nn.Embedding):
    """Learned positions: x [B, T, D] → x plus the vectors of positions 0 … T−1."""

    def forward(self, input: Tensor) -> Tensor:
        length = input.shape[1]
        if length > self.num_embeddings:
            what = f"a text of {length} tokens, and the model has {self.num_embeddings} positions"
            fix = "raise model.args.max_position_embeddings, or shorten data.args.block_size"
            raise UsageError(what, where="model.args.max_position_embeddings", fix=fix)
        return input + self.weight[:length]


class GPT2Layer(nn.Module):
    """One layer: x [B, T, D] → x [B, T, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return _only(super().forward(x))


def _only(outputs: Any) -> Tensor:
    """Return the one output; layers of older versions of the library return a tuple of one."""
    found = outputs[0] if isinstance(outputs, tuple) else outputs
    assert isinstance(found, Tensor)
    return found


def _swap_class(module: Any, mixin: Any) -> None:
    base: Any = type(module)
    module.__class__ = _subclass(mixin, base)


@functools.cache  # layers of one class stay of one class
def _subclass(mixin: Any, base: Any) -> type[nn.Module]:
    bases = (mixin,) if issubclass(mixin, base) else (mixin, base)
    # Keep the base's name: the library's own tables use it (`_no_split_modules`, `architectures`).
    return type(base.__name__, bases, {"__doc__": mixin.__doc__})


def attend_through(model: nn.Module) -> dict[str, int]:
    """Let the model's layers call an `Attend`.

    Return the dims of a batch along which its sequences lie.

    The library calls the function that its public `AttentionInterface` has under the name in the
    config: ours hands queries, keys and values, as the layer rotated them, to the layer's `Attend`.
    Positions come from there, too.
    """
    config: Any = model.config
    problem = fix = ""
    if config.model_type not in ATTENDING or getattr(config, "output_router_logits", False):
        problem, fix = "its attention or its loss does more", f"use one of {', '.join(ATTENDING)}"
    elif getattr(config, "sliding_window", None) is not None:
        problem, fix = "it attends within a window", "write sliding_window: null in model.args"
    elif (kind := _rotary_type(config)) not in _FIXED_ROTARY:
        problem, fix = (
            f"its angles ({kind}) depend on the length of a text",
            f"use one of {', '.join(_FIXED_ROTARY)}",
        )
    elif config.attention_dropout:
        problem, fix = "it has attention_dropout", "write attention_dropout: 0 in model.args"
    if problem:
        what = f"sequences of hf:{config.model_type} can't be cut over ranks: {problem}"
        why = (
            "each rank has a part of every sequence, and the library's attention would see no other"
        )
        raise UsageError(
            what, where="distributed.context_size", why=why, fix=f"{fix}, or context_size: 1"
        )
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "q_proj")]
    if hasattr(layers[0], "attend"):
        return _SEQUENCES
    for layer in layers:
        layer.attend = Attend()
    transformers.AttentionInterface.register(_ATTENTION, _attend)
    model.set_attn_implementation(_ATTENTION)  # type: ignore[operator]
    rotary = getattr(model.get_submodule("model"), "rotary_emb", None)
    attend = layers[0].attend

    def take_positions(_rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x: Tensor = args[0]
        return args[:1], {**kwargs, "position_ids": attend.positions(x.shape[1], x.device)[None]}

    if rotary is not None:
        rotary.register_forward_pre_hook(take_positions, with_kwargs=True)
    return _SEQUENCES


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_others: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None or scaling != module.head_dim**-0.5:
        what = (
            f"{type(module).__name__} attends with a"
            f" {'mask' if attention_mask is not None else 'scale'} of its own"
        )
        why = "each rank has a part of every sequence, and no rank applies it to all of one"
        raise UsageError(
            what, where="distributed.context_size", why=why, fix="write context_size: 1"
        )
    return module.attend(query, key, value).transpose(1, 2).contiguous(), None
