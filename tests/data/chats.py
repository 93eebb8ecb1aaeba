"""A tokenizer of bytes in Hugging Face's layout, and chat templates with the properties of those
that are in use.
"""

import json
from pathlib import Path
from typing import Any

# Each message between two marks; the prompt for an answer is the begin of an answer.
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# All of it is marked as generated, as where somebody marked the loop and not the answers.
MARKED = "{% generation %}" + PLAIN + "{% endgeneration %}"
# What was thought is left out of all answers but the last.
FORGETS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The prompt for an answer ends in a word that answers do not have.
THINKS = PLAIN.replace("<|assistant|>{%", "<|assistant|><think>\n{%")
# Nothing ends an answer but a line break.
ENDLESS = PLAIN.replace("<|end|>", "")
# The number of messages comes first, and so the answer changes what stands before it.
COUNTS = "{{ messages | length }} messages\n" + PLAIN
# What a message says is a list of parts, as for models that see images; a text is not rendered.
PARTS = PLAIN.replace(
    "{{ m.content }}",
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
)
FIRST_PART = PLAIN.replace("{{ m.content }}", "{{ m.content[0].text }}")
# The same, or a text.
EITHER = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
)
# Roles that do not alternate are refused, as many templates do.
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
STRICT += PLAIN

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "</s>"]
QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "it is 4"}
SECOND = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
BOTH = [QUESTION, ANSWER, *SECOND]


def write_tokenizer(folder: Path, template: str | None = PLAIN, eos: str | None = "</s>") -> Path:
    """Write a tokenizer of 256 bytes and `SPECIAL`, as `save_pretrained` does."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: number for number, letter in enumerate(letters)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if eos is not None:
        described["eos_token"] = eos
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_rows(file: Path, *conversations: Any) -> Path:
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    return file
