"""One errand to the hub: how long it is waited for, how often it is asked again, and when to give up.

The libraries of the hub retry on their own, each call anew, and sleep as long as a server tells them to. Here they get
an HTTP client that decides all of this in one place, so that whatever they do the whole errand ends in time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

from lockstep.runtime import env

logger = logging.getLogger(__name__)

AGAIN = (408, 425, 429, 500, 502, 503, 504)  # answers that may be another one in a moment
PROGRESS_SECONDS = 5.0
POLL_SECONDS = 0.05
FORGIVE_BYTES = 16 << 20  # after so many, what went wrong before is forgotten: a long download may have bad moments
GRACE_SECONDS = 2.0  # for an answer that is on its way when time is up
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """What is put up with. HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT lengthen it."""

    connect_seconds: float = 5.0
    answer_seconds: float = 10.0  # until the first byte, and from one to the next
    patience_seconds: float = 25.0  # of waiting for nothing, all in all
    stall_seconds: float = 20.0  # of waiting within which a body must bring
    stall_bytes: int = 4096  # so much
    retries: int = 2
    pause_seconds: float = 1.0  # before the first retry; doubled for each


LIMITS = Limits()


def limits() -> Limits:
    """The limits, as the variables of the hub's own client lengthen them."""
    asked = [env.get(name) for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")]
    seconds = max((float(text) for text in asked if text.isdigit()), default=0.0)
    found = LIMITS
    return replace(
        found,
        answer_seconds=max(found.answer_seconds, seconds),
        patience_seconds=max(found.patience_seconds, seconds),
        stall_seconds=max(found.stall_seconds, seconds),
    )


class GaveUp(Exception):
    """The hub did not deliver. Neither an HTTP error nor an OSError, so that no library tries again."""

    def __init__(self, reason: str, *, status: int = 0, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.hint = hint


class Errand:
    """What is known about the requests of one errand; several threads may run for it."""

    def __init__(self, what: str, allowed: Limits) -> None:
        self.what = what
        self.limits = allowed
        self.requests = 0
        self.received_bytes = 0
        self.failure: GaveUp | None = None
        self.refused = 0  # 401 or 403, which some callers take for "not there"
        self._retries, self._good_bytes = 0, 0  # bytes since the last retry
        self._idle_seconds = 0.0  # waited since something came
        self._waiting: dict[int, float] = {}  # thread -> since when
        self._window_seconds, self._window_bytes = 0.0, 0
        self._started = self._reported = time.monotonic()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """While the network is waited for: the only time that counts."""
        if self.failure:
            raise self.failure
        thread, start = threading.get_ident(), time.monotonic()
        self._waiting[thread] = start
        try:
            yield
        finally:
            del self._waiting[thread]
            with self._lock:
                self._idle_seconds += time.monotonic() - start
                self._window_seconds += time.monotonic() - start

    def overdue(self) -> bool:
        """Whether some thread waits for longer than it may: a name server that never answers knows no time-out."""
        limit = self.limits.patience_seconds + GRACE_SECONDS
        return any(time.monotonic() - start > limit for start in list(self._waiting.values()))

    def timeouts(self) -> dict[str, float]:
        """Of the next request, in the form of the HTTP client."""
        left = max(self.limits.patience_seconds - self._idle_seconds, 0.1)
        answer = min(self.limits.answer_seconds, left)
        connect = min(self.limits.connect_seconds, left)
        return {"connect": connect, "read": answer, "write": answer, "pool": answer}

    def came(self, size: int = 0) -> None:
        """Something arrived: an answer, or bytes of one."""
        with self._lock:
            self.received_bytes += size
            self._window_bytes += size
            self._good_bytes += size
            if self._good_bytes >= FORGIVE_BYTES:
                self._retries = 0
            if size == 0:  # a new answer begins
                self._window_seconds, self._window_bytes = 0.0, 0
            if size == 0 or self._window_bytes >= self.limits.stall_bytes:
                self._idle_seconds = 0.0
            if self._window_seconds < self.limits.stall_seconds:
                return
            brought, seconds = self._window_bytes, self._window_seconds
            self._window_seconds, self._window_bytes = 0.0, 0
        if brought < self.limits.stall_bytes:
            raise self.give_up(f"it sends {brought} bytes in {seconds:.0f} s")

    def again(self, reason: str, *, after: float | None = None, status: int = 0) -> float:
        """Seconds to wait before asking again, if that is still allowed."""
        with self._lock:
            pause = self.limits.pause_seconds * 2**self._retries if after is None else after
            self._retries, self._good_bytes = self._retries + 1, 0
            allowed = self._retries <= self.limits.retries
            fits = self._idle_seconds + pause < self.limits.patience_seconds
            if allowed and fits and not self.failure:
                self._idle_seconds += pause
                return pause
        if after is not None and not fits:
            reason += f" and wants to be left alone for {after:.0f} s"
        raise self.give_up(reason, status=status)

    def give_up(self, reason: str, *, status: int = 0, hint: str = "") -> GaveUp:
        """The end of the errand, for every thread of it."""
        hint = hint or ("wait, or set HF_TOKEN: known users may ask more often" if status == 429 else "")
        self.failure = self.failure or GaveUp(reason, status=status, hint=hint)
        return self.failure

    def report(self, total_bytes: int = 0) -> None:
        """Say now and then how far a long download is."""
        now = time.monotonic()
        if now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            of = f" of {total_bytes / 2**20:.0f}" if total_bytes else ""
            rate = self.received_bytes / 2**20 / (now - self._started)
            logger.info("%s: %.0f%s MiB, %.1f MiB/s", self.what, self.received_bytes / 2**20, of, rate)


_current: Errand | None = None
_mine = threading.local()  # a thread that was left behind stays with its own errand, which has failed
_door = threading.RLock()  # one errand at a time: it is one door


def run(what: str, ask: Callable[[], Result], allowed: Limits | None = None) -> Result:
    """Do something with the hub's libraries; GaveUp if the hub does not deliver, else whatever they raise."""
    global _current
    with _door:
        errand = _current = Errand(what, allowed or limits())
        try:
            result = _watched(errand, ask)
            if errand.failure:  # which a library has taken for an empty folder
                raise errand.failure
            return result
        except Exception as error:
            if errand.failure:
                raise errand.failure from None
            if errand.refused and status_of(error) not in (401, 403):
                raise GaveUp(f"answered {errand.refused}", status=errand.refused) from None
            raise
        finally:
            _current = None


def _watched(errand: Errand, ask: Callable[[], Result]) -> Result:
    """In a thread that can be left behind, because a look-up of a name cannot be interrupted."""
    answer: list[Result] = []
    problem: list[BaseException] = []

    def work() -> None:
        _mine.errand = errand
        try:
            answer.append(ask())
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=work, daemon=True, name="hub")
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_SECONDS)
            if errand.overdue():
                raise errand.give_up(f"no answer in {errand.limits.patience_seconds:.0f} s")
    finally:
        if thread.is_alive():
            errand.give_up("stopped")  # it ends at its next byte and tidies up after itself
    if problem:
        raise problem[0]
    return answer[0]


