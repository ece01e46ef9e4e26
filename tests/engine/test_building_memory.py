"""A large text is prepared in little memory: a process that does it tells its own peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TOP = Path(__file__).parents[2]
MIB = 1 << 20
CHILD = """
import sys
from pathlib import Path
import numpy as np
from lockstep.data.options import DataOptions
from lockstep.config.schema import LlamaConfig
from lockstep.engine.building import Builder
from lockstep.engine.choices import TokenizerChoice
from lockstep.data.tokenize import ByteTokenizer, train_bpe
from lockstep.sources.text import build

class Rows:  # as the causal objective cuts them, without torch
    columns = {"tokens": "int32"}
    def pack(self, documents, *, context_length, separator):
        parts, gathered = [], 0
        for ids in documents:
            parts += [np.asarray(ids, np.int32), np.array([separator], np.int32)]
            gathered += len(ids) + 1
            if gathered > 1 << 16:
                whole = np.concatenate(parts)
                rows = len(whole) // context_length
                yield {"tokens": whole[: rows * context_length].reshape(rows, context_length)}
                parts = [whole[rows * context_length :]]
                gathered = len(parts[0])

class Hoarding:  # keeps what it has read
    def __init__(self, source):
        self.source, self.name, self.kept = source, source.name, []
    def fingerprint(self): return self.source.fingerprint()
    def documents(self):
        for document in self.source.documents():
            self.kept.append(document + " ")
            yield document

file, name, kind = sys.argv[1:]
options = DataOptions(data_path=file, dataset_name="text", cache_dir=f"{file}.cache", max_train_samples=1 << 30)
source = build(options)
source = Hoarding(source) if kind == "hoarding" else source
make = (lambda _: ByteTokenizer()) if name == "bytes" else (lambda texts: train_bpe(texts, 4096))
folder = Path(f"{file}.folder")
folder.mkdir()
builder = Builder(LlamaConfig(data=options), Rows(), source, TokenizerChoice(name, {}, make),
                  {"content": dict(source.fingerprint())}, 1 << 20)
builder.build(folder)
assert "torch" not in sys.modules
told = Path("/proc/self/status").read_text()  # ru_maxrss would begin with what the parent had
print(int(told.partition("VmHWM:")[2].split()[0]) >> 10, (folder / "train" / "tokens.npy").stat().st_size >> 20)
"""


def write_text(path: Path, size: int) -> Path:
    """Lines of invented words, as .txt or as .jsonl."""
    random = np.random.default_rng(5)
    letters = np.frombuffer(b"etaoinshrdlu", np.uint8)
    words = [bytes(random.choice(letters, length)) for length in random.integers(2, 9, 5000)]
    with path.open("wb") as file:
        while file.tell() < size:
            chosen = random.integers(0, len(words), 100_000)
            parts = [words[place] for place in chosen]
            for start in range(0, len(parts), 200):
                line = b" ".join(parts[start : start + 200])
                file.write(b'"' + line + b'"\n' if path.suffix == ".jsonl" else line + b"\n\n")
    return path


def peak(file: Path, tokenizer: str, kind: str = "plain") -> tuple[int, int]:
    """MiB: (resident at most, rows on disk)."""
    command = [sys.executable, "-c", CHILD, str(file), tokenizer, kind]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=TOP).stdout.split()
    return int(told[0]), int(told[1])


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Of equal documents: a .txt file is cut into longer ones the longer it is, up to 1 MiB."""
    small, _ = peak(write_text(tmp_path / "small.jsonl", 4 * MIB), "bytes")
    large, rows = peak(write_text(tmp_path / "large.jsonl", 32 * MIB), "bytes")
    assert rows >= 50
    assert large - small < 24
    (tmp_path / "again").mkdir()
    hoarded, _ = peak(write_text(tmp_path / "again" / "large.jsonl", 32 * MIB), "bytes", "hoarding")
    assert hoarded - small > 40  # negative control: what grows is seen


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_document_of_forty_megabytes_is_encoded_in_pieces(tmp_path: Path) -> None:
    """At 100 and more bytes for a character, whole ones took gigabytes; three of them, as in a real .jsonl."""
    lines = write_text(tmp_path / "lines.txt", 40 * MIB).read_text(encoding="utf-8")
    documents = [f"{number} {lines}" for number in range(3)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, documents)), encoding="utf-8")
    most, rows = peak(tmp_path / "long.jsonl", "builtin")
    print(f"{most} MiB")
    assert rows >= 20
    assert most < 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some 400 CPU seconds
def test_a_gigabyte_in_less_than_a_gigabyte(tmp_path: Path) -> None:
    most, rows = peak(write_text(tmp_path / "large.txt", 1 << 30), "builtin")
    print(f"{most} MiB")
    assert rows >= 300
    assert most < 1024
