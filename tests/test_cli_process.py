"""The command line as a process of its own: locale, pipes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def process(*words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "lockstep", *words], capture_output=True, **options)


def test_utf8_whatever_the_locale(tmp_path: Path) -> None:
    """Contract item 176."""
    (tmp_path / "c.json").write_text('{"größe": 1}', encoding="utf-8")
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}
    answer = process("config", "validate", "c.json", cwd=tmp_path, env=plain)
    assert answer.returncode == 2
    assert "größe" in answer.stderr.decode("utf-8")
    assert b"\x1b" not in answer.stdout + answer.stderr


def test_a_reader_that_goes_away_is_no_crash() -> None:
    command = [sys.executable, "-m", "lockstep", "config", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 141
