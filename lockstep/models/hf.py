"""Builds models of Hugging Face (the extra `transformers`).

    hf:FOLDER         a local folder with a config.json; its *.safetensors are loaded if it has any
    hf:CONFIG.json    that config, values drawn at random
    hf:TYPE           a model type of the library (llama, gpt2, …), its default config, values drawn
                      at random
    hf:OWNER/NAME     a model of the hub, taken from its cache, or downloaded before ranks start

`model.auto` names the Auto class (`lockstep.models.hf_auto`). A causal language model meets the
protocol (`lockstep.models.hf_causal`); any other stays the library's object, with its own loss,
and takes batches by the names of its own arguments.

`model.args` override the config by the library's own names. Parameters are always float32: autocast
does the rest.

Tests: tests/models/test_hf.py, tests/models/test_hf_auto.py
"""

import copy
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, did_you_mean, listed, warn_at_caller
from lockstep.files.paths import local_path
from lockstep.machine.quiet_imports import without_warnings_of_imports
from lockstep.process_group.collectives import is_main_process

try:
    with without_warnings_of_imports():
        import transformers
        import transformers.modeling_utils
except ImportError as error:
    what = "Hugging Face models need the package transformers"
    raise UsageError(
        what, where="model.name", fix="install it: pip install transformers"
    ) from error

from lockstep.models.chain import run_segment
from lockstep.models.hf_auto import CAUSAL_LM, auto_of, auto_of_folder, model_class
from lockstep.models.hf_causal import can_be_drawn, meet_protocol
from lockstep.models.hf_decoder import FAMILIES, decoder_segments
from lockstep.models.hf_labels import fit_labels
from lockstep.models.hf_stored import CAN_READ_PIECES, files_of_weights, stored_weights

if TYPE_CHECKING:
    from lockstep.config.schema_training import LoraConfig

OLDEST = (4, 57)  # version of transformers, as pyproject.toml has it
if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
    oldest = ".".join(map(str, OLDEST))
    what = (
        f"transformers {transformers.__version__} is installed, and models that are built by name"
        f" need {oldest}"
    )
    raise UsageError(what, where="model.name", fix=f'pip install "transformers>={oldest}"')

# The type of the library's automatic class is incomplete.
_AutoConfig: Any = transformers.AutoConfig


@dataclass(frozen=True)
class DescribedModel:
    """Describes a model of the library by a config, before it is built."""

    config: Any
    auto: str  # the name of its Auto class
    folder: Path | None = None  # with the weights
    own_head: bool = True  # whether the folder's weights are of the same class

    @property
    def kind(self) -> type[nn.Module]:
        """The library's class of this model."""
        return model_class(self.auto, self.config)

    @property
    def is_causal(self) -> bool:
        """Return whether it is a causal language model, which meets the protocol."""
        return self.auto == CAUSAL_LM

    @property
    def can_be_drawn(self) -> bool:
        """Return whether it can be built on meta, and filled later."""
        return self.is_causal and can_be_drawn(self.config)

    @property
    def can_be_read_in_pieces(self) -> bool:
        """Return whether ranks can each read their piece of the folder's weights."""
        return bool(
            CAN_READ_PIECES
            and self.is_causal
            and self.own_head
            and self.config.model_type in FAMILIES
            and self.folder is not None
            and files_of_weights(self.folder)
        )


