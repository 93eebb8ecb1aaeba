"""Adapts Hugging Face causal language models to the protocol.

It stays the library's object and its parameters keep their names, so `save_pretrained` and
checkpoints agree with other tools. Its class is replaced by a subclass that takes ids [B, T] and
returns logits [B, T, V], with our own loss: the data shift targets, and the library's loss would
shift them again. A mixture of experts with `output_router_logits` in its config adds a balance
term: there the library's own loss is used, with targets marked as shifted. The term is computed per
micro-batch, and a step weighs it like the mean losses; in evaluation the loss is without it.

Like the library's objects they are cut into stages by `lockstep.models.hf_decoder`. The Llama and
GPT-2 families can also be built on meta: `init_weights` fills them.

Tests: tests/models/test_hf.py, tests/models/test_hf_decoder.py,
tests/models/test_hugging_face_loss.py
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.attention import Attend, positions_within
from lockstep.models.batch_parts import DOCUMENTS, IGNORED_TARGET
from lockstep.models.hf_decoder import FAMILIES
from lockstep.models.hf_layers import ATTENDING
from lockstep.models.hf_stored import fill_buffers
from lockstep.models.language import LanguageModel, NextLogits, TokenLosses, TokenTable
from lockstep.models.observed import LossCalls
from lockstep.torch_compat.module_copy import with_own_children

# With these kinds of rotary positions the angles do not depend on the length of the text.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")

# Families that mask documents by their positions, tested with this version of the library and later
# ones. GPT-OSS makes its masks without the positions: documents would see each other.
_KEEPS_DOCUMENTS_APART = sorted({*FAMILIES} - {"gpt_oss"})
_KEEPS_THEM_SINCE = 5

_ATTENTION = "lockstep_attend"
_SEQUENCES = {"input_ids": 1, "targets": 1}


def can_be_drawn(config: Any) -> bool:
    """Return whether models of this config can be built on meta, and filled later."""
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
    if can_be_drawn(model.config):
        kind = {"llama": Llama, "gpt2": GPT2}[model.config.model_type]
    _swap_class(model, kind)
    if hasattr(model, "stored_weights") and not issubclass(kind, DrawnModel):
        _swap_class(model, StoredModel)
    embedding = model.get_input_embeddings()
    if isinstance(getattr(embedding, "embed_scale", None), Tensor):
        _swap_class(embedding, ScaledEmbedding)
    model.complete()
    if kind is GPT2:
        _swap_class(model.get_submodule("transformer.wpe"), PositionTable)
    assert isinstance(model, nn.Module)
    return model


class CausalModel(LanguageModel):
    """A causal model of the library: ids [B, T] → logits [B, T, V]."""

    config: Any
    _no_split_modules: Any
    base_model_prefix: str
    _computes_losses = True  # from logits; False: the library's forward pass returns a loss

    def complete(self) -> None:
        """Add the members of a `LanguageModel`: the library has built this object without them."""
        self.block_size = getattr(self.config, "max_position_embeddings", None) or 1024
        if self._computes_losses:
            self.token_losses = TokenLosses()

    takes_documents = True  # a pipeline's stages hand on their numbers, and not a mask
    attends_over_ranks = False  # each rank has a part of every sequence

    def forward(
        self,
        ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        loss_targets: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Return the logits; documents, numbered in int64 [B, T], do not see each other.

        The library masks them by their positions, which begin anew in each. With `loss_targets` the
        losses [B, T] are returned, in the place of the logits.
        """
        if document_ids is not None:
            arguments["position_ids"] = positions_within(document_ids)
        arguments = {"input_ids": ids, "use_cache": False, **arguments}
        if loss_targets is None:
            logits: Tensor = super(LanguageModel, self).forward(**arguments).logits
            return logits
        hidden = getattr(self, self.base_model_prefix)(**arguments).last_hidden_state
        return self.token_losses.by_chunks(self._after_the_decoder(), hidden, loss_targets)

    def compute_by_chunks(self, chunks: int) -> bool:
        if not self._computes_losses or self.config.model_type not in FAMILIES:
            return chunks == 1
        self.token_losses.divide(chunks)
        return True

    def _after_the_decoder(self) -> Callable[[Tensor], Tensor]:
        """Return the library's own way from the decoder's hidden states [B, T, D] to logits.

        It runs the library's forward pass with something else in the place of the decoder: scales
        and caps of logits are the library's.
        """
        part: Any = with_own_children(self)
        decoder = GivenStates()
        setattr(part, self.base_model_prefix, decoder)

        def logits_of(hidden: Tensor) -> Tensor:
            decoder.states = hidden
            try:
                outputs = super(LanguageModel, part).forward(inputs_embeds=hidden, use_cache=False)
            finally:
                decoder.states = None
            logits: Tensor = outputs.logits
            return logits

        return logits_of

    @contextmanager
    def keeping_past(self) -> Iterator[NextLogits | None]:
        """Keep keys and values in the block, in the library's own cache."""
        past: Any = None
        seen = torch.empty(1, 0, dtype=torch.int64)

        def next_logits(ids: Tensor) -> Tensor:
            """Return the logits of the next ids; of all, from a model that keeps nothing."""
            nonlocal past, seen
            seen = torch.cat((seen.to(ids.device), ids), 1)
            outputs = super(LanguageModel, self).forward(
                input_ids=seen if past is None else ids, past_key_values=past, use_cache=True
            )
            past = getattr(outputs, "past_key_values", None)
            logits: Tensor = outputs.logits
            return logits

        yield next_logits

    def inputs(self, batch: Mapping[str, Tensor]) -> Any:
        documents = batch.get(DOCUMENTS)
        if documents is None:
            return (batch["input_ids"],)
        self._require_documents()
        return batch["input_ids"], documents

    def _require_documents(self) -> None:
        """Refuse documents where the library would let them see each other."""
        kind = self.config.model_type
        fix = "train it on sequences of one document each: data.name: tokens, or text"
        if kind not in _KEEPS_DOCUMENTS_APART:
            what = f"hf:{kind} is not known to keep the documents of a sequence apart"
            fix = f"use one of {', '.join(_KEEPS_DOCUMENTS_APART)}; or {fix}"
            raise UsageError(what, where="the model and its packed documents", fix=fix)
        installed = transformers.__version__
        if int(installed.partition(".")[0]) < _KEEPS_THEM_SINCE:
            what = f"transformers {installed} is not known to keep packed documents apart"
            fix = f'pip install "transformers>={_KEEPS_THEM_SINCE}"; or {fix}'
            raise UsageError(what, where="the model and its packed documents", fix=fix)
        if self.attends_over_ranks:
            what = f"hf:{kind} is cut along its sequences, and these hold several documents"
            why = "its attention over ranks takes no mask of documents"
            fix = f"write context_size: 1; or use the model transformer; or {fix}"
            raise UsageError(what, where="distributed.context_size", why=why, fix=fix)

    def context_plan(self) -> dict[str, int]:
        """Let attention know of other ranks.

        Return the dims of a batch along which its sequences lie.
        """
        plan = attend_through(self)
        self.attends_over_ranks = True
        return plan

    def blocks(self) -> list[tuple[str, nn.Module]]:
        names = set(self._no_split_modules or ())
        return [
            (name, module)
            for name, module in self.named_modules()
            if type(module).__name__ in names
        ]


