"""`python-docs`: the language reference that ships inside every CPython (`pydoc_data.topics`), about 0.5 MB of text.

It needs no download and no file. It differs a little from one Python version to the next: `source` names the version.
"""

import platform

from lockstep.data.dataset import Data
from lockstep.data.language import Cut, document_data, text_data
from lockstep.data.tokenizers import Tokenizer
from lockstep.errors import UsageError


def topics() -> list[str]:
    """The texts, sorted by their topic's name.

    Raises:
        UsageError: this Python was built without them.
    """
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        raise UsageError(
            "this Python comes without its documentation (the module pydoc_data)",
            where="data.name: python-docs",
            fix="use another data set (text, with a path of your own), or a Python with its whole library",
        ) from None
    return [texts[name] for name in sorted(texts)]


def source_line() -> str:
    """The source in words."""
    return f"the topics of Python {platform.python_version()}'s own documentation"


def python_docs(
    *,
    block_size: int = 256,
    stride: int | None = None,
    validation_fraction: float = 0.1,
    tokenizer: str = "bytes",
    documents: bool = False,
) -> Data:
    """The data set. With `documents`, a topic is a document, padded to `block_size`."""
    cut = Cut(block_size, stride, validation_fraction)
    chosen = Tokenizer(tokenizer)
    source = source_line()
    if documents:
        return document_data(*cut.parts([chosen.encode_array(text) for text in topics()]), cut, source, chosen)
    tokens = chosen.encode_array("\n\n".join(topics()))
    return text_data(*cut.parts(tokens), cut, source, chosen, chosen.vocab_size)
