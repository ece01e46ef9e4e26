"""`lockstep prepare` and its --list, --verify and --clean, on a real cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.data.cache import open_or_build
from lockstep.errors import ExitCode
from tests.conftest import Outcome
from tests.data.small_cache import KEY, fill

Cli = Callable[..., Outcome]


@pytest.fixture
def prepare(lockstep: Cli, in_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`lockstep prepare llama tiny`, on few documents, into the working directory."""
    monkeypatch.delenv("DATASET_CACHE_DIR", raising=False)
    return lambda *words: lockstep("prepare", "llama", "tiny", "data.max_train_samples=40", *words)


def test_a_dataset_is_prepared_listed_checked_and_removed(prepare: Cli, in_dir: Path) -> None:
    root = in_dir / ".cache" / "datasets"
    assert prepare().code == ExitCode.DONE
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    (root / "notes.txt").write_text("mine", encoding="utf-8")
    place = str(folder.relative_to(in_dir))

    listed = prepare("--list")
    assert listed.code == ExitCode.DONE
    assert place in listed.out
    assert "builtin" in listed.out
    assert "notes" not in listed.out

    whole = prepare("--verify")
    assert whole.code == ExitCode.DONE
    assert "intact" in whole.out

    cleaned = prepare("--clean")
    assert cleaned.code == ExitCode.DONE
    assert f"Removed {place}" in cleaned.out
    assert [path.name for path in root.iterdir()] == ["notes.txt"]
    assert "No prepared dataset" in prepare("--list").out


@pytest.mark.parametrize("words", [("llama",), ("ad",), ("llada", "--to", "there")])
def test_a_dry_run_prepares_nothing(lockstep: Cli, prepare: Cli, in_dir: Path, words: tuple[str, ...]) -> None:
    shown = lockstep("prepare", words[0], "tiny", *words[1:], "--device", "cpu", "--dry-run")
    assert (shown.code, shown.err) == (ExitCode.DONE, "")
    assert f"# family {words[0]}, preset tiny" in shown.out
    assert "tokens per step" in shown.out
    assert not list(in_dir.iterdir())


def test_a_dry_run_names_what_would_be_removed(prepare: Cli, in_dir: Path) -> None:
    root = in_dir / ".cache" / "datasets"
    prepare()
    (root / f"{KEY}.checked").write_text("{}", encoding="utf-8")  # of a dataset without a lock
    (root / "lockstep-hashes.json").write_text("{}", encoding="utf-8")
    before = sorted(root.rglob("*"))
    shown = prepare("--clean", "--dry-run")
    assert shown.code == ExitCode.DONE
    assert sorted(root.rglob("*")) == before
    assert shown.out.replace("Would remove", "Removed") == prepare("--clean").out
    assert not list(root.iterdir())


@pytest.mark.parametrize("name", ["train/tokens.npy", "validation/rows.json", "tokenizer.json", "meta.json"])
def test_a_flipped_bit_is_found_named_and_repaired(prepare: Cli, in_dir: Path, name: str) -> None:
    prepare()
    (file,) = (in_dir / ".cache" / "datasets").glob(f"*/{name}")
    before = file.read_bytes()
    middle = len(before) // 2
    file.write_bytes(before[:middle] + bytes([before[middle] ^ 1]) + before[middle + 1 :])
    checked = prepare("--verify")
    assert checked.code == ExitCode.DATA
    assert f"{file.relative_to(in_dir)}: content does not match" in checked.out
    assert prepare("--list").code == ExitCode.DONE  # a look is no check
    again = prepare()
    assert again.code == ExitCode.DONE
    assert "damaged, will be rebuilt" in again.text
    assert file.read_bytes() == before
    assert prepare("--verify").code == ExitCode.DONE


@pytest.mark.parametrize("flag", ["--list", "--verify", "--clean"])
def test_looking_after_datasets_needs_no_family(lockstep: Cli, prepare: Cli, in_dir: Path, flag: str) -> None:
    outcome = lockstep("prepare", flag)
    assert (outcome.code, outcome.err) == (ExitCode.DONE, "")
    assert not list(in_dir.iterdir())
    assert lockstep("prepare", flag, f"data.cache_dir={in_dir / 'x'}").code == ExitCode.DONE
    without = lockstep("prepare")
    assert without.code == ExitCode.USAGE
    assert "FAMILY" in without.err


@pytest.mark.parametrize("flags", [("--list", "--clean"), ("--verify", "--clean"), ("--list", "--verify")])
def test_one_thing_at_a_time(lockstep: Cli, prepare: Cli, in_dir: Path, flags: tuple[str, str]) -> None:
    root = in_dir / ".cache" / "datasets"
    open_or_build(KEY, [root], fill)
    outcome = lockstep("prepare", *flags)
    assert outcome.code == ExitCode.USAGE
    assert flags[0] in outcome.err
    assert (root / KEY).is_dir()


def test_the_older_place_is_not_cleaned(lockstep: Cli, prepare: Cli, in_dir: Path) -> None:
    for place in (".cache", "cache"):
        open_or_build(KEY, [in_dir / place / "datasets"], fill)
    assert str(Path("cache", "datasets", KEY)) in lockstep("prepare", "--list").out
    assert lockstep("prepare", "--clean").code == ExitCode.DONE
    assert not (in_dir / ".cache" / "datasets" / KEY).exists()
    assert (in_dir / "cache" / "datasets" / KEY).is_dir()
    assert lockstep("prepare", "--clean").out == "Nothing to remove\n"


def test_data_is_prepared_where_nothing_could_train_on_it(prepare: Cli, lockstep: Cli, in_dir: Path) -> None:
    """On the login node of a cluster there is no GPU, which float8 needs."""
    assert prepare("--precision", "fp8").code == ExitCode.DONE
    assert len(list((in_dir / ".cache" / "datasets").glob("*/meta.json"))) == 1
    refused = lockstep("train", "llama", "tiny", "--precision", "fp8", "--device", "cpu")
    assert refused.code == ExitCode.USAGE
    assert "--precision bf16" in refused.text
