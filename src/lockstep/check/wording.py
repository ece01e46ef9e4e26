"""What table and page say of a check, in the same words. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.check.schema import CardEntry, DifferenceEntry, Report

SHORT_UUID = 8


def headline(told: Report) -> str:
    """The verdict in a sentence."""
    counts = Counter(card.status for card in told.gpus)
    many, kind = len(told.gpus), kind_of(told)
    if told.status == "PASS":
        every = "both" if many == 2 else f"all {many}"
        who = f"{every} {kind}s agree" if many > 1 else f"the {kind} agrees with itself"
        return f"PASS: {who} bit for bit"
    parts = [f"{counts['PASS']} of {many} pass"] if counts["PASS"] else []
    for status, word in (("FAIL", "fails"), ("UNDECIDED", "is undecided")):
        named = [card.name for card in told.gpus if card.status == status]
        if named:
            word = word if len(named) == 1 else {"fails": "fail", "is undecided": "are undecided"}[word]
            parts.append(f"{listed(named)} {word}")
    return f"{told.status}: {'; '.join(parts)}"


def equal_steps(card: CardEntry) -> tuple[int, int]:
    """(steps with the bits of the majority, steps that were compared), over all workloads."""
    letters = "".join(work.agreement for work in card.works)
    return letters.count("."), len(letters)


def short_uuid(uuid: str) -> str:
    return uuid.removeprefix("GPU-")[:SHORT_UUID]


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{1000 * seconds:.{0 if seconds >= 1 else 1}f} ms"


def same_model(told: Report) -> str:
    """The model of all cards; empty where they differ."""
    models = {card.model for card in told.gpus}
    return models.pop() if len(models) == 1 else ""


def alike(cards: Sequence[CardEntry]) -> list[list[CardEntry]]:
    """Cards of which the same is to be said stand together: both of a tie."""
    groups: dict[tuple[object, ...], list[CardEntry]] = {}
    for card in cards:
        groups.setdefault((card.status, card.reasons, card.difference, card.advice), []).append(card)
    return list(groups.values())


def golden_state(told: Report) -> str:
    """What came of the golden file, as the check told it; empty: none was given."""
    words = {
        "used": "compared with {file}",
        "written": "written to {file}",
        "no entry": "no entry in {file}",
        "not written": "not written to {file}: {why}",
    }
    about = {"file": told.golden.get("file", ""), "why": told.golden.get("why", "")}
    return words.get(str(told.golden.get("state", "")), "").format(**about)


def details(card: CardEntry, *, most: int | None = None) -> list[str]:
    """Why a card does not pass: the reasons (of many the first), the elements that differ, what a second run showed."""
    found = list(card.reasons[:most]) or [card.error]
    hidden = len(card.reasons) - len(card.reasons[:most])
    found += [f"... and {counted(hidden, 'reason')} more in the report"] if hidden else []
    if card.difference:
        found += [_elements(card.difference, told=" ".join(card.reasons)), run_again(card.difference)]
    return [text for text in found if text]


def _elements(difference: DifferenceEntry, *, told: str) -> str:
    """`told`: what was said before; the tensor is not named twice."""
    tensor = "" if difference.tensor in told else f" in {difference.tensor}"
    if difference.elements is None:
        return f"the first difference is{tensor}" if tensor else ""
    count = counted(difference.elements, "element")
    text = f"{count} differ{'s' if difference.elements == 1 else ''}{tensor}"
    if difference.positions:
        place = ", ".join(map(str, difference.positions[0]))
        text += f", {'at' if difference.elements == 1 else 'the first at'} [{place}]"
    if difference.wrong and difference.right:
        text += f": {as_hex(difference.wrong[0])} here, {as_hex(difference.right[0])} on the others"
    return text


def run_again(difference: DifferenceEntry) -> str:
    """What the second run has shown; empty: there was none."""
    natures = {
        "transient": "transient (a second run was right)",
        "persistent": "persistent (a second run made the same error)",
        "intermittent": "intermittent (a second run made another error)",
    }
    return natures.get(difference.nature, difference.nature)


def as_hex(text: str) -> str:
    return text if text.startswith("0x") else f"0x{text}"


def kind_of(told: Report) -> str:
    """What is checked, in words."""
    return "CPU worker" if told.device == "cpu" else "GPU"


def counted(count: int, what: str) -> str:
    """1 card, 2 cards."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names as one says them; of many the first ones."""
    if len(names) > most:
        return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
