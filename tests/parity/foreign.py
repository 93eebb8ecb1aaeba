"""Models as others write them, each in the shape of its family: none offers anything to Lockstep
but its loss.

Nothing draws random numbers, so that the reference is the author's own loop: the loss of the whole
batch, in plain PyTorch. Targets are masked unevenly wherever a family masks them.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.decoders import NOT_PLANNED

VOCAB = 64
LENGTH = 12
SAMPLES = 8
WIDTH = 16
HEADS = 4

Sample = dict[str, Tensor]

WITHOUT_PLANS = {"tensor": "tensor_plan()", "context": "context_plan()"}
"""What the messages name where a model does not say how its layers and sequences are cut."""

WITHOUT_CONTEXT = {"context": "hf:"}
"""A model of the library, whose layers are cut as they are."""

PLANNED_SINCE_5 = {"tensor": "install transformers"} if NOT_PLANNED else {}
SINCE_5 = WITHOUT_CONTEXT | PLANNED_SINCE_5
"""One whose layers are cut as they are, if the library's plan names them whole."""


class Foreign(NamedTuple):
    """A model of somebody's.

    Attributes:
        title: what docs/parity.md calls it.
        make: the model, always with the same values.
        sample: number → a sample, by the names of the arguments of forward.
        loss: of a whole batch, in the author's own loop; None where it depends on which samples are
            together.
        loss_fn: what is handed to the trainer beside the model.
        piped: the model → what a pipeline is given; None where a pipeline refuses it, and names
            segments().
        refused: what the message names where every topology refuses the model, for a step has
            several micro-batches.
        refused_by: strategy → what its message names, where not all refuse the model.
        reference: the model of the author's own loop, with the same values, where it is not what
            `make` makes.
        settings: what its author has to say in the config.
    """

    title: str
    make: Callable[[], nn.Module]
    sample: Callable[[int], Sample]
    loss: Callable[[nn.Module, Sample], Tensor] | None = lambda model, batch: model(**batch).loss
    loss_fn: Callable[..., Tensor] | None = None
    piped: Callable[[nn.Module], nn.Module] | None = None
    refused: str = ""
    refused_by: Mapping[str, str] = WITHOUT_PLANS
    reference: Callable[[], nn.Module] | None = None
    settings: Mapping[str, Any] = MappingProxyType({})

    def refusal(self, topology: str) -> str:
        """What the message under a topology must name; empty where the model trains."""
        strategy = topology.partition(":")[0]
        if strategy == "pipeline" and self.piped is None:
            return "segments()"
        return self.refused_by.get(strategy, "") or self.refused


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(11)
        return make()

    return made


def drawn(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


# ---- samples ----


def ids(index: int, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCAB, (length,), generator=drawn(index))


def masked(labels: Tensor, index: int, ignored: int = -100) -> Tensor:
    """The first 0 to 6 do not count."""
    labels = labels.clone()
    labels[: index % 7] = ignored
    return labels


def text(index: int) -> Sample:
    return {"input_ids": ids(index), "labels": masked(ids(index), index)}


def padded_text(index: int) -> Sample:
    mask = torch.ones(LENGTH, dtype=torch.int64)
    mask[LENGTH - index % 5 :] = 0
    return {
        "input_ids": ids(index),
        "attention_mask": mask,
        "labels": ids(index).masked_fill(mask == 0, -100),
    }


def pair(index: int, ignored: int = -1) -> Sample:
    """As nanoGPT's loop has them: targets are shifted."""
    both = ids(index, LENGTH + 1)
    return {"idx": both[:-1], "targets": masked(both[1:], index, ignored)}


def image(index: int) -> Tensor:
    return torch.rand(3, 16, 16, generator=drawn(index))


# ---- models written anew ----


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Tied weights, learned positions; returns (logits, loss), and without targets the last
    position alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList(NanoBlock() for _ in range(3)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        places = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](places)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
        )


