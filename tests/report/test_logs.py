"""Log lines: prefixes, files, secrets, control bytes, full disks."""

from __future__ import annotations

import copy
import io
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.errors import ExitCode, OutputError
from lockstep.report.logs import ConsoleHandler, FileHandler, console_handler, setup_logging
from lockstep.runtime import env
from lockstep.runtime.scrub import scrubber
from tests.counting import calls

log = logging.getLogger("lockstep.engine.loop")
BROKEN_FORMATTER = "GPU0:GPU0:INFO"  # what a formatter that changes the record prints in a second handler


def shown(*messages: str, **settings) -> list[str]:
    stream = io.StringIO()
    setup_logging(stream=stream, **settings)
    for message in messages:
        log.info("%s", message)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("tag", "prefix", "expected"),
    [
        ("GPU3", "bracket", "[GPU3] hello"),
        ("GPU3", "colon", "GPU3:INFO | [GPU 3] hello"),
        ("GPU12", "colon", "GPU12:INFO | [GPU 12] hello"),
        ("", "bracket", "hello"),
        ("", "colon", "INFO | hello"),
    ],
)
def test_prefixes(tag: str, prefix: str, expected: str) -> None:
    assert shown("hello", tag=tag, prefix=prefix) == [expected]


@pytest.mark.parametrize(("prefix", "start"), [("bracket", "[GPU2]"), ("colon", "GPU2:")])
def test_every_line_carries_the_prefix_also_in_tracebacks(prefix, start: str) -> None:
    stream = io.StringIO()
    setup_logging(tag="GPU2", prefix=prefix, stream=stream)
    log.error("first\n\nthird")
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        log.exception("it failed")
    log.warning("with a stack", stack_info=True)
    lines = stream.getvalue().splitlines()
    assert len(lines) > 12
    assert all(line.startswith(start) for line in lines)
    assert any("Traceback" in line for line in lines)
    assert any(line.endswith("line two") for line in lines)
    if prefix == "colon":
        assert {re.match(r"GPU2:(\w+) \| \[GPU 2\]", line)[1] for line in lines} == {"ERROR", "WARNING"}


def test_the_file_format_and_an_unchanged_record(tmp_path: Path) -> None:
    stream = io.StringIO()
    files = [tmp_path / "a" / "one.log", tmp_path / "two.log"]
    setup_logging(tag="GPU0", prefix="colon", log_files=files, stream=stream)
    record = log.makeRecord(log.name, logging.ERROR, "x.py", 1, "step %d\nmore", (7,), None)
    before = copy.copy(record.__dict__)
    for handler in logging.getLogger("lockstep").handlers:
        if isinstance(handler, FileHandler | ConsoleHandler):  # pytest's own handler does change it
            handler.handle(record)
    assert record.__dict__ == before
    assert stream.getvalue() == "GPU0:ERROR | [GPU 0] step 7\nGPU0:ERROR | [GPU 0] more\n"
    assert BROKEN_FORMATTER not in stream.getvalue()
    for file in files:
        lines = file.read_text().splitlines()
        assert len(lines) == 2
        when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
        assert re.fullmatch(when + r" \| GPU0 \| lockstep\.engine\.loop \| ERROR \| step 7", lines[0])
        assert lines[1].endswith(" | ERROR | more")


def test_a_second_call_replaces_the_first(tmp_path: Path) -> None:
    first = io.StringIO()
    setup_logging(tag="GPU0", stream=first, log_files=[tmp_path / "log.txt"])
    for _ in range(3):
        lines = shown("once", tag="GPU1", log_files=[tmp_path / "log.txt", tmp_path / "log.txt"])
    assert lines == ["[GPU1] once"]
    assert first.getvalue() == ""
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 3
    ours = [handler for handler in logging.getLogger("lockstep").handlers if "lockstep" in type(handler).__module__]
    assert [type(handler) for handler in ours] == [FileHandler, ConsoleHandler]


def test_the_level_is_honoured() -> None:
    stream = io.StringIO()
    setup_logging(level="WARNING", stream=stream)
    log.info("no")
    log.warning("yes")
    assert stream.getvalue() == "yes\n"


def test_secrets_reach_neither_screen_nor_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary1234")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:pass-canary@proxy:3128")
    file = tmp_path / "log.txt"
    stream = io.StringIO()
    monkeypatch.setattr(env, "_hidden", {"from-a-config-file"})
    setup_logging(stream=stream, log_files=[file])
    log.info("token %s, hf_can\x1b[0mary1234 and %s", "hf_canary1234", "from-a-config-file")
    try:
        raise RuntimeError("cannot reach http://user:pass-canary@proxy:3128")
    except RuntimeError:
        log.exception("failed with hf_canary1234")
    text = stream.getvalue() + file.read_text()
    assert text.count("***") == 2 * 6  # the traceback quotes the source line too
    assert not re.search("canary1234|pass-canary|from-a-config", text)


def test_control_bytes_are_stripped() -> None:
    attacks = {
        "\x1b]0;owned\x07title": "title",
        "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\": "link",
        "\x1b[31mred\x1b[0m \x9b2J": "red ",
        "over\rwrite\x08\x7f\x00": "overwrite",
        "\x1bPq#0\x1b\\sixel": "sixel",
        "\x1b]52;c;never ended": "52;c;never ended",  # harmless without its first bytes
        "\x1bc\x1b(Breset": "reset",
        "tab\tstays, ä € ⚠️  too": "tab\tstays, ä € ⚠️  too",
    }
    assert shown(*attacks) == [expected.rstrip("\n") for expected in attacks.values()]
    scrub, raw = scrubber(), "".join(map(chr, range(256))) * 2
    left = set(re.findall(r"[\x00-\x1f\x7f-\x9f]", scrub(raw)))
    assert left <= {"\t", "\n"}


