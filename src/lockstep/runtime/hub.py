"""The one door to the hub: files of models and datasets by name, from the cache first. No code of a repository runs.

Each process probes the hub once: an unreachable one is reported after 5 seconds. After that, time-outs and retries are
those of the hub's own library, which HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT change.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from lockstep import rundir
from lockstep.errors import ConfigError, DataError, LockstepError, NotFoundError
from lockstep.rundir import expanded, io_error
from lockstep.runtime import env

if TYPE_CHECKING:
    from pydantic import SecretStr

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CODE_KEYS = ("auto_map", "_attn_implementation_internal", "custom_pipelines")  # ask for code of the repository
PUBLIC_HUB = "https://huggingface.co"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
REVISION = re.compile(r"\w[\w./+-]{0,199}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)
PROBE_SECONDS = 5.0
HINT = "check the network, the proxy and HF_ENDPOINT, or use files of your own; gated ones need HF_TOKEN"
_answered: set[str] = set()  # addresses that have answered this process


@dataclass(frozen=True)
class Repo:
    """A repository of the hub."""

    kind: Literal["model", "dataset"]
    name: str
    setting: str  # that named it, for messages
    revision: str = "main"

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


def model(name: str, setting: str = "model.model_path") -> Repo:
    return Repo("model", name, setting)


def dataset(name: str, revision: str = "main") -> Repo:
    return Repo("dataset", name, "data.dataset_name", revision)


def looks_like_id(name: str) -> bool:
    """owner/name, as the hub spells it."""
    return HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def endpoint() -> str:
    """The address of the hub: HF_ENDPOINT, else the public one."""
    address = (env.get("HF_ENDPOINT").strip() or PUBLIC_HUB).rstrip("/")
    try:
        parts = urlsplit(address)
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # no port, no IPv6 address
        sound = False
    if not sound or not address.isascii() or not address.isprintable() or " " in address:
        raise ConfigError(f"{address[:80]!r} is no address", where="HF_ENDPOINT", hint=f"{PUBLIC_HUB}, or unset it")
    return address


def cache_folder() -> Path:
    """Where the hub's own client keeps what it downloaded."""
    if named := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return expanded(named, where="HF_HUB_CACHE")
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return expanded(home, where="HF_HOME") / "hub"


def offline() -> str:
    """The variable that forbids to ask the hub; '': none does."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    return next((name for name in names if env.get(name).upper() in ("1", "ON", "YES", "TRUE")), "")


def token_of(secret: SecretStr | None) -> str | None:
    """The token that a configuration holds, for `bearer`."""
    return secret.get_secret_value().strip() or None if secret else None


def bearer(given: str | None) -> str | None:
    """What goes into the header. None: the library looks for a login of its own."""
    found = (given, env.get("HF_TOKEN"), env.get("HUGGING_FACE_HUB_TOKEN"))
    token = next((text.strip() for text in found if text and text.strip()), None)
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("the token has characters that no token has", where="HF_TOKEN", hint="copy it once more")
    env.hide(token)  # as it is sent: the variable may have blanks around it
    return token


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file someone else wrote, or a DataError that names it."""
    try:
        tree = rundir.read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"unreadable: {error}", where=str(path)) from None
    if not isinstance(tree, dict):
        raise DataError("expected a JSON object", where=str(path))
    return cast("dict[str, Any]", tree)


# --------------------------------------------------------------------------------------------- models


def download(model_id: str, filename: str, *, token: str | None = None) -> Path:
    """One file of a model, at the revision that was first met; any failure is one message."""
    path = fetch(model(model_id), filename, token=token)
    if filename == CONFIG_FILE:
        say_what_is_not_run(model_id, path)
    return path


def weights_folder(model_path: str, *, token: str | None = None) -> Path:
    """A local folder with the weights of a model: the folder itself, or a download."""
    folder = expanded(model_path, where="model.model_path")
    if folder.is_dir():
        return folder
    if not looks_like_id(model_path):
        raise NotFoundError(
            f"no weights for {model_path!r}: not a folder, not a hub id", where="model.model_path", hint="owner/name"
        )
    download(model_path, CONFIG_FILE, token=token)  # a quick no before a long yes
    repo = model(model_path)
    if (single := cached(repo, WEIGHTS_FILE)) is not None:
        return single.parent
    try:
        index = fetch(repo, INDEX_FILE, token=token)
    except MissingFileError:
        try:
            return fetch(repo, WEIGHTS_FILE, token=token).parent
        except MissingFileError:
            raise NotFoundError(
                f"{repo} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; no other form of weights is read",
                where="model.model_path",
                hint="a model with safetensors weights, or model.init=random",
            ) from None
    listed: object = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise DataError("no weight_map", where=str(index))
    shards = sorted({str(name) for name in cast("dict[str, Any]", listed).values()})
    for number, name in enumerate(shards, 1):
        if not SHARD.fullmatch(name):
            raise DataError(f"{name[:80]!r} is not the name of a safetensors file", where=str(index))
        fetch(repo, name, token=token, what=f"Downloading {name} ({number} of {len(shards)})")
    return index.parent


