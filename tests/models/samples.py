"""Small models of every family, and batches for them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lockstep.models import get_model

VOCABULARY = 24
SMALL = {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": VOCABULARY, "block_size": 8}


def bdh(**args: object) -> nn.Module:
    return get_model("bdh")(**{**SMALL, "mlp_multiplier": 4, "dropout": 0.0, **args})


def transformer(**args: object) -> nn.Module:
    return get_model("transformer")(**{**SMALL, "n_kv_head": 1, "mlp_hidden": 24, **args})


def tied_transformer(**args: object) -> nn.Module:
    return transformer(tie_embeddings=True, **args)


def free_transformer(**args: object) -> nn.Module:
    return get_model("free_transformer")(
        **{**SMALL, "latent_bits": 5, "mlp_hidden": 24, "kappa": 0.0, **args}
    )


def mixture(**args: object) -> nn.Module:
    return get_model("mixture")(
        **{**SMALL, "n_expert": 4, "expert_hidden": 8, "n_shared": 1, **args}
    )


def vae(**args: object) -> nn.Module:
    return get_model("vae")(**{"image_size": 16, "channels": 1, "latent_dim": 4, **args})


LANGUAGE: dict[str, Callable[..., nn.Module]] = {
    "bdh": bdh,
    "transformer": transformer,
    "tied_transformer": tied_transformer,
    "free_transformer": free_transformer,
    "mixture": mixture,
}
ALL: dict[str, Callable[..., nn.Module]] = {**LANGUAGE, "vae": vae}


def texts(batch: int = 3, length: int = 8, *, seed: int = 0) -> dict[str, Tensor]:
    """A batch for a language model, with two targets that are not counted."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :2] = -100
    return {"input_ids": ids[:, :-1], "targets": targets}


def images(batch: int = 3, size: int = 16, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.rand(batch, 1, size, size, generator=generator),
        "label": torch.zeros(batch).long(),
    }


def batch_for(family: str) -> dict[str, Tensor]:
    return images() if family == "vae" else texts()
