"""Every path inside a run folder, and the one way to publish a file or folder: all of it or nothing."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.errors import ConfigError, DataError, ExitCode, LockstepError, OutputError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
LATEST = "latest"
CHECKPOINT_NAME = re.compile(r"step_\d{8,}")
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,199}")
HASH_CHUNK_BYTES = 1 << 22
JSON_BYTES = 64 << 20  # no file of ours comes near
SPOILT = "spoilt"  # in a checkpoint's run.json: weights were not finite; kept to be looked at, never to go on from
CONFIG = "config.json"
EXPORTED = (CONFIG, "adapter_config.json")  # with a manifest beside it, which a run has not
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)  # None: the word of a library that keeps no number

Beat = Callable[[], object]  # called as work goes on, for whoever watches


def unwatched() -> None:
    """Nobody wants to know."""


def check_name(name: str, *, what: str = "run name") -> str:
    """A name that is one plain path component, or a refusal."""
    if not SAFE_NAME.fullmatch(name) or ".tmp-" in name:
        raise ConfigError(
            f"{what} {name[:80]!r} is not allowed",
            hint="unaccented letters, digits and . _ + = @ - only, at most 200, starting with a letter or digit",
        )
    return name


@dataclass(frozen=True)
class RunDir:
    """The layout of one run folder. Other commands read these files; nobody calls into a worker."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / CONFIG

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
    def failures(self) -> Path:
        """Where failure.json goes when the run goes on: 001.json and so on."""
        return self.root / "failures"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tb"

    @property
    def files(self) -> Path:
        """Which documented files the run has written elsewhere, if not all of them stay."""
        return self.root / "files.json"

    @property
    def profile(self) -> Path:
        return self.root / "profile.json"

    def worker(self, tag: str, node: int = 0) -> Path:
        """The folder of one worker, e.g. workers/n0-GPU3."""
        return self.root / "workers" / f"n{node}-{tag or 'CPU'}"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"


def create_run(out: Path, name: str, *, before: Callable[[Path], object] = lambda _: None) -> RunDir:
    """A new run folder under `out`. Refuses one that is there already; `before` hears of it before it is made."""
    if name == LATEST:
        raise ConfigError(f"run name {name!r} is the link to the newest run", hint="another --name")
    root = out / check_name(name)
    if root.exists():
        is_run = RunDir(root).config.is_file()  # or it is a check's folder
        go_on = f"lockstep resume {shlex.quote(str(root))}, or " if is_run else ""
        raise ConfigError(f"run {name!r} exists already in {out}", hint=f"{go_on}another --name")
    before(root)
    try:
        root.mkdir(parents=True)
    except OSError as error:
        raise OutputError(
            f"cannot create the run folder: {error.strerror or error}",
            where=str(root),
            hint="--out DIR, a folder you can write to",
        ) from error
    return RunDir(root)


def set_aside(run: RunDir) -> None:
    """Keep the failure that a run goes on after: failure.json is that of the last attempt only."""
    if run.failure.exists():
        run.failures.mkdir(exist_ok=True)
        places = (run.failures / f"{number:03d}.json" for number in itertools.count(1))
        run.failure.replace(next(place for place in places if not place.exists()))


def point_latest(run: RunDir) -> None:
    """Let `latest` beside the run folder lead to it; a name of the user's own there is left alone."""
    link = run.root.parent / LATEST
    if link.is_symlink() or not link.exists():
        temporary = link.with_name(f"{LATEST}.tmp-{uuid.uuid4().hex[:8]}")
        temporary.symlink_to(run.root.name)
        temporary.replace(link)


def probe(folder: Path, *, key: str) -> None:
    """Make sure that files can be written to a folder, before anything depends on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"cannot write here: {error.strerror or error}",
            where=str(folder),
            hint=f"{key}=DIR, a folder you can write to",
        ) from error


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


def sha256(path: Path, beat: Beat = unwatched) -> str:
    """The SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
            beat()
    return digest.hexdigest()


def open_plain(path: Path) -> IO[bytes]:
    """A file to read from, whoever put it there. A pipe or a device, which might never end, is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # who opens a pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> Any:
    """What a JSON file holds, whoever wrote it. If it is none: OSError or ValueError, nothing else, and soon."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > JSON_BYTES:
            raise ValueError(f"larger than {JSON_BYTES >> 20} MiB")
        try:
            return json.loads(file.read())
        except RecursionError:
            raise ValueError("nested too deeply") from None


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step: the one that a link leads to. A pipe or a device is written to."""
    content = (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        write_bytes(path.resolve() if path.is_symlink() else path, content)


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
def publishing(final: Path, beat: Beat = unwatched) -> Generator[Path]:
    """A temporary folder; when the block ends well it gets a manifest and becomes `final`, durably."""
    temporary = stage(final)
    try:
        yield temporary
        publish(temporary, final, beat=beat)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def stage(final: Path) -> Path:
    """A new temporary folder beside `final`, for `publish`."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:12]}")
    temporary.mkdir()
    return temporary


def publish(
    temporary: Path, final: Path, *, known: Mapping[str, Mapping[str, Any]] | None = None, beat: Beat = unwatched
) -> None:
    """Give a temporary folder its manifest and its name, durably. `known`: entries of files others have written."""
    seal(temporary, known=known, beat=beat)
    if final.exists():  # an older save of the same step: out of the way first, gone for good after
        old = final.with_name(f"{final.name}.tmp-old-{uuid.uuid4().hex[:12]}")
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(final)
    fsync_path(final.parent)