def available(model_id: str, filename: str, *, token: str | None = None) -> str:
    """'' if a file of a model is here or the hub would give it, else the reason."""
    repo = model(model_id)
    if not looks_like_id(model_id):
        return f"{model_id!r} is no name of the hub"
    if cached(repo, filename) is not None:
        return ""
    if variable := offline():
        return f"{variable} is set"
    if find_spec("huggingface_hub") is None:
        return "huggingface_hub is not installed"
    return probe_file(repo, filename, token=token)


def say_what_is_not_run(model_path: str, config: Path) -> None:
    """One line about a model, of the hub or of a folder, that brings code."""
    if asked := [key for key in CODE_KEYS if key in read_json(config)]:
        logger.warning("%s asks for code of its own (%s), which is never run", model_path, ", ".join(asked))


# --------------------------------------------------------------------------------------------- any repository


class MissingFileError(NotFoundError):
    """The repository is there, the file is not."""


def fetch(repo: Repo, filename: str, *, revision: str = "main", token: str | None = None, what: str = "") -> Path:
    """A file of a repository: from the cache without a request, else downloaded whole. `what`: said before that."""
    if (path := cached(repo, filename, revision)) is not None:
        return path
    hub = client()
    pinned = local_commit(repo, revision) or revision  # never two files of one model from two revisions

    def ask() -> str:
        return hub.hf_hub_download(
            repo.name, filename, repo_type=repo.kind, revision=pinned, cache_dir=str(cache_folder()),
            token=bearer(token), endpoint=endpoint(),
        )  # fmt: skip

    if what:
        logger.info("%s", what)
    return Path(asking(replace(repo, revision=revision), ask, token=token, file=filename))


def cached(repo: Repo, filename: str, revision: str = "main") -> Path | None:
    """The file as it was downloaded before; no request is made."""
    commit = local_commit(repo, revision)
    path = _folder(repo) / "snapshots" / (commit or revision) / filename
    with contextlib.suppress(OSError):
        return path if ".." not in filename.split("/") and path.is_file() else None
    return None


def absent(repo: Repo, filename: str, revision: str = "main") -> bool:
    """Whether the hub has said before that there is no such file; no request is made."""
    return (_folder(repo) / ".no_exist" / (local_commit(repo, revision) or revision) / filename).is_file()


def local_commit(repo: Repo, revision: str) -> str:
    """The commit that a branch or tag was when it was first met; '': never met."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        found = (_folder(repo) / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return found if COMMIT.fullmatch(found) else ""


def _folder(repo: Repo) -> Path:
    return cache_folder() / "--".join((f"{repo.kind}s", *repo.name.split("/")))


# --------------------------------------------------------------------------------------------- asking


def client() -> Any:
    """The hub's library, set up."""
    endpoint()  # the library crashes over one that is no address, as soon as it is imported
    try:
        hub = import_module("huggingface_hub")
        constants: Any = import_module("huggingface_hub.constants")
    except ImportError:
        raise LockstepError(
            "the model hub needs a package that is missing", hint="pip install huggingface-hub"
        ) from None
    constants.HF_HUB_DISABLE_TELEMETRY = True  # else it asks a question of its own before the first of ours
    constants.HF_HUB_DISABLE_XET = True  # a second way to transfer, with time-outs and retries of its own
    session = hub.get_session()
    hooks = session.event_hooks
    if _limit not in hooks["request"]:
        ours = {"request": [*hooks["request"], _limit], "response": [*hooks["response"], _refuse_whole_file]}
        hub.set_client_factory(lambda: type(session)(follow_redirects=True, timeout=None, event_hooks=ours))
    return hub


def _limit(request: Any) -> None:
    """The library asks for lists without a time-out: a server that falls silent would be waited for for ever."""
    seconds = import_module("huggingface_hub.constants").HF_HUB_DOWNLOAD_TIMEOUT
    given: dict[str, float | None] = request.extensions.get("timeout") or {}
    limits = {kind: given.get(kind) or seconds for kind in ("connect", "read", "write", "pool")}
    request.extensions = {**request.extensions, "timeout": limits}


def _refuse_whole_file(response: Any) -> None:
    """Who asked for a part of a file does not want all of it, of any size, in memory."""
    asked: str = response.request.headers.get("Range", "")
    if response.status_code == 200 and asked and not asked.endswith("-"):  # bytes=5-: the rest of a download
        what = f"the hub does not serve parts of files ({response.request.url.host})"
        raise NotFoundError(what, where="data.streaming", hint="data.streaming=false, or another HF_ENDPOINT")


