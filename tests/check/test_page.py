"""check/page.py and plots.py: one file that opens offline, says it in plain words, and runs nobody's code."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.check import page, plots
from lockstep.check.document import document
from lockstep.check.markup import element, joined
from lockstep.check.outcome import CardVerdict, Checked, Status
from lockstep.check.records import Work
from tests.check import made_up
from tests.check.browser import needs_browser, opened

CALL = "parent.postMessage('ran','*')"
PAYLOADS = (
    f'<img src=x onerror="{CALL}">',
    f"</script></style></title><script>{CALL}</script>",
    f'"><svg onload={CALL}>',
    f"'><body onload={CALL}>",
    f'" onmouseover="{CALL}" autofocus onfocus="{CALL}" x="',
    f'--><iframe srcdoc="<script>parent.{CALL}</script>"></iframe>',
    "\x1b]8;;javascript:alert(1)\x07\u202e\u2066\x00",
)
HOSTILE = " ".join(PAYLOADS)


def hostile() -> Checked:
    """A check in which everything that has a name has a bad one."""
    checked = made_up.seven_pass_one_fails()
    bad = dict.fromkeys(("host", "uuid", "serial", "model", "driver"), HOSTILE)
    swap = {verdict.card: dataclasses.replace(verdict.card, node=verdict.card.index % 2, **bad) for verdict in
            checked.judgement.verdicts}  # fmt: skip
    verdicts = [
        dataclasses.replace(each, card=swap[each.card], reasons=(HOSTILE,) if each.reasons else (), notes=(HOSTILE,))
        for each in checked.judgement.verdicts
    ]
    first = dataclasses.replace(made_up.FLIP, tensor=HOSTILE, nature=HOSTILE, right=(HOSTILE,), wrong=(HOSTILE,))
    verdicts[3] = dataclasses.replace(verdicts[3], difference=first)
    replicas = [
        dataclasses.replace(
            each, card=swap[each.card], error=HOSTILE, versions={HOSTILE: HOSTILE}, before={HOSTILE: HOSTILE},
            works=tuple(map(_spoilt, each.works)),
        )
        for each in checked.replicas
    ]  # fmt: skip
    words = dict.fromkeys(("level", "config_hash"), HOSTILE)
    return dataclasses.replace(
        made_up.checked(verdicts, replicas, **words),
        versions={HOSTILE: HOSTILE}, golden={HOSTILE: [HOSTILE]}, covered=(HOSTILE,), not_covered=(HOSTILE,),
    )  # fmt: skip


def _spoilt(work: Work) -> Work:
    return dataclasses.replace(work, facts={HOSTILE: HOSTILE}, error=HOSTILE)


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: dict[str, list[str]] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")


def parsed(text: str) -> Elements:
    parser = Elements()
    parser.feed(text)
    return parser


def written(checked: Checked, name: str = "check-1") -> str:
    return page.html(document(checked, name=name))


# ------------------------------------------------------------------------------------------------ what it says


def test_it_says_what_was_found() -> None:
    text = html.unescape(written(made_up.seven_pass_one_fails()))
    for words in (
        "FAIL: lockstep check check-1",
        "7 of 8 pass; GPU 3 fails",
        "GPU-21636369-8b52-9b4a-97b7-50923ceb3ffd",
        "serial 1653223000003",
        "[1187, 2003]",
        "0x3c9e",
        "0x3c1e",
        "persistent",
        "steps 23 to 59: different",
        "steps 0 to 22: equal",
        "median 212.",
        "peak 73 °C",
        "9f86d081884c7d65",
        "Equal bits prove agreement, not correctness",
        page.STRIPS,
        page.HEAT,
    ):
        assert words in text, words


def test_a_tie_shows_both_and_blames_nobody() -> None:
    text = written(made_up.two_undecided())
    assert "steps 23 to 59: no majority" in text
    assert "GPU 0 and GPU 1" in text
    assert 'class="mark FAIL"' not in text


def test_cpu_workers_have_no_temperature() -> None:
    cards = [dataclasses.replace(made_up.card(index), uuid="") for index in range(2)]
    replicas = [dataclasses.replace(made_up.replica(each), samples=()) for each in cards]
    checked = made_up.checked([CardVerdict(each, Status.PASS) for each in cards], replicas, device="cpu")
    assert "Temperature" not in written(checked)
    silent = dataclasses.replace(checked, device="cuda")  # GPUs have one: that nobody told it is worth a word
    assert "No card told its temperature." in written(silent)


def test_times_have_one_median_and_facts_their_words() -> None:
    """The median under a plot is the one that was judged; what is empty is not told."""
    checked = made_up.seven_pass_one_fails()
    work = checked.replicas[0].works[3]
    told = {"wrong_words": [], "pattern_bytes": 2**37}
    first = dataclasses.replace(
        checked.replicas[0], works=(*checked.replicas[0].works[:3], dataclasses.replace(work, facts=told))
    )
    verdict = dataclasses.replace(checked.judgement.verdicts[0], paces=made_up.paces(1.5))
    judgement = dataclasses.replace(checked.judgement, verdicts=(verdict, *checked.judgement.verdicts[1:]))
    checked = dataclasses.replace(checked, judgement=judgement, replicas=(first, *checked.replicas[1:]))
    text = html.unescape(written(checked))
    assert "median 318.0 ms" in text
    assert "pattern bytes: 137,438,953,472" in text
    assert "wrong words" not in text


def test_many_reasons_stand_once_in_the_table_and_all_below() -> None:
    checked = made_up.seven_pass_one_fails()
    wrong = dataclasses.replace(checked.judgement.verdicts[3], reasons=("first: other bits", "second: other bits"))
    verdicts = (*checked.judgement.verdicts[:3], wrong, *checked.judgement.verdicts[4:])
    judgement = dataclasses.replace(checked.judgement, verdicts=verdicts)
    text = html.unescape(written(dataclasses.replace(checked, judgement=judgement)))
    assert "first: other bits; 1 more reason below" in text
    assert text.count("second: other bits") == 1


def test_a_check_without_any_step_has_a_page() -> None:
    verdict = CardVerdict(made_up.card(0), Status.FAIL, ("no record",))
    bare = dataclasses.replace(made_up.replica(verdict.card), works=(), samples=(), exit_code=1, error="died")
    text = written(made_up.checked([verdict], [bare]))
    assert "No steps were compared." in text
    assert "died" in text


@pytest.mark.parametrize(
    ("right", "wrong", "bits"), [("3c1e", "3c9e", "7"), ("00000000", "80000001", "0, 31"), ("?", "1", "")]
)
def test_flipped_bits(right: str, wrong: str, bits: str) -> None:
    assert page.flipped_bits(right, wrong) == bits


# ------------------------------------------------------------------------------------------------ pictures


def test_no_peak_is_lost_when_points_are_left_out() -> None:
    points = [(float(step), 0.2) for step in range(10_000)]
    points[7_777] = (7777.0, 9.0)
    points[1_234] = (1234.0, 0.01)
    found = plots.thinned(points)
    assert len(found) <= 2 * plots.MOST_COLUMNS
    assert {(7777.0, 9.0), (1234.0, 0.01)} <= set(found)
    assert found == sorted(found)


def test_no_difference_is_lost_in_a_long_strip() -> None:
    letters = "." * 5_000 + "x" + "." * 4_999
    drawn = plots.strip(letters, range(10_000))
    assert drawn.count('class="bad"') == 1
    assert drawn.count("<rect") == 3


def test_a_strip_of_gaps_and_ties() -> None:
    drawn = plots.strip("..--??", range(6))
    assert ("steps 0 to 1: equal" in drawn, "steps 4 to 5: no majority" in drawn) == (True, True)
    assert drawn.count("<rect") == 2


def test_a_large_check_is_a_small_page() -> None:
    """64 cards, 1,000 steps, and in the second case a strip that cannot be drawn with fewer boxes."""
    cards = [made_up.card(index % 8, node=index // 8, host=f"host{index // 8}") for index in range(64)]
    verdicts = [CardVerdict(each, Status.PASS, paces=made_up.paces()) for each in cards]
    long = made_up.replica(cards[0], steps=1000)
    replicas = [dataclasses.replace(long, card=each, works=long.works[:1]) for each in cards]
    told = document(made_up.checked(verdicts, replicas))
    uneven = {"agreement": ".x?-" * 250}
    ragged = tuple(
        gpu.model_copy(update={"works": tuple(each.model_copy(update=uneven) for each in gpu.works)})
        for gpu in told.gpus
    )
    assert len(page.html(told).encode()) < 1_000_000
    assert len(page.html(told.model_copy(update={"gpus": ragged})).encode()) < 3_000_000


# ------------------------------------------------------------------------------------------------ nobody else's code


def test_markup_escapes_what_it_did_not_make() -> None:
    assert element("p", "<b>", element("i", "&"), title='">') == '<p title="&quot;&gt;">&lt;b&gt;<i>&amp;</i></p>'
    assert joined(["<", element("b")], "&") == "&lt;&amp;<b></b>"


@pytest.mark.parametrize("made", [made_up.seven_pass_one_fails, made_up.two_undecided, hostile])
def test_nothing_is_fetched_and_no_script_is_there(made: Callable[[], Checked]) -> None:
    text = written(made(), HOSTILE if made is hostile else "check-1")
    found = parsed(text)
    assert not found.names & {"script", "img", "iframe", "object", "embed", "link", "a", "base", "form", "image", "use"}
    assert not [
        name for name in found.attributes if name.startswith("on") or name in ("src", "href", "style", "srcdoc")
    ]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert found.attributes["content"][0].startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", text)


def test_the_detector_sees_an_escape_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.check.markup.html.escape", lambda text, **_: text)
    found = parsed(written(hostile(), HOSTILE))
    assert {"script", "img", "iframe"} <= found.names
    assert "onload" in found.attributes


HARNESS = """<!doctype html><body><ul id=said></ul><script>
addEventListener("message", event => {
  const of = each => each.contentWindow === event.source || each.contentWindow === event.source.parent;
  const frame = [...document.querySelectorAll("iframe")].find(of);
  say((frame ? frame.id : "?") + " ran");
});
function say(text) { const line = document.createElement("li"); line.textContent = text; said.append(line); }
addEventListener("load", () => setTimeout(() => document.querySelectorAll("iframe").forEach(frame => {
  const root = frame.contentDocument.documentElement;
  const drawn = root.querySelectorAll("svg").length;
  say(frame.id + " is " + root.scrollWidth + " in " + frame.clientWidth + ", shows " + drawn);
}), 500));
</script>FRAMES</body>"""


@pytest.mark.browser
@needs_browser
def test_chromium_runs_nothing_of_a_hostile_page(tmp_path: Path) -> None:
    """With the policy and, so that escaping is seen to be enough, without it. Controls: the same texts, not escaped."""
    bad = written(hostile(), HOSTILE)
    policy = re.compile('<meta http-equiv="Content-Security-Policy"[^>]*/>')
    raw = f"<!doctype html><html><body>{HOSTILE}</body></html>"
    guarded = policy.findall(bad)[0]
    pages = {
        "whole": bad,
        "escaped": policy.sub("", bad),
        "policy": raw.replace("<html>", f"<html><head>{guarded}</head>"),
        "control": raw,
        "wide": written(made_up.seven_pass_one_fails()),
    }
    frames = ""
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        frames += f'<iframe id={name} src="{name}.html" width={1280 if name == "wide" else 400} height=800></iframe>'
    (tmp_path / "harness.html").write_text(HARNESS.replace("FRAMES", frames), encoding="utf-8")
    seen = opened(tmp_path / "harness.html")
    told = re.findall("<li>(.*?)</li>", seen)
    assert told.count("control ran") >= 2  # the detector works
    assert [line for line in told if line.endswith(" ran") and not line.startswith("control")] == []
    sizes = {match[1]: match for line in told if (match := re.match(r"(\w+) is (\d+) in (\d+), shows (\d+)", line))}
    assert set(sizes) == set(pages)
    for name in ("whole", "escaped", "wide"):
        assert int(sizes[name][2]) <= int(sizes[name][3]), f"{name} must be scrolled sideways: {sizes[name][0]}"
        assert int(sizes[name][4]) > 20