def entry(path: Path, beat: Beat = unwatched) -> dict[str, Any]:
    """What a manifest says of a file: its size and SHA-256, every byte of it on the disk."""
    fsync_path(path)
    beat()
    return {"bytes": path.stat().st_size, "sha256": sha256(path, beat)}


def seal(folder: Path, *, known: Mapping[str, Mapping[str, Any]] | None = None, beat: Beat = unwatched) -> None:
    """Write the manifest of a folder: size and SHA-256 of each file, every byte on the disk before it."""
    files: dict[str, Mapping[str, Any]] = {}
    mode = folder.stat().st_mode & 0o666  # the user's umask, which not every writer of tensors respects
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(mode)
            name = path.relative_to(folder).as_posix()
            files[name] = known[name] if known and name in known else entry(path, beat)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": MANIFEST_FORMAT, "files": files}, indent=1) + "\n", encoding="utf-8")
    for path in [manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync_path(path)


def verify(
    folder: Path, *, content: bool = True, required: Sequence[str] = (), share: tuple[int, int] = (0, 1)
) -> None:
    """Raise DataError, naming the file, unless the folder is what its manifest says and holds what is required.

    `share` (i, n): this is reader i of n who divide the files among them; sizes are looked at by each.
    """
    manifest = folder / MANIFEST
    try:
        expected = _read_manifest(manifest)
        for name in required:
            if name not in expected:
                raise DataError(f"the manifest does not name {name}", where=str(manifest))
        for place, (name, (size, digest)) in enumerate(expected.items()):
            _verify_file(folder / name, size, digest if content and place % share[1] == share[0] else "")
    except FileNotFoundError as error:
        if Path(error.filename or "") == manifest:
            raise DataError("no manifest: the save did not finish", where=str(folder)) from None
        raise DataError("missing file", where=str(error.filename)) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(folder)) from None


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    try:
        tree = read_json(path)
        if tree["format"] != MANIFEST_FORMAT:
            raise ValueError(f"format {tree['format']!r}")
        entries = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in tree["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"unreadable manifest ({error})", where=str(path)) from None
    for name in entries:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"manifest names a file outside the folder: {name!r}", where=str(path))
    return entries


def _verify_file(path: Path, size: int, digest: str) -> None:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise DataError("a link, a pipe or a device in place of the file", where=str(path))
    if found.st_size != size:
        raise DataError(f"{found.st_size} bytes, the manifest says {size}", where=str(path))
    if digest and sha256(path) != digest:
        raise DataError("content does not match its SHA-256", where=str(path))


def check_plain(folder: Path) -> None:
    """Refuse a folder from elsewhere in which something that will be written to leads out of it, or never answers."""
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise DataError("a link, a pipe or a device in place of a file", where=str(path), hint=f"rm {path}")


def saved_checkpoints(folder: Path) -> list[Path]:
    """The published checkpoints in a run's checkpoints folder, oldest first; whether they verify is another question.

    Unfinished saves (step_N.tmp-...) and folders of other programs are not among them.
    """
    named = [path for path in folder.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step_")))


def refuse_export(folder: Path) -> None:
    """Nothing goes on from what was written for other programs."""
    found = [name for name in EXPORTED if (folder / name).is_file() and (folder / MANIFEST).is_file()]
    if found:
        train_on = f"; its weights train on by --model.init pretrained --model.model-path {folder}"
        hint = f"the run it was made of{train_on if found == [CONFIG] else ''}"
        raise ConfigError("is an export for other programs, and no run", where=str(folder), hint=hint)


def refuse_streamed(run: Path, family: str) -> None:
    """A run whose dataset grew while it trained: nobody makes its rows in their order again. `stream` lies in it."""
    if (run / "stream").is_dir():
        anew = ["lockstep", "train", family, "--config", str(run / CONFIG), "--name", f"{run.resolve().name}-anew"]
        what = "its dataset grew while it trained, and such rows are not made any more (sample and export still work)"
        raise ConfigError(what, where=str(run), hint=shlex.join(anew))


def sweep(folder: Path) -> list[str]:
    """Remove what unfinished publishing left behind; returns the names. Call it only under the owner's lock."""
    leftovers = sorted(folder.glob("*.tmp-*")) if folder.is_dir() else []
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return [path.name for path in leftovers]


def expanded(text: str, *, where: str = "") -> Path:
    """The path that somebody has written, his home or another user's in place of ~."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        what = f"{text!r} is no path: {str(error).rstrip('.')}"
        raise ConfigError(what, where=where, hint="the whole path, from / on") from error


def io_error(error: OSError, path: Path, *, doing: str, need_bytes: int = 0) -> LockstepError:
    """An OSError as a user should read it: what, where, and for a full disk how much room there is, and is needed."""
    free, hint = "", f"make {path.parent} writable, or name another folder"
    if error.errno in NO_ROOM:
        hint = "free some space, or name a folder on another disk"
        if error.errno == errno.EFBIG:
            hint = "ulimit -f unlimited, should that limit be set here; else a folder on another disk"
        with contextlib.suppress(OSError):
            place = next(parent for parent in (path, *path.parents) if parent.exists())
            needed = f", {need_bytes / 2**20:.1f} MiB needed" if need_bytes else ""
            free = f" ({shutil.disk_usage(place).free / 2**20:.1f} MiB free{needed})"
    what = f"{doing} failed: {error.strerror or error}{free}"
    return LockstepError(what, where=str(path), hint=hint, exit_code=ExitCode.IO)
