"""Alarms against rot: sizes, banned words, floors, and what an import may cost. Each alarm is shown to ring."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "lockstep"
MODULES = sorted(SOURCE.rglob("*.py"))
SCRIPTS = sorted(path for path in (ROOT / "doors").glob("*/*") if path.suffix in (".py", ".sh"))
TEXTS = [*MODULES, *SCRIPTS, *sorted((ROOT / "setup").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]

TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
WATCHED = {"contracts.py": 200, "engine/loop.py": 200}  # read first, read most: kept shorter than the rest
EXEMPTION = re.compile(r"#\s*(?:noqa|type: ignore|pyright: ignore)(?P<rules>[^#\n]*?)(?P<reason> - .*)?$", re.MULTILINE)
PLAIN_RULES = {  # their reason is always the same one
    "reportPrivateImportUsage",  # torch has its kernels under private names
    "reportPrivateUsage",
    "reportUnknownVariableType",  # what isinstance leaves of a value from a user's file
    "reportUnknownMemberType",
    "reportUnknownArgumentType",
    "reportMissingImports",  # a package that may be there
}
UNFINISHED = re.compile(r"\bLEAD\b|to be filled|\bTODO\b|\bFIXME\b|\bTBD\b")

BANNED = {
    "pickle.load": r"\bpickle\.loads?\(",
    "weights_only=False": r"weights_only\s*=\s*False",
    "allow_pickle=True": r"allow_pickle\s*=\s*True",
    "eval": r"(?<![\w.])eval\(",
    "exec": r"(?<![\w.])exec\(",
    "yaml.load": r"\byaml\.(unsafe_)?load\(",
    "shell=True": r"shell\s*=\s*True",
    "os.system": r"\bos\.system\(",
    "swallowed exception": r"except( Exception| BaseException)?:\s*(#[^\n]*)?\n\s*pass\b",
}


def long_functions(tree: ast.AST, limit: int) -> list[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [f"{node.name}: {size}" for node in found if (size := (node.end_lineno or 0) - node.lineno + 1) > limit]


def back_pointers(tree: ast.AST) -> list[int]:
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "trainer"]


def test_there_is_something_to_watch() -> None:
    assert len(MODULES) >= 40
    assert len(SCRIPTS) >= 9


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    tree = ast.parse(text)
    assert long_functions(tree, 60) == []
    assert back_pointers(tree) == [], "no attribute called trainer: nothing points back to its caller"
    assert ast.get_docstring(tree), "the first line of a module says what it is for"


@pytest.mark.parametrize("name", WATCHED)
def test_the_most_read_files_stay_short(name: str) -> None:
    assert len((SOURCE / name).read_text(encoding="utf-8").splitlines()) <= WATCHED[name]


def test_test_files_stay_readable() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in TESTS}
    assert len(sizes) > 60
    assert [name for name, size in sizes.items() if size > 400] == []


def unexplained(text: str) -> list[str]:
    """The rules of each exemption that says neither why nor something that explains itself."""
    found = [match for match in EXEMPTION.finditer(text) if not match["reason"]]
    rules = [re.findall(r"[\w-]+", match["rules"]) or ["everything"] for match in found]
    return [rule for some in rules for rule in some if rule not in PLAIN_RULES]


def test_exemptions_say_why() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()} {rule}"
        for path in TEXTS
        if path.suffix == ".py"
        for rule in unexplained(path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("x = 1  # noqa: E501", ["E501"]),
        ("x = 1  # noqa", ["everything"]),
        ("x = 1  # type: ignore", ["everything"]),
        ("x = 1  # pyright: ignore[reportArgumentType, reportPrivateUsage]", ["reportArgumentType"]),
        ("x = 1  # noqa: E501 - a table", []),
        ("x = 1  # type: ignore[arg-type] - a spy", []),
        ("x = torch._f()  # pyright: ignore[reportPrivateImportUsage]", []),
    ],
)
def test_an_exemption_without_a_reason_is_seen(line: str, rules: list[str]) -> None:
    assert unexplained(f"y = 2\n{line}\nz = 3\n") == rules


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_finished(path: Path) -> None:
    assert UNFINISHED.findall(path.read_text(encoding="utf-8")) == []
    assert UNFINISHED.findall("<!-- LEAD: paste it here -->\n(to be filled)") == ["LEAD", "to be filled"]


def test_the_size_alarms_ring() -> None:
    body = "def long():\n" + "    x = 1\n" * 61
    assert long_functions(ast.parse(body), 60) == ["long: 62"]
    assert back_pointers(ast.parse("self.trainer = 1")) == [1]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_doors_hold_no_logic(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 25
    if path.suffix == ".sh" and text.startswith("#!"):
        assert "set -euo pipefail" in text
        assert text.splitlines()[-1].startswith("exec ")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_door_has_a_test(path: Path) -> None:
    tests = "".join(test.read_text(encoding="utf-8") for test in (ROOT / "tests" / "doors").glob("test_*.py"))
    assert path.name in tests


@pytest.mark.parametrize("word", BANNED)
def test_banned_words(word: str) -> None:
    pattern = re.compile(BANNED[word])
    found = [str(path.relative_to(ROOT)) for path in TEXTS if pattern.search(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("pickle.load", "x = pickle.load(f)"),
        ("weights_only=False", "torch.load(p, weights_only=False)"),
        ("allow_pickle=True", "np.load(p, allow_pickle=True)"),
        ("eval", "eval(text)"),
        ("exec", "exec(text)"),
        ("yaml.load", "yaml.load(f)"),
        ("shell=True", "run(c, shell=True)"),
        ("os.system", "os.system('x')"),
        ("swallowed exception", "try:\n    x()\nexcept Exception:\n    pass\n"),
    ],
)
def test_the_banned_words_are_recognised(word: str, line: str) -> None:
    assert re.search(BANNED[word], line)
    assert not re.search(BANNED[word], "model.eval()\nexcept OSError:\n    pass\n")


def test_the_environment_has_one_door() -> None:
    """ruff's TID251 is on for the package (and this is how it sounds)."""
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", str(SOURCE / "data" / "planted.py"), "-"]
    planted = "import os\n\nHOME = os.environ.get('HOME')\n"
    answer = subprocess.run(command, input=planted, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 1
    assert "TID251" in answer.stdout


def settings(model: type, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    fields: dict[str, FieldInfo] = model.model_fields
    for name, field in fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from settings(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def test_settings_stay_few_and_explained() -> None:
    from lockstep.config.schema import FAMILIES

    found = [dict(settings(family)) for family in FAMILIES.values()]
    shared = set.intersection(*(set(each) for each in found))
    assert 60 <= len(shared) <= 91
    for each in found:
        documented = 35 if "data.env" in each else 20  # the guide of agents tells of a world and of a learner too
        assert len(each.keys() - shared) <= documented
        assert [name for name, field in each.items() if not field.description] == []


def test_the_floors_hold() -> None:
    from importlinter import configuration
    from importlinter.application.use_cases import lint_imports  # the command itself would switch our loggers off

    configuration.configure()
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=None)


def test_the_architecture_page_shows_the_same_floors() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = [set(re.findall(r"\w+", layer)) for layer in contracts[0]["layers"]]
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("| floor |") : text.index("\n\n", text.index("| floor |"))]
    rows = [line.split("|")[2] for line in table.splitlines()[2:]]
    shown = [set(re.findall(r"`(\w+)/?`", row)) for row in rows]
    assert shown[1:] == layers, "the first row are the doors, which are no part of the package"


LIGHT = (
    "cli", "trained", "compat", "start", "api", "home", "guard", "doctor", "status", "arguments", "verb_arguments",
    "families", "errors", "registry", "rundir", "contracts",
    *(f"launch/{path.stem}" for path in sorted((SOURCE / "launch").glob("*.py"))),
)  # fmt: skip


def imports_at_the_top(tree: ast.Module) -> set[str]:
    """Top-level packages that a module imports when it is itself imported (import-linter counts the late ones too)."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            waiting += node.body
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            waiting += [*node.body, *node.orelse]
    return found


@pytest.mark.parametrize("name", LIGHT)
def test_commands_import_torch_late(name: str) -> None:
    tree = ast.parse((SOURCE / f"{name}.py").read_text(encoding="utf-8"))
    assert imports_at_the_top(tree) & {"torch", "numpy", "transformers", "datasets", "rich"} == set()


def test_an_early_import_is_seen() -> None:
    early = "try:\n    import torch.nn\nexcept ImportError:\n    raise\n"
    late = "if TYPE_CHECKING:\n    import torch\n\ndef f():\n    import torch\n"
    assert imports_at_the_top(ast.parse(early)) == {"torch"}
    assert imports_at_the_top(ast.parse(late)) == set()


def test_the_floors_alarm_rings(tmp_path: Path) -> None:
    """A part that imports the engine, and one that imports its neighbour, in a copy of the package."""
    shutil.copytree(SOURCE, tmp_path / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    planted = tmp_path / "lockstep" / "data" / "order.py"
    planted.write_text("import lockstep.engine.loop\nimport lockstep.models.llama\n", encoding="utf-8")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(config_filename=sys.argv[2], no_cache=True))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(ROOT / "pyproject.toml")]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert answer.returncode == 1
    assert "lockstep.data.order -> lockstep.engine.loop" in answer.stdout
    assert "lockstep.data.order -> lockstep.models.llama" in answer.stdout
