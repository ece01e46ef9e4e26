"""A tokenizer for ids that came without one: it can spell them, letter by letter or as numbers. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, models, processors

from lockstep.data.tokenize import TokenizerFile


def stand_in(size: int, *, separator: int, letters: Mapping[str, int]) -> TokenizerFile:
    """`size` ids, each a letter or `<its number>`."""
    assert 0 <= separator < size
    known = {text: place for text, place in letters.items() if place < size and place != separator}
    taken = set(known.values())
    vocab = known | {f"<{place}>": place for place in range(size) if place not in taken}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    end = f"<{separator}>"  # said in the file itself too
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, separator)])
    return TokenizerFile(tokenizer, separator=end)