class NanochatBlock(nn.Module):
    """Rotary positions, normalised queries and keys, one key head for two query heads, squared
    ReLU, no biases.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * 4, bias=False) for n in (HEADS, 2, 2))
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        h = F.rms_norm(x, (WIDTH,))
        q, k, v = (
            each(h).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        q, k = (F.rms_norm(self.turned(each, *turn), (4,)) for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (WIDTH,)))).square())

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos + other * sin, other * cos - one * sin], -1)


class Nanochat(nn.Module):
    """Returns the loss where it gets targets, capped logits where not."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(NanochatBlock() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        angle = torch.outer(torch.arange(64).float(), 1.0 / 1000 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        length = idx.size(1)
        x = F.rms_norm(self.wte(idx), (WIDTH,))
        for block in self.blocks:
            x = block(x, (self.cos[:length], self.sin[:length]))
        logits = 15 * torch.tanh(self.lm_head(F.rms_norm(x, (WIDTH,))).float() / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class DragonHatchling(nn.Module):
    """BDH as its authors publish it: one set of weights for all layers, no blocks at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.ln = nn.LayerNorm(WIDTH, elementwise_affine=False, bias=False)
        self.encoder, self.encoder_v = (
            nn.Parameter(torch.randn(HEADS, WIDTH, 8) * 0.2) for _ in range(2)
        )
        self.decoder = nn.Parameter(torch.randn(HEADS * 8, WIDTH) * 0.2)
        self.lm_head = nn.Parameter(torch.randn(WIDTH, VOCAB) * 0.2)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        batch, length = idx.size()
        x = self.ln(self.embed(idx).unsqueeze(1))
        for _ in range(2):
            sparse = F.relu(x @ self.encoder)
            scores = (sparse @ sparse.mT).tril(diagonal=-1)
            gated = sparse * F.relu(self.ln(scores @ x) @ self.encoder_v)
            x = self.ln(
                x + self.ln(gated.transpose(1, 2).reshape(batch, 1, length, -1) @ self.decoder)
            )
        logits = x.view(batch, length, WIDTH) @ self.lm_head
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1), ignore_index=-1)


class Residual(nn.Module):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, -1)
        )
        return self.to_out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class XTransformer(nn.Module):
    """In the style of x-transformers: each layer a list of its parts, which the model
    itself calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token_emb = nn.Embedding(VOCAB, WIDTH)
        self.pos_emb = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        feed_forward = [
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        ]
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), layer, Residual()])
            for pair in zip([Attention(), Attention()], feed_forward, strict=True)
            for layer in pair
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.to_logits = nn.Linear(WIDTH, VOCAB)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.token_emb(idx) + self.pos_emb[: idx.size(1)]
        for norm, layer, residual in self.layers:
            x = residual(layer(norm(x)), x)
        return self.to_logits(self.norm(x))


