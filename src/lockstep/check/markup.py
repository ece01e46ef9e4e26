"""HTML and SVG that cannot be broken out of: every text is escaped unless it was made here. Torch-free."""

from __future__ import annotations

import html
from collections.abc import Iterable

EMPTY = ("meta", "rect", "path", "line")  # elements without content


class Markup(str):
    """Made by `element` or `joined`: safe as it is."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: object) -> Markup:
    """One element. `class_` stands for class, `data_x` for data-x; an attribute that is None is left out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in EMPTY:
        return Markup(f"<{name}{words}/>")
    return Markup(f"<{name}{words}>{joined(children)}</{name}>")


def joined(children: Iterable[str], between: str = "") -> Markup:
    """Pieces side by side, texts escaped."""
    separator = html.escape(between)
    return Markup(separator.join(each if isinstance(each, Markup) else html.escape(each) for each in children))
