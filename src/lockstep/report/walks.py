"""An agent on its grid, in the terminal: where it has been, where it is, what pays. Pure drawing. Torch-free.

x grows to the right and y upwards, as in a diagram.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any

from lockstep.report.live import Place

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.:-=+*#"
GAP, LABEL = 3, 13  # columns between two pictures; of `episode 1,000`
STYLES = {"agent": "bold black on bright_green", "goal": "bold yellow", "trail": "cyan", "floor": "bright_black"}


@dataclass(frozen=True)
class Letters:
    """How things are drawn; each as wide as the others."""

    floor: str = "·"
    trail: str = "•"
    agent: str = "@"
    goals: tuple[str, ...] = ("G",)
    found: str = "★"  # an agent on the cell that pays now
    bars: str = BARS
    to: str = "→"


FINE, PLAIN = Letters(), Letters(".", "o", "@", ("G",), "*", PLAIN_BARS, "->")
KEY_AND_DOOR = ("K", "D")


def letters_for(encoding: str | None, targets: int) -> Letters:
    """What a stream of that encoding can show; two targets are a key and a door."""
    try:
        "".join((FINE.floor, FINE.trail, FINE.found, FINE.bars, FINE.to)).encode(encoding or "ascii")
        chosen = FINE
    except (UnicodeEncodeError, LookupError):
        chosen = PLAIN
    return chosen if targets < 2 else dataclasses.replace(chosen, goals=KEY_AND_DOOR)


def legend(letters: Letters) -> str:
    """What the letters mean."""
    names = ("goal",) if len(letters.goals) == 1 else ("key", "door")
    goals = "".join(f"{letter} {name}  " for letter, name in zip(letters.goals, names, strict=True))
    return f"{letters.agent} agent  {goals}{letters.trail} trail  {letters.found} paid"


@dataclass(frozen=True)
class Scene:
    """One moment of an episode. Cells are numbers x * size + y."""

    size: int
    targets: tuple[int, ...]  # the goal, or the key and the door
    trail: tuple[int, ...]  # the cells of this episode so far, the present one last
    paid: bool = False  # by the step that led here
    held: int = 0  # targets that are found and gone


def cells(scene: Scene, letters: Letters) -> list[list[tuple[str, str]]]:
    """Rows from the top, each of (letter, kind)."""
    size, here = scene.size, scene.trail[-1]
    drawn: dict[int, tuple[str, str]] = dict.fromkeys(scene.trail, (letters.trail, "trail"))
    for place, cell in reversed(list(enumerate(scene.targets))):  # of two in one cell the next to be found is seen
        if place >= scene.held or len(scene.targets) == 1:
            drawn[cell] = (letters.goals[place], "goal")
    drawn[here] = (letters.found if scene.paid else letters.agent, "agent")
    floor = (letters.floor, "floor")
    return [[drawn.get(x * size + y, floor) for x in range(size)] for y in reversed(range(size))]


def grid(scene: Scene, letters: Letters) -> list[str]:
    """The same as plain lines."""
    return [" ".join(letter for letter, _ in row) for row in cells(scene, letters)]


def bars(values: Sequence[float], top: float, width: int, letters: Letters) -> str:
    """A curve in one line, from 0 to `top`; of more values than columns the means of equal runs."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [round(place * len(values) / count) for place in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    last = len(letters.bars) - 1
    return "".join(letters.bars[max(0, min(last, round(last * mean / top))) if top else 0] for mean in means)


def side_by_side(pictures: Sequence[Sequence[str]], *, gap: int = GAP) -> list[str]:
    """Pictures of any heights and widths as one row."""
    tall = max(map(len, pictures), default=0)
    padded = [[*picture, *[""] * (tall - len(picture))] for picture in pictures]
    widths = [max(map(len, picture)) for picture in padded]
    return [
        (" " * gap).join(line.ljust(wide) for line, wide in zip(parts, widths, strict=True)).rstrip()
        for parts in zip(*padded, strict=True)
    ]


def room_for(size: int, width: int, *, gap: int = GAP) -> int:
    """How many grids stand beside each other."""
    return max(1, (width + gap) // (max(2 * size - 1, LABEL) + gap))


def shown_episodes(count: int, room: int) -> list[int]:
    """Which ones, from 0: the first, in which all is new, and the last, in which all is known."""
    if count <= room:
        return list(range(count))
    return [*range(room - 1), count - 1] if room > 1 else [count - 1]


def curve(values: Sequence[float], best: float, letters: Letters, *, width: int, last: int) -> list[str]:
    """The returns of all episodes in two lines: bars, and words."""
    ends = list(values[-last:])
    return [
        bars(values, best, width, letters),
        f"return by episode, 1 to {len(values)}: {values[0]:.2f} {letters.to} {sum(ends) / len(ends):.2f} "
        f"(last {last}) of {best:.2f}",
    ]


class View(Place):
    """The place on a terminal where the agent walks, redrawn in place. What does not fit is left out."""

    def __init__(self, stream: IO[str], letters: Letters) -> None:
        super().__init__(stream)
        self._letters = letters

    def show(self, scene: Scene, above: str, below: Sequence[str]) -> None:
        """One moment, with a line over it and some under it."""
        self.draw(self._picture(scene, above, below))

    def _picture(self, scene: Scene, above: str, below: Sequence[str]) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(above, style="bold")]
        for row in cells(scene, self._letters):
            line = Text("  ")
            for place, (letter, kind) in enumerate(row):
                line.append(" " if place else "")
                line.append(letter, style=STYLES[kind])
            lines.append(line)
        lines += [Text(words) for words in below]
        for line in lines:
            line.no_wrap = True
            line.truncate(self._console.width)
        return Group(*lines[: max(1, self._console.height - 1)])
