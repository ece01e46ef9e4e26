"""A place on a terminal that is redrawn as it is, and gone when it is left. Torch-free."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType


class Place:
    """What does not fit is left out."""

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def draw(self, picture: Any) -> None:
        self._live.update(picture, refresh=True)
