"""A tokenizer as LLaDA's is built, small: byte-level, with the same special tokens and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    "<|startoftext|>", "<|endoftext|>", "[CLS]", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|mdm_mask|>",
)  # fmt: skip
FIRST = 256  # id of the first of them
BOS, EOS, CLS, START, END, EOT, MASK = range(FIRST, FIRST + len(SPECIAL))
TEMPLATE = """\
{% for turn in messages %}
{% if loop.first %}{{ bos_token }}{% endif %}
<|start_header_id|>{{ turn['role'] }}<|end_header_id|>

{{ turn['content'] | trim }}<|eot_id|>{% endfor %}
{% if add_generation_prompt %}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE, mask: bool = True, alone: bool = False) -> Path:
    """tokenizer.json and its configuration; `alone`: the template in a file of its own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL[: 6 + mask]])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    if alone and template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
