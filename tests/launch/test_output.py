"""Output on its way: whole lines whatever the chunks, prefixed, scrubbed, at a constant price."""

from __future__ import annotations

import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.launch.output import (
    HELD_BYTES,
    LONGEST_LINE_BYTES,
    SCREEN_BYTES,
    SKIPPED,
    Lines,
    LogFile,
    Output,
    Screen,
    prefixed,
)
from lockstep.runtime import env, scrub
from tests.counting import calls
from tests.launch import harness
from tests.launch.test_faults import LAUNCHER, ROOT


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"10%\r20%\r30%\n", [b"10%", b"20%", b"30%"]),
        (b"10%\r20%\r", [b"10%", b"20%"]),
        (b"\n\nx\n", [b"", b"", b"x"]),
        (b"", []),
    ],
)
def test_lines_whatever_the_chunks(text: bytes, lines: list[bytes]) -> None:
    for cut in range(len(text) + 1):
        for second in range(cut, len(text) + 1):
            splitter = Lines()
            parts = [splitter.feed(part) for part in (text[:cut], text[cut:second], text[second:]) if part]
            assert all(not part or part.endswith(b"\n") for part in parts)
            assert (b"".join(parts) + splitter.end()).split(b"\n")[:-1] == lines, (cut, second)


def test_lines_of_a_megabyte_and_without_end() -> None:
    splitter = Lines()
    line = b"x" * (1 << 20)
    out = b"".join(splitter.feed(line[begin : begin + 65536]) for begin in range(0, len(line), 65536))
    assert out == b""
    assert splitter.feed(b"\n") == line + b"\n"
    cut = [splitter.feed(b"y" * 65536) for _ in range(2 * LONGEST_LINE_BYTES // 65536)]
    assert any(cut), "a worker that never ends its line does not fill our memory"


def test_scrubbing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_123")
    clean = scrub.bytes_scrubber()
    assert clean(b"plain \t text\n") == b"plain \t text\n"
    assert clean(b"token hf_canary_123 here\n") == b"token *** here\n"
    assert clean(b"hf_\x1b[31mcanary\x1b[0m_123\n") == b"***\n", "not even behind an escape sequence"
    assert clean("Grüße ✅\n".encode()) == "Grüße ✅\n".encode()
    assert clean(b"bad \xff\xfe utf-8\n") == rb"bad \xff\xfe utf-8" + b"\n"
    assert clean(b"\x1b]0;title\x07bell\x07\x00 \x9b31m\xc2\x9b32m\n") == rb"bell \x9b31m" + b"\n"
    assert "hf_canary_123" in env.secrets()


def test_prefix_is_on_every_line() -> None:
    assert prefixed(b"[GPU2] ", b"a\n\nb\n") == b"[GPU2] a\n[GPU2] \n[GPU2] b\n"
    assert prefixed(b"GPU2:", b"INFO | x\n") == b"GPU2:INFO | x\n"
    assert prefixed(b"", b"a\n") == b"a\n"


def test_output_before_the_file_is_known(tmp_path: Path) -> None:
    output = Output(b"", lambda data: data, None)
    output.feed(b"early\n")
    output.add_file(LogFile(tmp_path / "now.txt", pytest.fail))
    output.feed(b"later\nrest")
    output.add_file(LogFile(tmp_path / "last.txt", pytest.fail), last=True)
    output.end()
    output.close()
    assert (tmp_path / "now.txt").read_bytes() == b"later\nrest\n"
    assert (tmp_path / "last.txt").read_bytes() == b"early\nlater\nrest\n"


def test_held_output_is_bounded(tmp_path: Path) -> None:
    output = Output(b"", lambda data: data, None)
    line = b"x" * 65535 + b"\n"
    for _ in range(2 * HELD_BYTES // len(line)):
        output.feed(line)
    output.add_file(LogFile(tmp_path / "last.txt", pytest.fail), last=True)
    output.close()
    assert HELD_BYTES // 2 < (tmp_path / "last.txt").stat().st_size <= HELD_BYTES


def test_full_disk_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "gpu_0.log").symlink_to("/dev/full")
    said: list[str] = []
    file = LogFile(tmp_path / "gpu_0.log", said.append)
    for _ in range(3):
        file.write(b"line\n")
    file.close()
    nowhere = LogFile(tmp_path / "gpu_0.log" / "x", said.append)
    nowhere.write(b"line\n")
    assert len(said) == 2
    assert "No space left" in said[0]


def read_all(descriptor: int) -> bytes:
    received = b""
    while chunk := os.read(descriptor, 1 << 16):
        received += chunk
    return received


def test_a_reader_that_stands_still_holds_up_nobody(tmp_path: Path) -> None:
    """What is beyond the bound is counted for it, and in the transcript; the launcher's own line comes all the same."""
    read_end, write_end = os.pipe()
    screen, line = Screen(write_end), b"y" * 4095 + b"\n"
    screen.copy = LogFile(tmp_path / "transcript", pytest.fail)
    screen.begin()
    begin = time.monotonic()
    shown = 2 * SCREEN_BYTES // len(line)
    for _ in range(shown):
        screen.show(line)
    screen.put(b"own line\n")
    screen.finish(0.2)
    assert time.monotonic() - begin < 2
    reader = ThreadPoolExecutor(1).submit(read_all, read_end)
    screen.finish(10)
    screen.close()
    os.close(write_end)
    lines = reader.result(10).split(b"\n")
    arrived = lines.count(line[:-1])
    assert SCREEN_BYTES // len(line) < arrived < shown
    assert lines[-3:-1] == [(SKIPPED % (shown - arrived)).rstrip(), b"own line"]
    assert (tmp_path / "transcript").stat().st_size == shown * len(line) + len(b"own line\n")
    os.close(read_end)


def test_screen_whose_reader_left() -> None:
    read_end, write_end = os.pipe()
    screen = Screen(write_end)
    os.close(read_end)
    screen.put(b"line\n")
    screen.finish()
    screen.put(b"line\n")
    os.close(write_end)
    assert screen.closed


def test_a_terminal_that_was_set_not_to_block() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    screen = Screen(write_end)
    screen.put(b"z" * (1 << 20))
    screen.finish(0.2)
    reader = ThreadPoolExecutor(1).submit(read_all, read_end)
    screen.finish(10)
    os.close(write_end)
    assert len(reader.result(10)) == 1 << 20
    os.close(read_end)


def test_everything_arrives_and_files_equal_the_screen(tmp_path: Path) -> None:
    """Contract 60: gpu_<id>.log is the screen without its prefix; a partial last line and odd bytes arrive too."""
    logs = tmp_path / "logs"
    odd = r"import sys; sys.stdout.buffer.write(b'\xff odd \x1b[31mred\x1b[0m\n' + b'z' * (1 << 20) + b'\nlast'); "
    script = odd + "import os; os.environ['HF_TOKEN'] and print(' ' + os.environ['HF_TOKEN'], end='')"
    job = harness.run(
        [sys.executable, "-c", LAUNCH_ANY, script, str(logs)], cwd=ROOT, HF_TOKEN="hf_canary_9", seconds=20
    )
    assert job.code == 0, job.out
    lines = [line for line in job.out.split("\n") if line.startswith("[GPU0] ")]
    assert [line[7:] for line in lines] == [r"\xff odd red", "z" * (1 << 20), "last ***"]
    assert (logs / "gpu_0.log").read_text() == "".join(line[7:] + "\n" for line in lines)
    assert (logs / "gpu_1.log").read_text() == (logs / "gpu_0.log").read_text()
    assert "[GPU1]" not in job.out, "the others go to files only"


LAUNCH_ANY = """
import os, sys, tempfile
from pathlib import Path
from lockstep.guard import say
from lockstep.launch.supervise import Proc, Watch, supervise
work = Path(tempfile.mkdtemp(prefix="lockstep-"))
procs = [Proc(f"GPU{n}", (n,), (sys.executable, "-c", sys.argv[1]), dict(os.environ)) for n in range(2)]
sys.exit(supervise(procs, Watch(log_folder=Path(sys.argv[2])), work, say).exit_code)
"""


@pytest.mark.parametrize("prefix", [b"", b"[GPU0] "])
def test_a_chunk_costs_the_same_however_many_lines_it_holds(prefix: bytes) -> None:
    """Contract 175, 10,000 lines a second: no call for each line. What one costs: benchmarks/report.py."""
    clean = scrub.bytes_scrubber()

    def relay(lines: int) -> int:
        splitter, chunk = Lines(), b"Step [3/100] | Loss: 2.3456\n" * lines
        return calls(lambda: prefixed(prefix, clean(splitter.feed(chunk))))

    assert relay(2_000) == relay(2) < 30


def test_random_chunks_arrive_whole() -> None:
    chance = random.Random(3)
    text = b"".join(chance.randbytes(chance.randrange(60)).replace(b"\r", b"") + b"\n" for _ in range(2000))
    splitter, out, at = Lines(), b"", 0
    while at < len(text):
        size = chance.randrange(1, 200)
        out += splitter.feed(text[at : at + size])
        at += size
    assert out + splitter.end() == text


def test_launchers_prefix_styles(tmp_path: Path) -> None:
    ended = harness.run([*LAUNCHER, "1", str(tmp_path / "run"), "prefix=colon"], cwd=ROOT, STUB_OPTIONS="steps=2")
    assert "GPU0:Step [1] rank 0" in ended.out
