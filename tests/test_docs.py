"""README and docs cannot drift: every command in them is run here, with few steps; links, keys and codes must exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep import compat, families
from lockstep.config.catalog import catalog
from lockstep.config.schema import FAMILIES
from lockstep.errors import ExitCode
from tests.hub import corpora
from tests.hub.fixtures import loopback as loopback
from tests.hub.server import LoopbackHub

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```bash\n(?P<body>.*?)```", re.DOTALL)
FEW_STEPS = [
    "training.max_steps=2",
    "training.batch_size=2",
    "training.eval_batches=1",
    "report.tensorboard=false",
    "--device",
    "cpu",
]
NOT_RUN_AT_MOST = 8
SHELL_SYNTAX = re.compile(r"[|;&<>`]|\$[({]")


@dataclass(frozen=True)
class Block:
    page: str
    commands: tuple[str, ...]
    reason: str  # why it is not run, or ""


def blocks(path: Path) -> list[Block]:
    found = []
    for match in BLOCK.finditer(path.read_text(encoding="utf-8")):
        lines = match["body"].replace("\\\n", " ").splitlines()
        commands = tuple(
            line for line in (line.partition(" # ")[0].strip() for line in lines) if line and line[0] != "#"
        )
        found.append(Block(path.name, commands, (match["reason"] or "").strip()))
    return found


ALL = {path.name: blocks(path) for path in PAGES}
RUN = [name for name, found in ALL.items() if any(not block.reason for block in found)]


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """One line of a page, inside this process."""
    assert not SHELL_SYNTAX.search(re.sub(r'"[^"$`]*"', "", command)), f"{command}: only plain commands can be run here"
    program, *words = shlex.split(command)
    if program == "cd":
        monkeypatch.chdir(words[0])
        return 0
    if program == "rm":
        assert words[0] == "-rf"
        for name in words[1:]:
            assert not Path(name).is_absolute()
            shutil.rmtree(name, ignore_errors=True)
        return 0
    if program in ("bash", "python3"):
        few = [] if words[0] == "multi_gpu_configs.py" else FEW_STEPS  # which trains nothing
        return compat.main(words[0], [*words[1:], *few])
    assert program == "lockstep", f"{command}: do not know how to run {program}"
    from lockstep.cli import main

    few = FEW_STEPS if "--batch-size" not in words else [word for word in FEW_STEPS if "batch_size" not in word]
    return main([*words, *few] if words[:1] == ["train"] else words)


@pytest.fixture(scope="module")
def dataset_cache(tmp_path_factory: pytest.TempPathFactory, _prepared: Path) -> Path:
    """With what other tests have prepared, but its own: a page may say how to clear it."""
    return shutil.copytree(_prepared, tmp_path_factory.mktemp("datasets"), dirs_exist_ok=True)


@pytest.mark.parametrize("page", RUN)
def test_every_command_of_a_page_runs(
    page: str,
    in_dir: Path,
    dataset_cache: Path,
    loopback: LoopbackHub,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from lockstep.report.logs import close_logging

    corpora.add_wikitext(loopback)
    for name in ("GPU_RANK", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DATASET_CACHE_DIR", str(dataset_cache))
    paragraphs = [f"Paragraph {number} of a text that a user could have. " * 8 for number in range(60)]
    Path("notes.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    Path("articles.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in paragraphs), encoding="utf-8")
    chats = ({"prompt": f"What is {place}?", "answer": f"It is {place}."} for place in range(60))
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    own_logs = f"model_check_logs_{os.getpid()}_*"  # those of other processes are theirs
    logs = set(Path("/tmp").glob(own_logs))
    for block in ALL[page]:
        for command in () if block.reason else block.commands:
            code = run_command(command, monkeypatch)
            close_logging()
            said = capfd.readouterr()
            assert code == 0, f"{command}\n{said.out[-2000:]}{said.err[-2000:]}"
    for folder in set(Path("/tmp").glob(own_logs)) - logs:
        shutil.rmtree(folder, ignore_errors=True)


SNIPPETS = [
    pytest.param(path.parent, code, id=f"{path.parent.name}/{path.name}")
    for path in (*PAGES, ROOT / "doors" / "model_check" / "config" / "README.md")
    for code in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.mark.parametrize(("folder", "code"), SNIPPETS)
def test_python_snippets_run(
    folder: Path, code: str, in_dir: Path, dataset_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_CACHE_DIR", str(dataset_cache))
    if "reviews.jsonl" in code:  # the user's own labels, and a model that an earlier command of the page exported
        reviews = ({"text": f"Review {place} of a thing.", "label": place % 2} for place in range(20))
        Path("reviews.jsonl").write_text("\n".join(map(json.dumps, reviews)), encoding="utf-8")
        for command in ("lockstep train mlm demo model.num_layers=1", "lockstep export latest --to hf"):
            assert run_command(command, monkeypatch) == 0
    monkeypatch.syspath_prepend(str(folder.parent))  # `from config import ...` is said of the folder of the scripts
    monkeypatch.setitem(sys.modules, "config", None)
    monkeypatch.delitem(sys.modules, "config")
    exec(compile(code, "<docs>", "exec"), {})


def test_a_batch_size_that_a_page_names_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows make other commands quick; one about batch sizes would no longer be the command of the page."""
    import lockstep.cli

    seen: list[list[str]] = []
    monkeypatch.setattr(lockstep.cli, "main", lambda words: seen.append(words) or 0)
    for command in ("lockstep train llama tiny --batch-size auto", "lockstep train llama tiny"):
        run_command(command, monkeypatch)
    assert ["training.batch_size=2" in words for words in seen] == [False, True]