class GivenStates(nn.Module):
    """Stands for a decoder that has run already: it returns the hidden states that it is given."""

    states: Tensor | None = None

    def forward(self, *_ids: Any, **_arguments: Any) -> Any:
        return _DecoderOutput(self.states)


class _DecoderOutput:
    """Holds what a decoder of the library returns: nothing but the last hidden states."""

    def __init__(self, states: Tensor | None) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        """Return None for the rest: kept keys, attentions, the choices of routers."""


class MixtureModel(CausalModel):
    """A causal mixture of experts with its library's loss.

    Its forward pass is ids [B, T], targets [B, T] → (logits, mean loss).
    """

    averages_in_forward = True  # it returns a mean, which dp can't weigh
    takes_documents = False
    _computes_losses = False
    _takes_targets_as_they_are = False  # determined in the first forward pass

    def forward(  # type: ignore[override]
        self, ids: Tensor | None = None, targets: Tensor | None = None, **arguments: Any
    ) -> Any:
        """Return (logits, mean loss); logits alone where there are no targets."""
        if targets is None:
            return super().forward(ids, **arguments)
        with LossCalls() as calls:
            outputs = super(LanguageModel, self).forward(
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
                    " lockstep.Trainer with batches of input_ids and labels"
                )
                raise UsageError(what, where="model.args.output_router_logits", fix=fix)
            self._takes_targets_as_they_are = True
        return outputs.logits, outputs.loss.float()

    def inputs(self, batch: Mapping[str, Tensor]) -> Any:
        return batch["input_ids"], batch["targets"]

    def loss_inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}  # the library's loss is not computed by chunks

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss: the mean loss times the number of valid targets.

        It is the cross entropy summed over valid targets, plus the balance term times their number.
        """
        count = self.count(batch)
        return torch.where(count > 0, outputs[1] * count, 0.0)


class ScaledEmbedding(TokenTable):
    """An embedding whose vectors are multiplied by `embed_scale`: ids [B, T] → [B, T, D]."""

    embed_scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight) * self.embed_scale.to(self.weight.dtype)


class DrawnModel(CausalModel):
    """A causal model that can be built on meta, and gets its first values one by one."""

    random_key = ""  # of what is drawn outside of the layers

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


class StoredModel(nn.Module):
    """A causal model on meta whose parameters lie in files: `lockstep.models.stored`."""

    def init_weights(self) -> None:
        """Fill the buffers, which no file has; parameters that a plan has on a CPU are drawn."""
        for parameter in self.parameters():
            if not parameter.is_meta:
                nn.init.normal_(parameter, std=0.02)
        fill_buffers(self)


class Llama(DrawnModel):
    """A Llama that can be built on meta."""

    def init_weights(self) -> None:
        super().init_weights()
        rotary: Any = self.get_submodule("model.rotary_emb")
        with torch.device("cpu"):  # also where the model is on meta
            made = type(rotary)(config=self.config)
        rotary.attention_scaling = made.attention_scaling
        for name, buffer in made.named_buffers():
            getattr(rotary, name).copy_(buffer)


class GPT2(DrawnModel):
    """A GPT-2 that can be built on meta."""

    # The dropout of embeddings is the only draw outside of the layers. It keeps this key, by which
    # runs that began before go on with the numbers that they would have drawn.
    random_key = "transformer.drop"

    def init_weights(self) -> None:
        super().init_weights()
        positions = int(self.config.max_position_embeddings)
        for block in self.get_submodule("transformer.h").children():
            attention: Any = block.attn
            if hasattr(attention, "masked_bias"):  # the library has them before its version 5
                seen = torch.ones(positions, positions, dtype=torch.bool).tril()
                attention.bias.copy_(seen.view(1, 1, positions, positions))
                attention.masked_bias.fill_(-1e4)

    def std_of(self, name: str) -> float:
        std = super().std_of(name)
        if name.endswith("c_proj.weight"):
            return std / math.sqrt(2 * self.config.num_hidden_layers)
        return std


class PositionTable(nn.Embedding):
    """Learned positions, which refuse a text that is too long: positions [B, T] → [B, T, D]."""

    def forward(self, input: Tensor) -> Tensor:
        length = input.shape[-1]
        if length > self.num_embeddings:
            what = f"a text of {length} tokens, and the model has {self.num_embeddings} positions"
            fix = "raise model.args.max_position_embeddings, or shorten data.args.block_size"
            raise UsageError(what, where="model.args.max_position_embeddings", fix=fix)
        return super().forward(input)


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
        problem = "its attention or its loss does more"
        fix = f"use one of {', '.join(ATTENDING)}"
    elif getattr(config, "sliding_window", None) is not None:
        problem = "it attends within a window"
        fix = "write sliding_window: null in model.args"
    elif (kind := _rotary_type(config)) not in _FIXED_ROTARY:
        problem = f"its angles ({kind}) depend on the length of a text"
        fix = f"use one of {', '.join(_FIXED_ROTARY)}"
    elif config.attention_dropout:
        problem = "it has attention_dropout"
        fix = "write attention_dropout: 0 in model.args"
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
    """Attend through the layer's `Attend`, in the place of the library's attention.

    q, k, v [B, H, T, D] → [B, T, H, D], as the library wants it.
    """
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