class GCN(nn.Module):
    """Kipf and Welling's, on many small graphs: classes of nodes, of which a mask says which are
    for training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, WIDTH, bias=False)
        self.other = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Sample:
        degree = edges.sum(-1).rsqrt()
        step = degree[..., None] * edges * degree[..., None, :]
        logits = step @ self.other(torch.relu(step @ self.one(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


def graph(index: int) -> Sample:
    edges = (torch.rand(10, 10, generator=drawn(index)) < 0.3).float()
    return {
        "x": torch.randn(10, 6, generator=drawn(index)),
        "edges": ((edges + edges.T + torch.eye(10)) > 0).float(),
        "y": masked(torch.randint(0, 4, (10,), generator=drawn(index)), index),
    }


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(idx))[0][:, -1])


class VAE(nn.Module):
    """Gets its noise with the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 2 * 4)
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 64))

    def forward(self, x: Tensor, noise: Tensor) -> Sample:
        mean, log_variance = self.encode(x).chunk(2, -1)
        made = self.decode(mean + noise * torch.exp(0.5 * log_variance))
        error = F.binary_cross_entropy_with_logits(made, x, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return {"loss": (error + divergence) / len(x), "made": made}


class LoRA(nn.Module):
    """A frozen linear and its low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(rank))
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.lora_a), self.lora_b)


# ---- models of the library ----


def library(auto_class: str, model_type: str, **config: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        values: Any = transformers.AutoConfig.for_model(model_type, **config)
        made: nn.Module = getattr(transformers, auto_class).from_config(values).train()
        return made

    return seeded(make)


SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": 16,
    "patch_size": 8,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def by_name(model_type: str, **config: Any) -> Callable[[], nn.Module]:
    """As `model.name: hf:TYPE` builds it."""

    def make() -> nn.Module:
        from lockstep.models import get_model

        return get_model(f"hf:{model_type}")(**config)

    return seeded(make)


def lora() -> nn.Module:
    model = library("AutoModelForCausalLM", "llama", **SIZES)().requires_grad_(False)
    for layer in model.get_submodule("model.layers").children():
        attention: Any = layer.get_submodule("self_attn")
        attention.q_proj = LoRA(attention.q_proj)
        attention.v_proj = LoRA(attention.v_proj)
    return model


def whisper() -> Callable[[], nn.Module]:
    return library(
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        vocab_size=VOCAB,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def clip() -> Callable[[], nn.Module]:
    texts = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    return library("AutoModel", "clip", text_config=texts, vision_config=_VISION, projection_dim=8)


class Contrastive(nn.Module):
    """CLIP: each sample of a micro-batch against all others of it."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = clip()()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Any:
        return self.clip(
            input_ids=input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            return_loss=True,
        )

    def count(self, batch: Sample) -> int:
        return len(batch["input_ids"])


def captioned(index: int) -> Sample:
    return {
        **{k: v for k, v in padded_text(index).items() if k != "labels"},
        "pixel_values": image(index),
    }


def clip_of_the_library() -> nn.Module:
    """Asked for its own loss, as the library's trainer asks."""
    model = clip()()
    model.forward = partial(model.forward, return_loss=True)
    return model


class Judge(nn.Module):
    """Half of a GAN: its loss on images and on what the other half makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
        self.making: list[nn.Module] = []

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        with torch.no_grad():
            made = self.making[0](noise)
        return against(1.0, self.layers(x)) + against(0.0, self.layers(made))


class Maker(nn.Module):
    """The other half: its loss is what the judge takes its images for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64), nn.Sigmoid()
        )
        self.scoring: list[nn.Module] = []

    def forward(self, noise: Tensor) -> Tensor:
        fixed = {name: parameter.detach() for name, parameter in self.scoring[0].named_parameters()}
        return against(1.0, torch.func.functional_call(self.scoring[0], fixed, self.layers(noise)))


