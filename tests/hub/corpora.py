"""Small datasets in the form of those that the seeds name."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Sequence
from typing import Any

from tests.hub.server import LoopbackHub

TITLES = ("Bread", "Rain", "Clocks", "Salt", "Harbours", "Maps")
SENTENCE = "The {0} of the old town was known for its {1} long before anyone wrote about it . "


def parquet(columns: dict[str, Sequence[Any]], *, group_rows: int = 1 << 20) -> bytes:
    """A table as a parquet file."""
    import pyarrow
    from pyarrow import parquet as writer

    out = io.BytesIO()
    writer.write_table(pyarrow.table(dict(columns)), out, row_group_size=group_rows, write_statistics=False)
    return out.getvalue()


def text(number: int, *, sentences: int = 6) -> str:
    """Some English, another for each number."""
    words = ("baker", "weather", "tower", "mine", "ship", "road", "river", "school", "market", "bridge")
    return (
        "".join(SENTENCE.format(words[(number + n) % 10], words[(number * 7 + n * 3) % 10]) for n in range(sentences))
        + f"({number})"
    )


def article(title: str, number: int) -> list[str]:
    """An article as wikitext has it: a heading, a section, paragraphs, and empty lines between."""
    return ["", f" = {title} = \n", "", f" {text(number)} \n", "", " = = Later = = \n", "", f" {text(number + 50)} \n"]


def add_wikitext(loopback: LoopbackHub, articles: int = 60) -> str:
    lines = [line for n in range(articles) for line in article(f"{TITLES[n % 6]} {n}", n)]
    half = len(lines) // 2
    folder = "wikitext-103-raw-v1"
    card = _card({folder: {"train": f"{folder}/train-*", "test": f"{folder}/test-*"},
                  "wikitext-2-raw-v1": {"train": "wikitext-2-raw-v1/train-*"}})  # fmt: skip
    files = {
        "README.md": card,
        f"{folder}/train-00000-of-00002.parquet": parquet({"text": lines[:half]}),
        f"{folder}/train-00001-of-00002.parquet": parquet({"text": lines[half:]}),
        f"{folder}/test-00000-of-00001.parquet": parquet({"text": article("Kept", 7)}),
        "wikitext-2-raw-v1/train-00000-of-00001.parquet": parquet({"text": article("Small", 8)}),
    }
    return loopback.add("Salesforce/wikitext", files)


def add_c4(loopback: LoopbackHub, files: int = 3, documents: int = 20) -> str:
    def packed(number: int) -> bytes:
        lines = (json.dumps({"text": text(number * documents + n), "url": "u"}) for n in range(documents))
        return gzip.compress("\n".join(lines).encode(), mtime=0)

    names = {f"en/c4-train.{n:05d}-of-{files:05d}.json.gz": packed(n) for n in range(files)}
    card = _card({"en": {"train": "en/c4-train.*.json.gz"}, "realnewslike": {"train": "realnewslike/*.json.gz"}})
    return loopback.add("allenai/c4", {"README.md": card, **names, "realnewslike/a.json.gz": packed(90)})


def add_imdb(loopback: LoopbackHub, documents: int = 12) -> str:
    rows = {
        "text": [f"{text(200 + n)} I liked it ." for n in range(documents)],
        "label": [n % 2 for n in range(documents)],
    }
    card = _card({"plain_text": {"train": "plain_text/train-*", "test": "plain_text/test-*"}})
    files = {
        "plain_text/train-00000-of-00001.parquet": parquet(rows),
        "plain_text/test-00000-of-00001.parquet": parquet(rows),
    }
    return loopback.add("stanfordnlp/imdb", {"README.md": card, **files})


def add_mixture(loopback: LoopbackHub) -> None:
    """All that `hf` consists of below a million documents."""
    add_wikitext(loopback)
    add_imdb(loopback)
    contexts = [text(300 + n // 3) for n in range(12)]  # each with three questions
    questions = [f"What of {n} ?" for n in range(12)]
    squad = parquet({"id": questions, "title": questions, "context": contexts, "question": questions})
    loopback.add("rajpurkar/squad", {"plain_text/train-00000-of-00001.parquet": squad})
    for name, start in (("ag_news", 400), ("yelp_polarity", 500)):
        rows = {"text": [text(start + n) for n in range(4)], "label": [0] * 4}
        loopback.add(f"fancyzhx/{name}", {"data/train-00000-of-00001.parquet": parquet(rows)})
    rows = {"label": [0] * 4, "title": ["T"] * 4, "content": [text(600 + n) for n in range(4)]}
    loopback.add("fancyzhx/dbpedia_14", {"dbpedia_14/train-00000-of-00001.parquet": parquet(rows)})


def _card(configs: dict[str, dict[str, str]]) -> str:
    listed = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in splits.items()]}
        for name, splits in configs.items()
    ]
    return f"---\nconfigs: {json.dumps(listed)}\n---\n# A card\n"
