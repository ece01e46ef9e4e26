"""The one door to the model hub: its files by id, quick to say no."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from lockstep.errors import DataError, LockstepError, NotFoundError

CONFIG_FILE = "config.json"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", CONFIG_FILE)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
DEADLINE_SECONDS = 15.0
JSON_LIMIT_BYTES = 64 << 20  # the index of a 1,000-layer model has 1 MB
Result = TypeVar("Result")


def looks_like_id(name: str) -> bool:
    """owner/name, as the hub spells it."""
    return HUB_ID.fullmatch(name) is not None and ".." not in name


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file someone else wrote, or a DataError that names it."""
    try:
        if path.stat().st_size > JSON_LIMIT_BYTES:
            raise DataError(f"larger than {JSON_LIMIT_BYTES >> 20} MiB", where=str(path))
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"unreadable: {error}", where=str(path)) from None
    if not isinstance(tree, dict):
        raise DataError("expected a JSON object", where=str(path))
    return cast("dict[str, Any]", tree)


def download(model_id: str, filename: str, *, token: str | None = None) -> Path:
    """One small file of a model; any failure is one NotFoundError within 30 seconds."""
    hub = _hub()
    return Path(_within_deadline(lambda: hub.hf_hub_download(model_id, filename, token=token), model_id))


def weights_folder(model_path: str, *, token: str | None = None) -> Path:
    """A local folder with the weights of a model: the folder itself, or a download."""
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder
    if not looks_like_id(model_path):
        raise NotFoundError(
            f"no weights for {model_path!r}: not a folder, not a hub id", where="model.model_path", hint="owner/name"
        )
    download(model_path, CONFIG_FILE, token=token)  # a quick no before a long yes
    hub = _hub()
    try:
        return Path(hub.snapshot_download(model_path, allow_patterns=list(WEIGHT_FILES), token=token))
    except Exception as error:
        raise _not_given(model_path, error) from None


def _hub() -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import logging
    except ImportError:
        raise LockstepError(
            "the model hub needs a package that is missing", hint="pip install huggingface-hub"
        ) from None
    logging.set_verbosity_error()  # its retries would print over our one message
    return huggingface_hub


def _within_deadline(ask: Callable[[], Result], model_id: str) -> Result:
    """The client's own time-outs add up over its retries; a daemon thread can be left behind."""
    answer: list[Result] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            answer.append(ask())
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="hub")
    thread.start()
    thread.join(DEADLINE_SECONDS)
    if answer:
        return answer[0]
    raise _not_given(model_id, failure[0] if failure else TimeoutError(f"no answer in {DEADLINE_SECONDS:.0f} s"))


def _not_given(model_id: str, error: Exception) -> NotFoundError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return NotFoundError(
        f"the hub does not give {model_id!r}: {reason}",
        where="model.model_path",
        hint="check the network and the id; gated models need HF_TOKEN (or --hf-token); or name a local folder",
    )