def against(target: float, scores: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def gan() -> tuple[Judge, Maker]:
    torch.manual_seed(11)
    judge = Judge()
    maker = Maker()
    judge.making.append(maker.layers)
    maker.scoring.append(judge.layers)
    return judge, maker


def noisy(index: int) -> Sample:
    return {
        "x": torch.rand(64, generator=drawn(index)),
        "noise": torch.randn(4, generator=drawn(index + 100)),
    }


def traced_pair(model: nn.Module) -> nn.Module:
    from lockstep.models.traced import trace

    example = torch.utils.data.default_collate([pair(0), pair(1)])
    return trace(model, example["idx"], example["targets"])


def traced_ids(model: nn.Module) -> nn.Module:
    from lockstep.models.traced import trace

    return trace(model, torch.stack([ids(0), ids(1)]))


def as_it_is(model: nn.Module) -> nn.Module:
    return model


def _cross_entropy_of(key: str) -> Callable[[nn.Module, Sample], Tensor]:
    return lambda model, batch: F.cross_entropy(
        model(batch["idx"]).flatten(0, -2), batch[key].flatten()
    )


def _classes(index: int) -> Sample:
    return {"idx": ids(index), "label": torch.tensor(index % 5)}


def _shifted(index: int) -> Sample:
    return pair(index, ignored=-100)


def shifted_by_name(index: int) -> Sample:
    inputs, targets = _shifted(index).values()
    return {"input_ids": inputs, "targets": targets}


def named(
    title: str, model_type: str, refused_by: Mapping[str, str] = WITHOUT_PLANS, **config: Any
) -> Foreign:
    """A model of the library that Lockstep builds, against the library's own."""
    return Foreign(
        title,
        by_name(model_type, **config),
        shifted_by_name,
        lambda m, b: F.cross_entropy(
            m(b["input_ids"]).logits.flatten(0, 1), b["targets"].flatten()
        ),
        piped=as_it_is,
        refused_by=refused_by,
        reference=library("AutoModelForCausalLM", model_type, **config),
    )


MODELS: dict[str, Foreign] = {
    "nanogpt": Foreign("nanoGPT", seeded(NanoGPT), pair, lambda m, b: m(**b)[1], piped=traced_pair),
    "nanochat": Foreign("nanochat", seeded(Nanochat), pair, lambda m, b: m(**b), piped=traced_pair),
    "bdh": Foreign(
        "BDH as its authors publish it", seeded(DragonHatchling), pair, lambda m, b: m(**b)[1]
    ),
    "x_transformers": Foreign(
        "in the style of x-transformers",
        seeded(XTransformer),
        _shifted,
        _cross_entropy_of("targets"),
        nn.CrossEntropyLoss(),
        piped=traced_ids,
    ),
    "t5": Foreign(
        "T5",
        library(
            "AutoModelForSeq2SeqLM",
            "t5",
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=HEADS,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        padded_text,
    ),
    "bert": Foreign(
        "BERT, masked language",
        library("AutoModelForMaskedLM", "bert", **SIZES, **_NO_DROPOUT),
        padded_text,
    ),
    "vit": Foreign(
        "ViT",
        library("AutoModelForImageClassification", "vit", **_VISION, **_NO_DROPOUT, num_labels=5),
        lambda i: {"pixel_values": image(i), "labels": torch.tensor(i % 5)},
    ),
    "clip": Foreign("CLIP, its count declared", seeded(Contrastive), captioned, loss=None),
    "clip_of_the_library": Foreign(
        "CLIP as the library's own",
        clip_of_the_library,
        captioned,
        refused="batch_size is part of what is learned",
    ),
    "bert_pretraining": Foreign(
        "BERT, two losses",
        library("AutoModelForPreTraining", "bert", **SIZES, **_NO_DROPOUT),
        lambda i: {**padded_text(i), "next_sentence_label": torch.tensor(i % 2)},
        refused="def count(self, batch)",
    ),
    "whisper": Foreign(
        "Whisper",
        whisper(),
        lambda i: {
            "input_features": torch.randn(8, 32, generator=drawn(i)),
            "labels": text(i)["labels"],
        },
    ),
    "mixtral": Foreign(
        "Mixtral",
        library(
            "AutoModelForCausalLM", "mixtral", **SIZES, num_local_experts=4, num_experts_per_tok=2
        ),
        padded_text,
        piped=as_it_is,
        refused_by=SINCE_5,
    ),
    "mamba": Foreign(
        "Mamba",
        library(
            "AutoModelForCausalLM",
            "mamba",
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            state_size=4,
            use_mambapy=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        text,
        refused_by={**WITHOUT_PLANS, **WITHOUT_CONTEXT},
    ),
    "qwen3": Foreign(
        "Qwen 3, tied",
        library("AutoModelForCausalLM", "qwen3", **SIZES, head_dim=8, tie_word_embeddings=True),
        padded_text,
        piped=as_it_is,
        refused_by=SINCE_5,
    ),
    "lora": Foreign(
        "Llama with low-rank updates, written by hand",
        seeded(lora),
        text,
        piped=as_it_is,
        refused_by={**WITHOUT_CONTEXT, "tensor": "a forward pass of its own"},
    ),
    "llama_by_name": named("Llama (`hf:`)", "llama", {}, **SIZES),
    "qwen3_by_name": named("Qwen 3 (`hf:`)", "qwen3", PLANNED_SINCE_5, **SIZES, head_dim=8),
    "gcn": Foreign("GCN on small graphs", seeded(GCN), graph, lambda m, b: m(**b)["loss"]),
    "lstm": Foreign(
        "LSTM",
        seeded(LSTM),
        _classes,
        lambda m, b: F.cross_entropy(m(b["idx"]), b["label"]),
        nn.CrossEntropyLoss(),
    ),
    "vae": Foreign("VAE", seeded(VAE), noisy, lambda m, b: m(**b)["loss"]),
}
