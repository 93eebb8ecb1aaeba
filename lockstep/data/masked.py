"""The data set `masked`: windows of texts of which some tokens are hidden, for masked models.

    model: {name: "hf:base", auto: AutoModelForMaskedLM}
    data:
      name: masked
      args: {path: texts, tokenizer: base, block_size: 128}

Of each window's tokens `mask_fraction` are chosen at random, and are what the model has to tell; of
these 80 % become the mask token, 10 % any token, and 10 % stay as they are (Devlin et al. 2018,
arXiv:1810.04805, section 3.1). Each epoch chooses others, which follow from (seed, epoch, sample):
torch's generator is seeded before each sample is read.

A sample is `{"input_ids", "labels"}`, both int64 [block_size]; labels are −100 where nothing was
chosen.

Tests: tests/data/test_masked.py, tests/parity/test_kinds_of_data.py
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.batches import Data
from lockstep.data.language import IGNORED, TextOptions, Tokenizer, TokenWindows
from lockstep.data.sources import DescribedSource, opened
from lockstep.data.special_names import number_named
from lockstep.data.token_folder import part_of
from lockstep.errors import UsageError

_MASKED = 0.8  # of the tokens that are chosen become the mask token
_STAY = 0.9  # from here on they stay; between the two they become any token
_USUAL = ("[MASK]", "<mask>")


class MaskedWindows(Dataset[dict[str, Tensor]]):
    """Windows of tokens, some of which are hidden anew each time that a window is read.

    Args:
        windows: of all tokens.
        mask: the token that hides another one.
        vocab_size: the number of tokens that may stand in another one's place.
        fraction: of the tokens that is chosen.
    """

    def __init__(self, windows: TokenWindows, mask: int, vocab_size: int, fraction: float) -> None:
        self._windows = windows
        self._mask = mask
        self._vocab_size = vocab_size
        self._fraction = fraction

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._windows[index]["input_ids"]
        size = len(ids)
        chosen = torch.rand(size) < self._fraction
        chosen[torch.randint(size, ())] = True  # at least one: a window without has no loss
        fate = torch.rand(size)
        others = torch.randint(self._vocab_size, (size,))
        hidden = torch.where(fate < _MASKED, self._mask, torch.where(fate < _STAY, others, ids))
        return {
            "input_ids": torch.where(chosen, hidden, ids),
            "labels": torch.where(chosen, ids, IGNORED),
        }


def masked(
    *,
    path: str,
    tokenizer: str,
    text_field: str | None = None,
    block_size: int = 256,
    stride: int | None = None,
    mask_fraction: float = 0.15,
    mask_token: str | None = None,
    validation_fraction: float = 0.1,
) -> Data:
    """Return windows of texts with hidden tokens, or raise a UsageError.

    `path` is a file or a folder of texts or rows (`text_field`: `text`), or a folder that `lockstep
    data prepare` made. The end of the text, `validation_fraction` of it, is validation data.
    `mask_token` hides a token; unset: the tokenizer's.
    """
    options = TextOptions(block_size, stride, validation_fraction)
    is_number = isinstance(mask_fraction, int | float) and not isinstance(mask_fraction, bool)
    if not is_number or not 0 < mask_fraction < 1:
        what = f"mask_fraction should be above 0 and below 1, but is {mask_fraction!r}"
        fix = "0.15 hides about one token in seven"
        raise UsageError(what, where="data.args.mask_fraction", fix=fix)
    chosen = Tokenizer(tokenizer)
    mask = number_named(chosen, "mask_token", mask_token, _USUAL)
    settings: dict[str, Any] = {} if text_field is None else {"text_field": text_field}
    source = opened(DescribedSource("data.args", path, settings), tokenizer)
    if source.trained is not None:
        what = f"{path} holds conversations, and the data set masked hides any token"
        raise UsageError(what, where="data.args.path", fix="name texts, or prepare them as texts")
    border = options.border(len(source.tokens))

    def windows(begin: int, end: int, role: str) -> MaskedWindows | None:
        part = part_of(source.tokens, begin, end)
        if not len(part):
            return None
        where = f"the {role} part of {path}"
        cut = TokenWindows(part, options.block_size, options.stride, where=where)
        return MaskedWindows(cut, mask, chosen.vocab_size, mask_fraction)

    facts = {"vocab_size": chosen.vocab_size, "block_size": block_size, "source": path}
    train = windows(0, border, "training")
    held_out = windows(border, len(source.tokens), "validation")
    return Data(train, held_out, facts, notices=source.notices)