def test_a_wrong_command_would_be_noticed(in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command("lockstep trian llama tiny", monkeypatch) == 2
    assert run_command("lockstep train llama tiny --no-such-flag 1", monkeypatch) == 2
    assert run_command("python3 pretrain_main.py --config no_such_file.json", monkeypatch) == 2


def test_enough_is_run_and_little_is_not() -> None:
    every = [block for found in ALL.values() for block in found]
    assert sum(len(block.commands) for block in every if not block.reason) >= 35
    assert len([block for block in every if block.reason]) <= NOT_RUN_AT_MOST


def test_pages_stay_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 80
    assert 5 <= len(list((ROOT / "docs").glob("*.md"))) <= 12


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_settings_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (path.parent / target).exists(), target
    known = {setting.key for family in FAMILIES for setting in catalog(family).settings.values()}
    sections = {key.partition(".")[0] for key in known if "." in key}
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for key in re.findall(r"`([a-z]+\.[a-z_0-9]+)\b(?![./(])", prose):
        if key.partition(".")[0] in sections and not key.endswith((".py", ".json", ".sh", ".html")):
            assert key in known, f"{path.name} speaks of {key}"


def test_modules_named_in_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text)
    assert len(named) >= 15
    package = ROOT / "src" / "lockstep"
    missing = [name for name in named if not (package / name).is_file() and name != "options.py"]
    assert missing == []


def test_the_architecture_page_names_every_family() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+Config)` \|.*\| `doors/(\w+)/` \|$", text, re.MULTILINE)
    known = [(name, config.__name__, families.FAMILIES[name].folder) for name, config in FAMILIES.items()]
    assert rows == known
    for name, _, folder in known:
        for row, word in (("doors", f"`doors/{folder}/`"), ("presets", f"`presets/{name}/`")):
            assert re.search(rf"^\| {row} \|.*{word}", text, re.MULTILINE), word


def test_the_exit_code_page_is_the_table_of_the_code() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert rows == [(str(int(code)), code.name) for code in ExitCode]


def test_the_fault_table_names_every_kind() -> None:
    from lockstep.runtime.faults import KINDS, PLACES

    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("| kind |") : text.index("`where` is")]
    assert set(re.findall(r"`(\w+)`", re.sub(r"\|[^|]*\|[^|]*$", "", table, flags=re.MULTILINE))) >= set(KINDS)
    for place in PLACES:
        assert f"`{place}`" in text