def from_files(
    path: str,
    *,
    auto: str | None = None,
    lora: "LoraConfig | None" = None,
    adapter: str | None = None,
    labels: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> nn.Module:
    """Return the model that a folder or a config file describes.

    A folder's weights are loaded if there are any; else the values are random.

    The model has new adapters with `lora`, and those of a folder with `adapter`. `labels` are those
    of the data, as `fit_labels` takes them.
    """
    described = described_by_files(path, auto=auto, **overrides)
    return _built(_with_labels(described, labels, overrides), lora, adapter)


def described_by_files(path: str, *, auto: str | None = None, **overrides: Any) -> DescribedModel:
    """Return what a folder or a config file says of its model.

    Raises UsageError: it can't be built, or its weights can't be read safely.
    """
    source = local_path(path, "model.name")
    file = source / "config.json" if source.is_dir() else source
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        model_type = described.pop("model_type")
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        what = f"{file} is not the config of a Hugging Face model"
        raise UsageError(what, where="model.name", why=_in_short(error)) from error
    if described.get("quantization_config"):
        raise _quantized(path, described["quantization_config"])
    config = _config(model_type, described, overrides)
    own = auto_of_folder(config)
    chosen = auto_of(config, auto or own)
    if source.is_dir() and any(source.glob("*.safetensors")):
        return DescribedModel(config, chosen, source, own_head=chosen == own)
    if source.is_dir() and any(source.glob("*.bin")):
        what = f"the weights in {path} are pickles, which can run code when they are read"
        raise UsageError(what, where="model.name", fix="convert them to safetensors")
    return DescribedModel(config, chosen)


def from_type(
    model_type: str,
    *,
    auto: str | None = None,
    lora: "LoraConfig | None" = None,
    adapter: str | None = None,
    labels: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    block_size: int | None = None,
    image_size: int | None = None,
    **overrides: Any,
) -> nn.Module:
    """Return a model of the library's type `model_type`.

    Its config is the type's default config with `overrides`, for at least `block_size` positions,
    and for pictures of `image_size` pixels a side where the type takes pictures.
    """
    if vocab_size is not None:
        overrides["vocab_size"] = vocab_size
    described = described_by_type(model_type, auto=auto, **overrides)
    if image_size is not None and hasattr(described.config, "image_size"):
        overrides["image_size"] = image_size
        described = described_by_type(model_type, auto=auto, **overrides)
    if block_size is not None and block_size > getattr(
        described.config, "max_position_embeddings", block_size
    ):
        longer = {"max_position_embeddings": block_size, **overrides}
        described = described_by_type(model_type, auto=auto, **longer)
    return _built(_with_labels(described, labels, overrides), lora, adapter)


def _with_labels(
    described: DescribedModel, labels: Mapping[str, Any] | None, overrides: Mapping[str, Any]
) -> DescribedModel:
    """Return a model that fits the labels of the data, if these have any."""
    if labels is not None:
        own_head = described.folder is not None and described.own_head
        fit_labels(described.config, described.auto, labels, overrides, own_head=own_head)
    return described


def described_by_type(
    model_type: str, *, auto: str | None = None, **overrides: Any
) -> DescribedModel:
    """Return what a model type of the library says of its model."""
    config = _config(model_type, {}, overrides)
    return DescribedModel(config, auto_of(config, auto or CAUSAL_LM))


def check_adapters(
    described: DescribedModel, lora: "LoraConfig | None", adapter: str | None
) -> None:
    """Check that adapters fit a model, on meta: nothing gets values.

    Raises UsageError: peft is missing, or they do not fit.
    """
    if lora is None and adapter is None:
        return
    with _errors_of(described.config.model_type), torch.device("meta"):
        model: Any = getattr(transformers, described.auto).from_config(described.config)
        _adapt(model, described, lora, adapter)


def _adapt(
    model: nn.Module,
    described: DescribedModel,
    lora: "LoraConfig | None",
    adapter: str | None,
    drawn: Sequence[str] = (),
) -> set[str]:
    """Put the adapters that are asked for into a model; return the names that a folder fills.

    `drawn`: names of parameters that no weights fill.
    """
    if adapter is not None:
        from lockstep.models.saved_adapters import load_adapters

        return load_adapters(model, adapter, described.auto)
    if lora is not None:
        from lockstep.models.adapters import add_adapters

        add_adapters(model, lora, described.auto, drawn)
    return set()


def _built(
    described: DescribedModel, lora: "LoraConfig | None", adapter: str | None = None
) -> nn.Module:
    """Return the model, which meets the protocol if it can, with adapters if any are asked for."""
    adapted = lora is not None or adapter is not None
    in_pieces = not adapted and described.can_be_read_in_pieces and _is_asked_for_meta()
    if described.can_be_drawn or in_pieces:
        _require_equal_chain(described.config)
    drawn: list[str] = []
    if described.folder is None:
        model = _drawn(described, at_once=adapted)
    elif in_pieces:
        model = _without_values(described.folder, described)
    else:
        model, drawn = _loaded(described.folder, described)
    built: nn.Module = meet_protocol(model) if described.is_causal else model
    with torch.device("cpu"):  # beside the layers' own weights, which have values
        filled = _adapt(built, described, lora, adapter, drawn)
    not_filled = [name for name in drawn if name not in filled]
    _tell_of_drawn(built, not_filled, described, adapter)
    return built


def _tell_of_drawn(
    model: nn.Module, drawn: Sequence[str], described: DescribedModel, adapter: str | None
) -> None:
    """Warn of a head that no weights fill.

    Raises UsageError: it would stay as it was drawn, because adapters freeze it.
    """
    if not drawn:
        return
    heads = sorted({name.rpartition(".")[0] for name in drawn})
    trained = {
        name.replace(".modules_to_save.default", "")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if frozen := [name for name in drawn if name not in trained]:
        key = "model.lora.modules_to_save"
        fix = f"write modules_to_save: [{', '.join(heads)}]"
        if adapter is not None:
            key = "model.adapter"
            fix = f"name an adapter that was trained with modules_to_save: [{', '.join(heads)}]"
        why = f"the weights in {described.folder} have no such head, and {key} freezes all else"
        raise UsageError(
            f"{listed(frozen)} would stay as drawn at random", where=key, why=why, fix=fix
        )
    if is_main_process():
        warn_at_caller(
            f"the weights in {described.folder} have no {listed(heads)}: drawn at random, and"
            " trained from there"
        )


def _quantized(path: str, quantization: Mapping[str, Any]) -> UsageError:
    """Return the refusal of weights that are kept in a few bits."""
    method = quantization.get("quant_method", "a quantization")
    in_4_bits = " in 4 bits" if quantization.get("load_in_4bit") else ""
    return UsageError(
        f"the weights in {path} are quantized{in_4_bits} ({method})",
        where="model.name",
        why="parameters are float32 here: shards, digests and merged adapters are made of them",
        fix=(
            "name the folder of the weights before they were quantized, or write them anew:"
            f' AutoModelForCausalLM.from_pretrained("{path}").dequantize()'
            '.save_pretrained("FOLDER")'
        ),
    )


# The token with which a decoder that has an encoder begins.
_START = "decoder_start_token_id"


def _config(model_type: str, described: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Return a new config, so that derived values (the width of a head …) follow the overrides."""
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=1)
        what = (
            f"{model_type!r} is neither a folder, nor a config file, nor a model type of"
            " transformers"
        )
        what += f"; did you mean hf:{near[0]}?" if near else ""
        fix = "write hf:llama, hf:gpt2 …, the path of a folder, or hf:OWNER/NAME of the hub"
        raise UsageError(what, where="model.name", fix=fix)
    kind: Any = transformers.CONFIG_MAPPING[model_type]
    renamed: dict[str, str] = getattr(kind, "attribute_map", {})
    more = {"num_labels"}
    if getattr(kind(), "is_encoder_decoder", False):
        more.add(_START)  # the library reads it, and not each of its configs has it
    accepted = sorted(k for k in {*kind().to_dict(), *renamed, *more} if k[0] != "_")
    for key in overrides:
        if key not in accepted:
            what = f"the config of a {model_type} has no {key!r}{did_you_mean(key, accepted)}"
            raise UsageError(what, where=f"model.args.{key}", fix=f"it has {', '.join(accepted)}")
    with _errors_of(model_type):
        config = _AutoConfig.for_model(
            model_type,
            **{renamed.get(k, k): v for part in (described, overrides) for k, v in part.items()},
        )
    if _START in more and getattr(config, _START, None) is None:
        config.decoder_start_token_id = config.pad_token_id  # as T5 was trained
    return config


def _drawn(described: DescribedModel, *, at_once: bool = False) -> Any:
    """Return a model with random values.

    It is on the active device if it can be filled there later, and may be, else on the CPU.
    """
    can_wait = described.can_be_drawn and not at_once
    device = torch.get_default_device() if can_wait else torch.device("cpu")
    with _errors_of(described.config.model_type), device:
        model: Any = getattr(transformers, described.auto).from_config(
            described.config, **_attention(described)
        )
        return model.float()


def _require_equal_chain(config: Any) -> None:
    """Refuse a version of the library that computes something else than a family's chain.

    A tiny model of the same config is compared: the model itself may have no values yet.
    """
    tiny = copy.deepcopy(config)
    tiny.vocab_size = 32
    tiny.pad_token_id = None
    if config.model_type == "gpt2":
        tiny.n_embd = 4 * config.n_head
        tiny.n_inner = config.n_inner and 16
        tiny.n_layer = 2
    else:
        tiny.hidden_size = 16
        tiny.head_dim = 8
        tiny.intermediate_size = 16
        tiny.num_hidden_layers = 2
    try:
        expected, logits = _both_ways(tiny)
        differ = not torch.allclose(
            logits, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )
    except Exception:
        # sizes that do not fit together when they are tiny, tensors without values: nothing to
        # compare
        return
    if differ:
        what = (
            f"transformers {transformers.__version__} computes something else for a"
            f" {config.model_type} of this config than its chain of segments"
        )
        fix = "install another version, or hand transformers' own object to lockstep.Trainer"
        raise UsageError(what, where="model.name", why="another model would be trained", fix=fix)


def _both_ways(config: Any) -> tuple[Tensor, Tensor]:
    """Return the logits of a model as the library computes them, and as its chain does."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        causal = DescribedModel(config, CAUSAL_LM)
        model = _drawn(causal).eval()
        ids = torch.randint(0, config.vocab_size, (2, min(8, config.max_position_embeddings)))
        inputs = ((), {"input_ids": ids})
        outputs: Any = ids
        for _, segment in decoder_segments(model) or ():
            outputs = run_segment(segment, (outputs,), {}, inputs)
        return model(input_ids=ids, use_cache=False).logits, outputs.logits


def _is_asked_for_meta() -> bool:
    """Return whether the caller places the model, and wants no values before that."""
    return torch.get_default_device().type == "meta"


def _without_values(folder: Path, described: DescribedModel) -> Any:
    """Return the model of a folder on meta, which knows where in the files its weights lie.

    Raises UsageError: the weights leave out anything.
    """
    with _errors_of(described.config.model_type), torch.device("meta"):
        model: Any = getattr(transformers, described.auto).from_config(
            described.config, **_attention(described)
        )
    with _errors_of(described.config.model_type):
        model = model.float().train()
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        stored, missing = stored_weights(model, folder)
    if missing:
        raise _not_filled(folder, missing)
    model.name_or_path = str(folder)
    model.stored_weights = stored
    return model


def with_values(model: Any) -> nn.Module:
    """Return another model like one on meta that knows where its weights lie, with its values."""
    folder = Path(model.name_or_path)
    described = DescribedModel(copy.deepcopy(model.config), CAUSAL_LM, folder)
    loaded, _ = _loaded(folder, described)
    return meet_protocol(loaded)


def _not_filled(folder: Path, missing: Sequence[str]) -> UsageError:
    what = (
        f"the weights in {folder} do not fill {len(missing)} of the model's parameters, the first"
        f" {missing[0]}"
    )
    return UsageError(what, where="model.name", why="they would be drawn at random")


def _loaded(folder: Path, described: DescribedModel) -> tuple[Any, list[str]]:
    """Return the model of a folder, in float32 on the CPU, and what was drawn at random.

    Where another class is asked for than the one whose weights these are, that is its head.

    Raises UsageError: the weights leave out anything else.
    """
    with _errors_of(described.config.model_type), _quiet(), torch.device("cpu"):
        model, loading_info = getattr(transformers, described.auto).from_pretrained(
            folder,
            config=described.config,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            dtype=torch.float32,  # not the config's: files may hold more digits than it says
            **_attention(described),
        )
    missing = [
        str(key)
        for kind in ("missing_keys", "mismatched_keys")
        for key in sorted(loading_info[kind])
    ]
    new: list[str] = []
    if not described.own_head and missing:
        new = _not_in_own_class(model, missing, described)
        missing = [name for name in missing if name not in new]
    if missing:
        raise _not_filled(folder, missing)
    return model.float().train(), new


def _not_in_own_class(model: Any, names: Sequence[str], described: DescribedModel) -> list[str]:
    """Return those of a model's names that the class whose weights a folder has lacks, too.

    Names within the body count without its name, which differs between some classes.
    """
    named = next(iter(getattr(described.config, "architectures", None) or ()), "")
    kind = getattr(transformers, named, None) or model_class(CAUSAL_LM, described.config)
    with torch.device("meta"):
        own = kind(copy.deepcopy(described.config))
    held = {name.removeprefix(f"{own.base_model_prefix}.") for name in own.state_dict()}
    body = f"{model.base_model_prefix}."
    return [name for name in names if name.removeprefix(body) not in held]


def _attention(described: DescribedModel) -> dict[str, str]:
    # The library would choose by what is installed, and runs would have other bits.
    return {"attn_implementation": "sdpa"} if described.can_be_drawn else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and the report of keys: every rank would print its own."""
    logging: Any = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()


@contextmanager
def _errors_of(model_type: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # configs and constructors of the library raise arbitrary errors
        what = f"transformers can't build a {model_type} from this config"
        raise UsageError(what, where="model.args", why=_in_short(error)) from error


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