def asking(repo: Repo, ask: Callable[[], Result], *, token: str | None = None, file: str = "") -> Result:
    """Do something with the hub's library; whatever goes wrong is one message for the user."""
    if variable := offline():
        raise NotFoundError(
            f"{file or 'the list of files'} of {repo} is not in {cache_folder()}, and {variable} forbids to ask for it",
            where=repo.setting,
            hint=f"unset {variable}, or fetch it once where there is a network (gated ones need HF_TOKEN)",
        )
    if reason := _unreachable():
        what = f"the hub does not give {_subject(repo, file)}: {endpoint()} {reason}"
        raise UnreachableError(what, where=repo.setting, hint=HINT)
    try:
        return ask()
    except LockstepError:
        raise
    except Exception as error:
        raise explain(repo, error, token=bearer(token), file=file) from None


def _unreachable() -> str:
    """'' if the hub answers, whatever it says, else why not; one that has answered once is not probed again."""
    address, session = endpoint(), client().get_session()
    failures: list[Exception] = []

    def ask() -> None:
        try:
            session.head(address, timeout=PROBE_SECONDS)
            _answered.add(address)
        except Exception as error:
            failures.append(error)

    if address not in _answered:  # in a thread that can be left behind: looking up a name knows no time-out
        thread = threading.Thread(target=ask, daemon=True, name="hub")
        thread.start()
        thread.join(PROBE_SECONDS)
    if address in _answered:
        return ""
    said = f" ({type(failures[0]).__name__})" if failures else f" in {PROBE_SECONDS:.0f} s"
    return f"cannot be reached{said}"


def probe_file(repo: Repo, filename: str, *, token: str | None) -> str:
    """'' if the hub would give a file, else why not; nothing of it is fetched."""
    hub = client()
    url = hub.hf_hub_url(repo.name, filename, repo_type=repo.kind, revision=repo.revision, endpoint=endpoint())

    def ask() -> object:
        return hub.get_hf_file_metadata(url, token=bearer(token), endpoint=endpoint())

    try:
        asking(repo, ask, token=token, file=filename)
    except NotFoundError as error:
        return error.what
    return ""


class UnreachableError(NotFoundError):
    """No hub, or none that answers."""


def _subject(repo: Repo, file: str) -> str:
    return f"{file} of {repo}" if file else str(repo)


def explain(repo: Repo, error: Exception, *, token: str | None, file: str = "") -> LockstepError:
    """What went wrong, in words of our own; those of a server might repeat what was sent to it."""
    kind, status, subject = type(error).__name__, _status_of(error), _subject(repo, file)
    if status in (401, 403) or kind == "GatedRepoError":
        return _forbidden(repo, status, has_token=bool(token))
    if kind == "RevisionNotFoundError":
        return NotFoundError(
            f"{repo} has no revision {repo.revision!r}", where=repo.setting, hint="another one after the @"
        )
    if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return MissingFileError(f"{repo} has no file {file}", where=repo.setting, hint="check the name")
    if kind == "RepositoryNotFoundError" or status == 404:
        return NotFoundError(
            f"the hub has no {repo} for you ({endpoint()})",
            where=repo.setting,
            hint="check the name and HF_ENDPOINT; a private one needs HF_TOKEN of an account that may see it",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return io_error(error, cache_folder(), doing=f"keeping {subject}")
    what = f"the hub does not give {subject}: {endpoint()}"
    if status == 429:
        hint = "wait, or set HF_TOKEN: known users may ask more often"
        return NotFoundError(f"{what} answered 429: too many requests", where=repo.setting, hint=hint)
    if status:
        return NotFoundError(f"{what} answered {status}", where=repo.setting, hint=HINT)
    first = _causes(error)[-1]  # the words of the library are about its cache
    said = env.redact(f"{type(first).__name__}: {first}".splitlines()[0][:200], (token,) if token else ())
    return UnreachableError(f"{what} {said}", where=repo.setting, hint=HINT)


def _status_of(error: Exception) -> int:
    """The HTTP status behind an error of the hub's libraries; 0: none."""
    found = (getattr(getattr(cause, "response", None), "status_code", None) for cause in _causes(error))
    return next((status for status in found if isinstance(status, int)), 0)


def _causes(error: BaseException) -> list[BaseException]:
    """An error and what led to it."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain


def _forbidden(repo: Repo, status: int, *, has_token: bool) -> NotFoundError:
    page = f"{endpoint()}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.name}"
    if has_token:
        what = f"the hub refuses {repo} to the owner of HF_TOKEN (answered {status})"
        hint = f"a valid HF_TOKEN (or --hf-token) of an account that {page} has given access"
    else:
        what = f"the hub gives {repo} to known users only, if it exists (answered {status}), and HF_TOKEN is not set"
        hint = f"HF_TOKEN=... (or --hf-token), of an account that {page} has given access"
    return NotFoundError(what, where=repo.setting, hint=hint)
