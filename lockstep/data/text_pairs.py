"""Turns pairs of whole texts, in which somebody has put prompt and answer together, into tokens.

The prompt is what both begin with, token by token, as TRL's `extract_prompt` finds it; what follows
in each is its answer, and so is the tokenizer's `eos_token`, which ends it. With a token a word:

    chosen      Human: 2 + 2? Assistant: 4 </s>
    rejected    Human: 2 + 2? Assistant: I don't know </s>
    trained                              4 </s>, and I don't know </s>

No chat template is used, and nothing is put around the texts.

Tests: tests/data/test_text_pairs.py
"""

import os
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lockstep.data.conversations import Trained, library_tokenizer
from lockstep.data.language import DocumentEncoder, Tokenizer
from lockstep.errors import UsageError

WHOLE_TEXTS = (
    "pairs are whole texts, without a prompt of their own: what both begin with is the prompt, and"
    " no chat template is used"
)


class TextPairs:
    """Encodes pairs of texts.

    Args:
        documents: by which a text becomes tokens.
    """

    def __init__(self, documents: DocumentEncoder) -> None:
        self._documents = documents

    def encode(self, chosen: str, rejected: str, where: str) -> list[Trained]:
        """Return the tokens of both texts, and which of them are trained, or raise a UsageError."""
        better, worse = (self._ended(text, where) for text in (chosen, rejected))
        length = min(len(better), len(worse))
        differ = np.flatnonzero(better[:length] != worse[:length])
        begin = int(differ[0]) if len(differ) else length
        if not begin:
            what = f"the two texts of {where} have no token in common at their begin"
            why = "what both begin with is the prompt, and nothing says what an answer is one to"
            fix = "name the field of the prompt: prompt_field: NAME, or leave the row out"
            raise UsageError(what, where=where, why=why, fix=fix)
        if begin > 1 and self._documents.tokenizer.decode([int(better[begin - 1])]) == " ":
            begin -= 1  # the space before a word belongs to it, as in most vocabularies
        self._documents.notes[WHOLE_TEXTS] += 1
        return [Trained(tokens, np.arange(len(tokens)) >= begin) for tokens in (better, worse)]

    def _ended(self, text: str, where: str) -> NDArray[np.int64]:
        """Return the tokens of a text and of its end."""
        tokens = self._documents.encode(text, f"a text of {where}").astype(np.int64)
        has_end = len(tokens) > 0 and tokens[-1] == self._stop
        return tokens if has_end else np.append(tokens, self._stop)

    @cached_property
    def _stop(self) -> int:
        return _stop_of(self._documents.tokenizer)


def _stop_of(tokenizer: Tokenizer) -> int:
    """Return the number of the token that ends a text, or raise a UsageError."""
    stop = None
    if os.path.isdir(tokenizer.name):
        text = library_tokenizer(tokenizer).eos_token
        stop = None if text is None else tokenizer.number_of(str(text))
    if stop is None:
        what = f"nothing ends the answers of pairs: the tokenizer {tokenizer.name} has no eos_token"
        fix = "name the folder of a model, tokenizer: FOLDER, whose tokenizer_config.json names one"
        raise UsageError(what, where="data.args.tokenizer", fix=fix)
    return stop