def status_of(error: BaseException) -> int:
    """The HTTP status behind an error of the hub's libraries; 0: none."""
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(getattr(seen, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        seen = seen.__cause__ or seen.__context__
    return 0


def install() -> None:
    """Give the hub's libraries our client; outside an errand it does what theirs does."""
    hub = import_module("huggingface_hub")
    if getattr(hub.get_session(), "lockstep", False):
        return
    modules = (base.__module__.partition(".")[0] for base in type(hub.get_session()).__mro__)
    http = import_module(next(name for name in modules if name.startswith("httpx")))
    hub.set_client_factory(lambda: _client_class(http)(follow_redirects=True, timeout=None))


def _client_class(http: Any) -> Any:
    constants = import_module("huggingface_hub.constants")
    offline = import_module("huggingface_hub.errors").OfflineModeIsEnabled

    base: Any = http.Client

    class Client(base):
        """Asks again where that helps, and watches every byte."""

        lockstep = True

        def send(self, request: Any, *, stream: bool = False, **rest: Any) -> Any:
            errand: Errand | None = getattr(_mine, "errand", None) or _current
            if errand is None:
                if constants.HF_HUB_OFFLINE:
                    raise offline(f"HF_HUB_OFFLINE is set: {request.url.host} is not asked")
                return base.send(self, request, stream=stream, **rest)
            while True:
                response = self._ask(errand, request, rest)
                if not stream and "Range" in request.headers and response.is_success and response.status_code != 206:
                    response.close()  # the whole file, of any size, into memory
                    hint = "data.streaming=false, or another HF_ENDPOINT"
                    raise errand.give_up("does not serve parts of files", status=response.status_code, hint=hint)
                response.stream = _watched_body(http, response, errand)
                with contextlib.suppress(http.TransportError):  # broken off, which was counted
                    if not stream:
                        response.read()
                    return response

        def _ask(self, errand: Errand, request: Any, rest: dict[str, Any]) -> Any:
            while True:
                request.extensions = {**request.extensions, "timeout": errand.timeouts()}
                errand.requests += 1
                try:
                    with errand.waiting():
                        response: Any = base.send(self, request, stream=True, **rest)
                except http.TransportError as error:
                    time.sleep(errand.again(_words(http, error)))
                    continue
                if response.status_code not in AGAIN:
                    errand.came()
                    if response.status_code in (401, 403):
                        errand.refused = response.status_code
                    return response
                response.close()
                after: str = response.headers.get("Retry-After", "")
                wait = float(after) if after.isdigit() else None
                time.sleep(errand.again(_said(response), after=wait, status=response.status_code))

    return Client


def _watched_body(http: Any, response: Any, errand: Errand) -> Any:
    inner = response.stream
    size = response.headers.get("Content-Length", "")

    class Body(http.SyncByteStream):
        """The bytes of an answer, as they come."""

        def __iter__(self) -> Iterator[bytes]:
            chunks = iter(inner)
            while True:
                try:
                    with errand.waiting():
                        chunk = next(chunks, None)
                except http.TransportError as error:  # the library goes on from here, as often as it may
                    errand.again(f"the answer breaks off ({_words(http, error)})")
                    raise
                if chunk is None:
                    return
                errand.came(len(chunk))
                errand.report(int(size) if size.isdigit() else 0)
                yield chunk

        def close(self) -> None:
            inner.close()

    return Body()


def _said(response: Any) -> str:
    return "answered 429: too many requests" if response.status_code == 429 else f"answered {response.status_code}"


def _words(http: Any, error: Exception) -> str:
    """A failure of the network in a few words of our own: those of the client may hold what was sent."""
    if isinstance(error, http.ConnectTimeout | http.ConnectError):
        return "cannot be reached"
    if isinstance(error, http.TimeoutException):
        return "no answer in time"
    if isinstance(error, http.ProxyError):
        return "the proxy refuses"
    return "the connection breaks off"
