"""Every path inside a run folder, and the one way to publish a file or folder: all of it or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, DataError, ExitCode, LockstepError, OutputError

MANIFEST = "manifest.json"
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}")
HASH_CHUNK_BYTES = 1 << 22


def check_name(name: str, *, what: str = "run name") -> str:
    """A name that is one plain path component, or a refusal."""
    if not SAFE_NAME.fullmatch(name) or ".tmp-" in name:
        raise ConfigError(
            f"{what} {name[:80]!r} is not allowed",
            hint="letters, digits and . _ + = @ - only, at most 200, starting with a letter or digit",
        )
    return name


@dataclass(frozen=True)
class RunDir:
    """The layout of one run folder. Other commands read these files; nobody calls into a worker."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def env(self) -> Path:
        return self.root / "env.json"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def failure(self) -> Path:
        return self.root / "failure.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tb"

    @property
    def profile(self) -> Path:
        return self.root / "profile.json"

    def worker(self, tag: str) -> Path:
        """The folder of one worker, e.g. workers/n0-GPU3."""
        return self.root / "workers" / f"n0-{tag or 'CPU'}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"


def create_run(out: Path, name: str) -> RunDir:
    """A new run folder under `out`, and `latest` pointing to it. Refuses a folder that holds a run already."""
    root = out / check_name(name)
    if root.exists():
        raise ConfigError(f"run {name!r} exists already in {out}", hint=f"lockstep resume {root}, or another --name")
    try:
        root.mkdir(parents=True)
        link = out / f"latest.tmp-{uuid.uuid4().hex[:8]}"
        link.symlink_to(name)
        link.replace(out / "latest")
    except OSError as error:
        raise OutputError(
            f"cannot create the run folder: {error.strerror or error}",
            where=str(root),
            hint="--out DIR, a folder you can write to",
        ) from error
    return RunDir(root)


def timestamp() -> str:
    """Now, as it stands in folder names."""
    return time.strftime("%Y%m%d-%H%M%S")


def fsync_path(path: Path) -> None:
    """Make a file or a folder's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new one."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary path; when the block ends well it becomes `path`, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        yield temporary
        fsync_path(temporary)
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def publishing(final: Path) -> Generator[Path]:
    """A temporary folder; when the block ends well it gets a manifest and becomes `final`, durably."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:12]}")
    temporary.mkdir()
    try:
        yield temporary
        seal(temporary)
        if final.exists():  # an older save of the same step: out of the way first, gone for good after
            old = final.with_name(f"{final.name}.tmp-old-{uuid.uuid4().hex[:12]}")
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(final)
        fsync_path(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seal(folder: Path) -> None:
    """Write the manifest of a folder: size and SHA-256 of each file, every byte on the disk before it."""
    files: dict[str, dict[str, Any]] = {}
    mode = folder.stat().st_mode & 0o666  # the user's umask, which not every writer of tensors respects
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(mode)
            fsync_path(path)
            files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "files": files}, indent=1) + "\n", encoding="utf-8")
    for path in [manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync_path(path)


def verify(folder: Path, *, content: bool = True) -> None:
    """Raise DataError, naming the file, unless the folder is exactly what its manifest says."""
    manifest = folder / MANIFEST
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        raise DataError("no manifest: the save did not finish", where=str(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"unreadable manifest ({error})", where=str(manifest)) from None
    for name, (size, digest) in expected.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"manifest names a file outside the folder: {name!r}", where=str(manifest))
        if not path.is_file():
            raise DataError("missing file", where=str(path))
        if path.stat().st_size != size:
            raise DataError(f"{path.stat().st_size} bytes, the manifest says {size}", where=str(path))
        if content and sha256(path) != digest:
            raise DataError("content does not match its SHA-256", where=str(path))


def sweep(folder: Path) -> list[str]:
    """Remove what unfinished publishing left behind; returns the names. Call it only under the owner's lock."""
    leftovers = sorted(folder.glob("*.tmp-*")) if folder.is_dir() else []
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in leftovers]


def io_error(error: OSError, path: Path, *, doing: str) -> LockstepError:
    """An OSError as a user should read it: what, where, how much room there is."""
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(path if path.exists() else path.parent).free / 2**20:.0f} MiB free)"
    return LockstepError(
        f"{doing} failed: {error.strerror or error}{free}",
        where=str(path),
        hint="free some space or use --out",
        exit_code=ExitCode.IO,
    )