def test_a_lone_surrogate_does_not_stop_a_log_file(tmp_path: Path) -> None:
    shown("file\udcff name", log_files=[tmp_path / "log.txt"])
    assert "file\\udcff name" in (tmp_path / "log.txt").read_text()


def test_a_full_disk_is_one_warning() -> None:
    lines = shown(*["a", "b", "c"], tag="GPU0", log_files=[Path("/dev/full")])
    warnings = [line for line in lines if "cannot write /dev/full" in line]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert [line for line in lines if line not in warnings] == ["[GPU0] a", "[GPU0] b", "[GPU0] c"]


def test_a_closed_pipe_as_log_file_is_one_warning(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    stream = io.StringIO()
    setup_logging(stream=stream, log_files=[fifo])
    log.info("a")
    assert b"| a\n" in os.read(reader, 1000)
    os.close(reader)
    log.info("b")
    log.info("c")
    assert stream.getvalue().count("cannot write") == 1
    assert {"a", "b", "c"} < set(stream.getvalue().splitlines())


def test_a_screen_that_fails_leaves_the_log_file_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.txt"
    with Path("/dev/full").open("w") as full:
        setup_logging(stream=full, log_files=[file])
        for message in "abc":
            log.info(message)
    text = file.read_text()
    assert [line.rsplit(" | ", 1)[1] for line in text.splitlines() if "INFO" in line] == ["a", "b", "c"]
    assert text.count("cannot write to the terminal") == 1
    assert capsys.readouterr().err.count("cannot write to the terminal") == 1


def test_a_log_file_that_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        setup_logging(log_files=[tmp_path / "file" / "log.txt"], stream=io.StringIO())
    assert caught.value.exit_code == ExitCode.CANNOT_CREATE
    assert str(tmp_path / "file" / "log.txt") in str(caught.value)


SPEAK = """
import logging, sys
from lockstep.report.logs import setup_logging
setup_logging(tag="GPU0")
for number in range(int(sys.argv[1])):
    logging.getLogger("lockstep.x").warning("⚠️  • → ✅ %d", number)
"""


@pytest.mark.parametrize("settings", [{"LANG": "C", "LC_ALL": "C"}, {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}])
def test_utf8_and_no_colour_in_a_pipe_whatever_the_locale(settings: dict[str, str]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SPEAK, "1"]
    ended = subprocess.run(command, env={"TERM": "xterm", **settings}, capture_output=True, timeout=60, check=True)
    assert ended.stdout.decode("utf-8") == "[GPU0] ⚠️  • → ✅ 0\n"


def test_a_reader_that_goes_away_does_not_end_the_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", SPEAK, "3000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0
    assert errors.count(b"\n") == 1
    assert b"cannot write to the terminal" in errors


def test_colour_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def said(no_color: str, term: str, stream: io.StringIO) -> str:
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", term)
        setup_logging(stream=stream)
        log.info("plain")
        log.warning("careful")
        return stream.getvalue()

    assert said("", "xterm", Terminal()) == "plain\n\x1b[33mcareful\x1b[0m\n"
    assert said("1", "xterm", Terminal()) == "plain\ncareful\n"
    assert said("", "dumb", Terminal()) == "plain\ncareful\n"
    assert said("", "xterm", io.StringIO()) == "plain\ncareful\n"


def test_the_screen_knows_how_much_room_the_prefix_leaves() -> None:
    for settings, width in (({}, 80), ({"tag": "GPU0"}, 73), ({"tag": "GPU0", "prefix": "colon"}, 60)):
        setup_logging(stream=io.StringIO(), **settings)
        handler = console_handler()
        assert handler is not None
        assert handler.width == width


def test_a_line_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few calls and one write, however many lines were before and however many secrets there are."""
    line = "Step [0/100] | Loss: 12.2340 | LR: 1.00e-05 | Grad Norm: 2.7565 | ETA: 5:30"
    counted: list[int] = []
    for secrets in (0, 4, 400):
        for number in range(secrets):
            monkeypatch.setenv(f"SERVICE{number}_TOKEN", f"secret-value-{number}")
        stream = Pipe()
        setup_logging(tag="GPU0", prefix="colon", stream=stream)
        log.info("%s", line)  # the first one asks where it comes from
        counted += [calls(lambda: log.info("%s", line)) for _ in range(100)]
        assert stream.flushes == stream.writes == 101
        scrub = scrubber()
        assert calls(lambda scrub=scrub: scrub(line)) < 10
    assert set(counted) == {counted[0]}
    assert counted[0] < 200  # half of them are by pytest, which listens too


class Pipe(io.StringIO):
    """Where lines go, and how often somebody was bothered with them."""

    writes = flushes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)

    def flush(self) -> None:
        self.flushes += 1


def test_the_clock_of_the_file_is_local_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup_logging(stream=io.StringIO(), log_files=[tmp_path / "log.txt"])
    record = log.makeRecord(log.name, logging.INFO, "x.py", 1, "hello", (), None)
    record.created = 0.0
    log.handle(record)
    expected = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    assert (tmp_path / "log.txt").read_text() == f"{expected} | CPU | lockstep.engine.loop | INFO | hello\n"
