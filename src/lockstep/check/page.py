"""One HTML file about a check: opens offline, runs no script, fetches nothing. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from lockstep.check import plots
from lockstep.check.markup import Markup, element, joined
from lockstep.check.page_style import STYLE
from lockstep.check.schema import CardEntry, DifferenceEntry, Report, WorkEntry, WorkloadEntry
from lockstep.check.wording import (
    alike,
    as_hex,
    counted,
    details,
    equal_steps,
    golden_state,
    headline,
    kind_of,
    listed,
    milliseconds,
    same_model,
    short_uuid,
)
from lockstep.report.words import format_duration

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
ROOM = 0.1  # around the usual step time, so that noise does not look like a mountain
HOTTEST_C = 100.0
UNITS = {"c": "°C", "watts": "W", "mhz": "MHz", "bytes": "bytes", "seconds": "s"}
MOST_SHOWN = 8  # elements of a difference
MANY = 16  # cards: what is well with all of them need not be seen at once
WHAT_IT_IS = (
    "Every card below trained the same models on the same data, from the same first weights. Healthy cards of one "
    "model compute exactly the same bits. After each step a fingerprint of all gradients, weights and optimizer values "
    "was taken on each card, and the fingerprints were compared. A card that differs from the majority computes wrong "
    "numbers."
)
VERDICTS = (
    "PASS: its bits were those of the majority at every compared step, and it was neither slow nor ill. FAIL: its "
    "bits differ, or it is slow, hot or faulty, or did not finish; the reason is given. UNDECIDED: something is wrong, "
    "and nobody can say on which card."
)
STRIPS = (
    "One row for each card, one cell for each compared step, from the first (left) to the last (right). A low green "
    "bar: the same bits as the majority. A tall red block: different bits; once wrong, a card stays wrong. A tall "
    "amber block: no majority. A gap: the card left no record of the step."
)
TIMES = (
    "How long each step of {workload} took, in the same scale for every card; lower is faster. The dashed line is the "
    "median of all cards: a card well above it holds up all the others. The first steps warm up and are not judged."
)
HEAT = (
    "The temperature each card reported during the check, in the same scale for every card. A card that gets too hot "
    "lowers its clocks and becomes slow."
)
COMPARABLE = (
    "Two checks with the same configuration hash on the same model of card may be compared bit for bit. check.json "
    "beside this page has every number."
)


def html(told: Report) -> str:
    """The whole page."""
    sections = [
        _top(told), _verdicts(told), _failures(told), _agreement(told), _times(told), _heat(told), _health(told),
        _workloads(told), _reach(told), _versions(told),
    ]  # fmt: skip
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{told.status}: lockstep check {told.name}"),
        element("style", Markup(STYLE)),
    )
    return "<!doctype html>\n" + element("html", head, element("body", element("main", *sections)), lang="en") + "\n"


def _section(title: str, *children: str) -> Markup:
    return element("section", element("h2", title), *children)


def _legend(text: str) -> Markup:
    return element("p", text, class_="legend")


def _top(told: Report) -> Markup:
    verdict, _, sentence = headline(told).partition(": ")
    nodes = len({card.node for card in told.gpus})
    facts = [
        counted(len(told.gpus), kind_of(told)) + (f" on {nodes} nodes" if nodes > 1 else ""),
        same_model(told),
        f"level {told.level}", counted(len(told.workloads), "workload"), format_duration(told.seconds), told.began,
    ]  # fmt: skip
    return element(
        "header",
        element("p", "lockstep check ", element("bdi", told.name), class_="name"),
        element("h1", element("span", verdict, class_=f"mark {verdict}"), " ", sentence),
        element("p", " · ".join(filter(None, facts)), class_="facts"),
        element("p", WHAT_IT_IS),
    )


def _verdicts(told: Report) -> Markup:
    rows = [
        {
            "card": element("b", card.name),
            "verdict": element("span", card.status, class_=f"mark {card.status}"),
            "model": "" if same_model(told) else card.model,
            "UUID": short_uuid(card.uuid),
            "serial": card.serial,
            "host": card.host,
            "median step": _paced(card, told.main_workload, "median_seconds"),
            "p95": _paced(card, told.main_workload, "p95_seconds"),
            "peak": _degrees(card.peak_temperature_c),
            "equal steps": "{} of {}".format(*equal_steps(card)),
            "why": joined([*_first(card.reasons), *(f"Note: {note}" for note in card.notes)], "; "),
        }
        for card in told.gpus
    ]
    return _section("Verdicts", _legend(VERDICTS), _table(rows))


def _first(reasons: Sequence[str]) -> list[str]:
    """All of them stand below, under what is wrong."""
    more = len(reasons) - 1
    return [*reasons[:1], *([f"{counted(more, 'more reason')} below"] if more > 0 else [])]


def _paced(card: CardEntry, workload: str, name: str) -> str:
    work = _work(card, workload)
    return milliseconds(getattr(work.pace, name)) if work and work.pace else ""


def _degrees(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} °C"


def _work(card: CardEntry, workload: str) -> WorkEntry | None:
    return next((work for work in card.works if work.workload == workload), None)


def _table(rows: Sequence[Mapping[str, str]], *, wide: bool = False) -> Markup:
    """Columns that are empty everywhere are left out; on a phone each row becomes a small card."""
    titles = [title for title in (rows[0] if rows else {}) if any(row[title] for row in rows)]
    head = element("tr", *(element("th", title) for title in titles))
    body = [element("tr", *(element("td", row[title], data_label=title) for title in titles)) for row in rows]
    table = element("table", element("thead", head), element("tbody", *body))
    return element("div", table, class_="wide" if wide else "stack")


def _failures(told: Report) -> Markup:
    wrong = [card for card in told.gpus if card.status != "PASS"]
    return _section("What is wrong", *map(_failure, alike(wrong))) if wrong else Markup()


def _failure(cards: Sequence[CardEntry]) -> Markup:
    """Of some cards of which the same is to be said."""
    card = cards[0]
    title = listed([each.name for each in cards], most=len(cards))
    who = [(each.name if len(cards) > 1 else "", each.model, each.uuid, _serial(each), each.host) for each in cards]
    ids = [element("p", " · ".join(filter(None, words)), class_="facts") for words in who]
    said = [element("p", text) for text in details(card)]
    said += [element("p", element("code", card.error))] if card.error and card.reasons else []
    said += [_elements(card.difference)] if card.difference else []
    said += [element("p", element("b", "Next: "), card.advice)] if card.advice else []
    head = element("h3", title, " ", element("span", card.status, class_=f"mark {card.status}"))
    return element("article", head, *ids, *said)


def _serial(card: CardEntry) -> str:
    return f"serial {card.serial}" if card.serial else ""


def _elements(difference: DifferenceEntry) -> Markup:
    """The first elements that differ, bit by bit."""
    found = list(zip(difference.positions, difference.right, difference.wrong, strict=False))[:MOST_SHOWN]
    rows = [
        {
            "element": f"[{', '.join(map(str, place))}]",
            "on this card": element("code", as_hex(wrong)),
            "on the others": element("code", as_hex(right)),
            "flipped bits": flipped_bits(right, wrong),
        }
        for place, right, wrong in found
    ]
    return _table(rows) if rows else Markup()


def flipped_bits(right: str, wrong: str) -> str:
    """The numbers of the bits in which two hex words differ, 0 the lowest."""
    try:
        changed = int(right, 16) ^ int(wrong, 16)
    except ValueError:
        return ""
    return ", ".join(str(bit) for bit in range(changed.bit_length()) if changed >> bit & 1)


def _agreement(told: Report) -> Markup:
    found = [_strips(told, workload) for workload in told.workloads]
    if not any(found):
        return _section("Agreement", element("p", "No steps were compared."))
    return _section("Agreement, step by step", _legend(STRIPS), *found)


def _strips(told: Report, workload: WorkloadEntry) -> Markup:
    """All cards in one workload; folded up where many agree in everything."""
    letters = {card.name: work.agreement for card in told.gpus if (work := _work(card, workload.name))}
    letters = {name: row for name, row in letters.items() if row}
    if not letters:
        return Markup()
    whole = all(set(row) == {"."} for row in letters.values())
    steps = counted(len(workload.compared_steps), "step")
    said = f"equal on {counted(len(letters), 'card')} at {steps}" if whole else f"not all equal, {steps}"
    rows = [
        element("div", element("span", name, class_="who"), plots.strip(row, workload.compared_steps))
        for name, row in letters.items()
    ]
    ends = element("div", *(element("span", end) for end in _ends(workload)), class_="across")
    return element(
        "details",
        element("summary", element("b", workload.name), " ", element("span", said)),
        element("div", *rows, ends, class_="strips"),
        open=None if whole and len(letters) > MANY else "",
    )


def _ends(workload: WorkloadEntry) -> tuple[str, str]:
    steps = workload.compared_steps
    return (f"step {steps[0]}", f"step {steps[-1]}") if steps else ("", "")


def _times(told: Report) -> Markup:
    shown = [(card, work) for card in told.gpus if (work := _work(card, told.main_workload)) and work.steps]
    if not shown:
        return Markup()
    warmup = next((each.warmup_steps for each in told.workloads if each.name == told.main_workload), 0)
    medians = [
        work.pace.median_seconds if work.pace else statistics.median(work.seconds[warmup:] or work.seconds)
        for _, work in shown
    ]
    usual = statistics.median(medians)
    judged = [seconds for _, work in shown for seconds in work.seconds[warmup:] or work.seconds]
    first, last = min(work.steps[0] for _, work in shown), max(work.steps[-1] for _, work in shown)
    scale = plots.Scale(first, last, min(*judged, (1 - ROOM) * usual), max(*judged, (1 + ROOM) * usual))
    corners = (milliseconds(scale.high), milliseconds(scale.low), f"step {first}", f"step {last}")
    found = []
    for (card, work), median in zip(shown, medians, strict=True):
        points = list(zip(map(float, work.steps), work.seconds, strict=True))
        slow = work.pace is not None and work.pace.slow
        drawing = plots.chart(points, scale, usual=usual, kind="bad" if slow else "")
        found.append(
            plots.panel(card.name, f"median {milliseconds(median)}{', slow' if slow else ''}", drawing, corners)
        )
    legend = _legend(TIMES.format(workload=told.main_workload))
    return _section("Step time", legend, plots.panels(found), *_paces(told))


def _paces(told: Report) -> list[Markup]:
    """Medians of the other workloads beside each other, as percent of the group."""
    names = [each.name for each in told.workloads if any(_paced(card, each.name, "ratio") for card in told.gpus)]
    if len(names) < 2:
        return []
    rows = [{"card": card.name, **{name: _ratio(_work(card, name)) for name in names}} for card in told.gpus]
    return [element("p", "Median step time, and its share of the median of all cards:"), _table(rows, wide=True)]


def _ratio(work: WorkEntry | None) -> str:
    pace = work.pace if work else None
    return f"{milliseconds(pace.median_seconds)} ({100 * pace.ratio:.1f} %)" if pace else ""


def _heat(told: Report) -> Markup:
    curves = {
        card.name: [(each.seconds, each.temperature_c) for each in card.samples if each.temperature_c is not None]
        for card in told.gpus
    }
    every = [point for curve in curves.values() for point in curve]
    if told.device == "cpu" and not every:  # workers have none of their own
        return Markup()
    if not every:
        return _section("Temperature", element("p", "No card told its temperature."))
    values, moments = [value for _, value in every], [moment for moment, _ in every]
    scale = plots.Scale(0.0, max(moments) or 1.0, min(20.0, *values), max(HOTTEST_C, *values))
    corners = (_degrees(scale.high), _degrees(scale.low), "0 s", f"{scale.right:.0f} s")
    found = [
        plots.panel(
            card.name, f"peak {_degrees(card.peak_temperature_c)}", plots.chart(curve, scale, kind="warm"), corners
        )
        for card in told.gpus
        if (curve := curves[card.name])
    ]
    return _section("Temperature", _legend(HEAT), plots.panels(found))


def _health(told: Report) -> Markup:
    """What the driver counts, before and after: only what it tells."""
    names = sorted({name for card in told.gpus for name in (*card.before, *card.after)})
    if not names:
        return Markup()
    rows = [
        {
            "card": card.name,
            **{_titled(name): _change(card.before.get(name), card.after.get(name)) for name in names},
        }
        for card in told.gpus
    ]
    legend = _legend("What the driver said of each card before and after; one value where nothing has changed.")
    return _section("Health counters", legend, _table(rows, wide=True))


def _titled(name: str) -> str:
    """A key of the driver's answers as the title of a column."""
    stem, _, unit = name.rpartition("_")
    return f"{stem.replace('_', ' ')} ({UNITS[unit]})" if unit in UNITS else name.replace("_", " ")


