"""How an agent walked, as plain lines: one episode on its grid, and the returns of all. Torch-free.

x grows to the right and y upwards, as in a diagram. A cell is the number x * size + y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"
BAR_COLUMNS = 60
FLOOR, TRAIL, AGENT, PAID = "·", "•", "@", "★"


def legend(targets: Mapping[str, str]) -> str:
    """What the letters mean; `targets` are letters and their names."""
    named = "".join(f"{letter} {name}  " for letter, name in targets.items())
    return f"{AGENT} agent  {named}{TRAIL} trail  {PAID} paid"


def grid(size: int, trail: Sequence[int], targets: Mapping[int, str], *, paid: bool) -> list[str]:
    """An episode so far: the cells of its trail, the present one last, and the letter of each cell that still pays."""
    drawn = dict.fromkeys(trail, TRAIL) | dict(targets) | {trail[-1]: PAID if paid else AGENT}
    return [" ".join(drawn.get(x * size + y, FLOOR) for x in range(size)) for y in reversed(range(size))]


def bars(values: Sequence[float], top: float) -> str:
    """A curve in one line, from 0 to `top`; of more values than columns the means of equal runs."""
    count = min(BAR_COLUMNS, len(values))
    bounds = [round(place * len(values) / count) for place in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    last = len(BARS) - 1
    return "".join(BARS[max(0, min(last, round(last * mean / top))) if top else 0] for mean in means)


def curve(values: Sequence[float], best: float, *, last: int) -> list[str]:
    """The returns of all episodes in two lines: bars, and words."""
    end = sum(values[-last:]) / last
    words = f"return by episode, 1 to {len(values)}: {values[0]:.2f} → {end:.2f} (last {last}) of {best:.2f}"
    return [bars(values, best), words]
