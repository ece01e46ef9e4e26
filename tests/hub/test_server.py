"""The loopback hub itself: the libraries of the real one cannot tell the difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.hub import corpora
from tests.hub.server import Fault, LoopbackHub

TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
}  # fmt: skip


def test_parts_tokens_and_faults_are_on_record(loopback: LoopbackHub) -> None:
    commit = loopback.add("acme/notes", {"a.txt": "0123456789"})
    asked = urllib.request.Request(f"{loopback.url}/datasets/acme/notes/resolve/main/a.txt")
    asked.add_header("Range", "bytes=2-4")
    asked.add_header("Authorization", "Bearer secret")
    with urllib.request.urlopen(asked) as answer:
        assert (answer.status, answer.read(), answer.headers["X-Repo-Commit"]) == (206, b"234", commit)
    assert (loopback.asked[0].range, loopback.asked[0].token) == ("bytes=2-4", "secret")
    loopback.fail("acme/notes", Fault("status", 503, times=1), file="a.txt")
    with pytest.raises(urllib.error.HTTPError, match="503") as caught:
        urllib.request.urlopen(asked)
    caught.value.close()
    with urllib.request.urlopen(asked) as answer:
        assert answer.read() == b"234"


@pytest.mark.slow
def test_the_real_libraries_work_with_it(tmp_path: Path) -> None:
    loopback = LoopbackHub()
    try:
        config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
        files = {
            "config.json": json.dumps(config),
            "tokenizer.json": json.dumps(TOKENIZER),
            "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
        }
        loopback.add("acme/tiny", files, kind="models")
        corpora.add_imdb(loopback)
        corpora.add_c4(loopback)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environ = {**kept, "HF_ENDPOINT": loopback.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        program = Path(__file__).with_name("real_clients.py")
        ran = subprocess.run([sys.executable, program], env=environ, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout.splitlines()[-1]) == {
            "info": sorted(files), "config": "llama", "llama": "LlamaConfig", "tokenizer": [0, 1], "rows": 12,
            "streamed": "(0)",
        }  # fmt: skip
    finally:
        loopback.stop()