def _change(before: JsonValue, after: JsonValue) -> str:
    words = [_said(value) for value in (before, after) if value is not None]
    return " → ".join(dict.fromkeys(words))


def _said(value: JsonValue) -> str:
    if isinstance(value, list):
        return ", ".join(map(_said, value)) or "none"
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_said(each)}" for key, each in value.items())
    if value is None or isinstance(value, bool):
        return "yes" if value else "no" if value is False else "none"
    return str(value) if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _facts(facts: Mapping[str, JsonValue]) -> str:
    """What a workload said of itself."""
    return _said({name.replace("_", " "): value for name, value in facts.items() if value != []})


def _workloads(told: Report) -> Markup:
    rows = [
        {
            "workload": element("b", each.name),
            "what": f"{each.family} {each.preset}" if each.kind == "train" else each.kind.replace("_", " "),
            "steps": str(each.steps),
            "settings": _said(each.settings),
            "kernels and facts": next(
                (_facts(work.facts) for card in told.gpus if (work := _work(card, each.name))), ""
            ),
        }
        for each in told.workloads
    ]
    return _section("Workloads", _table(rows))


def _reach(told: Report) -> Markup:
    named = (
        ("Covered", told.coverage.covered),
        ("Not covered", told.coverage.not_covered),
        ("Limits", told.coverage.limits),
    )
    parts = [
        part
        for title, texts in named
        if texts
        for part in (element("h3", title), element("ul", *(element("li", text) for text in texts)))
    ]
    return _section("How far this reaches", *parts)


def _versions(told: Report) -> Markup:
    drivers = sorted({card.driver for card in told.gpus if card.driver})
    facts = {**told.versions, "configuration hash": told.config_hash, "golden": golden_state(told)}
    facts |= {"driver": ", ".join(drivers)} if drivers else {}
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in facts.items() if value]
    return _section("Versions", element("dl", *rows), _legend(COMPARABLE))
