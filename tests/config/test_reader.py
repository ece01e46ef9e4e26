"""The reader: every value has a place, every mistake too, and no input makes it wait or crash."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.config import reader
from lockstep.config.reader import MAX_BYTES, parse, read_file
from lockstep.errors import ConfigError
from tests.counting import calls

WORK, WORK_PER_BYTE = 4_000_000, 60  # calls; a million take about a tenth of a second


def tree(text: str, kind: str = "json") -> dict[str, Any]:
    return parse(text.encode(), name="f", kind=kind).tree


def refusal(content: bytes | str, kind: str = "json") -> str:
    data = content.encode() if isinstance(content, str) else content
    with pytest.raises(ConfigError) as caught:
        parse(data, name="f", kind=kind)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_json_with_comments_and_trailing_commas_as_documented() -> None:
    text = """{ "training": { "batch_size": 8,         // Larger batch since only one GPU
                "grad_accum_nums": 4,    /* Less
                accumulation */ "num_workers":\t8, }, "url": "http://x//y", }     // More "workers"
    """
    assert tree(text) == {
        "training": {"batch_size": 8, "grad_accum_nums": 4, "num_workers": 8},
        "url": "http://x//y",
    }


def test_every_key_and_value_has_its_place() -> None:
    document = parse(b'{\n  "a": {"b": 1,\n /* x\n */ "c": [2]}}', name="f.json", kind="json")
    assert document.keys[("a",)] == "f.json:2:3"
    assert document.values[("a", "b")] == "f.json:2:14"
    assert document.keys[("a", "c")] == "f.json:4:5"
    assert document.values[("a", "c", "0")] == "f.json:4:11"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("3e-4", 3e-4), ("1E3", 1000.0), (".5", 0.5), ("12", 12), ("-7", -7), ("0o17", 15), ("0x1F", 31), ("no", "no"),
        ("yes", "yes"), ("on", "on"), ("true", True), ("False", False), ("~", None), ("null", None), ("1_000", "1_000"),
        ("12:30", "12:30"), ("2001-01-01", "2001-01-01"), ("'12'", "12"), ('"no"', "no"), ("0123", 123),
    ],
)  # fmt: skip
def test_yaml_is_read_by_the_rules_of_1_2(word: str, value: Any) -> None:
    found = tree(f"a: {word}", "yaml")["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("content", "kind", "where", "why"),
    [
        ('{"a": 1', "json", "f:1:8", "expected ',' or '}'"),
        ('{"a": 1}}', "json", "f:1:9", "syntax error"),
        ('{"a" 1}', "json", "f:1:6", "not JSON"),
        ('{"a": }', "json", "f:1:6", "not JSON"),
        ('{"a": 1 "b": 2}', "json", "f:1:7", "not JSON"),
        ('{"a": no}', "json", "f:1:7", "not JSON"),
        ('{"a": "x}', "json", "f:1:7", "not closed"),
        ('{"a": /* x }', "json", "f:1:7", "not closed"),
        ('{"a": "\\q"}', "json", "f:1:9", "escape"),
        ('{"a": NaN}', "json", "f:1:7", "not a finite number"),
        ('{"a": 1e400}', "json", "f:1:7", "not a finite number"),
        ('{"a": -Infinity}', "json", "f:1:7", "not a finite number"),
        ('{"a": ' + "9" * 5000 + "}", "json", "f:1:7", "not JSON"),
        ('{"a": 1, "b": {"c": 1,\n"c": 2}}', "json", "f:2:1", "b.c is set twice (first at 1:16)"),
        ("a: 1", "json", "f:1:1", "not JSON"),
        ("[1]", "json", "f:1:1", "expected settings in sections"),
        ("3", "json", "f:1:1", "expected settings in sections"),
        ("", "json", "f:1:1", "expected settings in sections"),
        ("a: 1\na: 2", "yaml", "f:2:1", "set twice"),
        ("a:\n\tb: 1", "yaml", "f:2:1", "syntax error"),
        ("a: 1\n b: 2", "yaml", "f:2:3", "syntax error"),
        ("a: [1", "yaml", "f:1:6", "syntax error"),
        ("a: &x 1\nb: *x", "yaml", "f:1:4", "anchors"),
        ("a: *x", "yaml", "f:1:4", "anchors"),
        ("a: !!python/object:os.system x", "yaml", "f:1:4", "tags"),
        ("a: 1\n---\nb: 2", "yaml", "f:2:1", "second document"),
        ("%YAML 1.1\n---\na: no", "yaml", "f:2:1", "directives"),
        ("? [a]\n: b", "yaml", "f:1:3", "key must be text"),
        ("a: .nan", "yaml", "f:1:4", "not a finite number"),
        ('{"a": 1}'.encode("utf-16"), "json", "f:1:1", "not UTF-8"),
        (b'{"a":\n\0 1}', "json", "f:2:1", "syntax error"),
        (b'{"a":\n "\xff"}', "json", "f:2:3", "not UTF-8"),
        (b'{"a": "\x07"}', "json", "f:1:8", "syntax error"),
    ],
)
def test_mistakes_are_named_with_their_place(content: bytes | str, kind: str, where: str, why: str) -> None:
    message = refusal(content, kind)
    assert message.startswith(f"{where}: "), message
    assert why in message


def test_a_byte_order_mark_is_accepted() -> None:
    assert tree('\ufeff{"a": 1}') == {"a": 1}
    assert tree("\ufeffa: 1", "yaml") == {"a": 1}


def test_json_pairs_of_surrogates_are_one_character() -> None:
    assert tree('{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


def test_an_included_file_has_its_shortest_name(tmp_path: Path) -> None:
    """Unless a link is on the way: then .. leads elsewhere, and the name without it may be of another file."""
    for folder in ("model", "env", "far/away"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "env" / "e.yaml").write_text("training: {max_steps: 1}\n")
    (tmp_path / "far" / "e.yaml").write_text("training: {max_steps: 2}\n")
    (tmp_path / "e.yaml").write_text("training: {max_steps: 3}\n")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away", target_is_directory=True)
    top = tmp_path / "model" / "m.yaml"
    top.write_text("include: ../env/e.yaml\n")
    assert read_file(top)[0].name == str(tmp_path / "env" / "e.yaml")
    top = tmp_path / "t.yaml"
    top.write_text("include: link/../e.yaml\n")
    assert read_file(top)[0].tree == {"training": {"max_steps": 2}}


def test_include_later_keys_win_and_places_point_to_the_file_that_set_them(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("training:\n  max_steps: 5\n  batch_size: 2\n")
    (tmp_path / "sub" / "more.json").write_text('{"include": "../base.yaml", "training": {"max_steps": 7}}')
    top = tmp_path / "top.yaml"
    top.write_text("include: [sub/more.json]\ntraining:\n  batch_size: 3\n")
    documents = read_file(top)
    assert [Path(document.name).name for document in documents] == ["base.yaml", "more.json", "top.yaml"]
    assert documents[1].values[("training", "max_steps")].endswith("more.json:1:55")
    assert "include" not in documents[2].tree


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("include: a.yaml\n", "includes itself"),
        ("include: b.yaml\n", "includes itself"),
        ("include: nowhere.yaml\n", "no file nowhere.yaml"),
        ("include: 3\n", "expected a path"),
        ("include: {a: b}\n", "expected a path"),
        ('include: "a\\0b"\n', "expected a path"),
    ],
)
def test_bad_includes_are_refused_at_their_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    with pytest.raises(ConfigError, match=why) as caught:
        read_file(tmp_path / "a.yaml")
    assert ".yaml:1:10" in str(caught.value)


def test_only_regular_files_of_sane_size_are_read(tmp_path: Path) -> None:
    big = tmp_path / "big.json"
    big.write_bytes(b" " * (MAX_BYTES + 1))
    for path, why in (
        (big, "larger than"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_file(path)


HOSTILE = {
    "list": "[" + "1," * (MAX_BYTES // 2),
    "lines": "".join(f"k{number}: 1\n" for number in range(6000)),
    "comment": "#" * MAX_BYTES,
    "text": 'a: "' + "x" * MAX_BYTES,
    "plain": "a: " + "x " * (MAX_BYTES // 2),
    "newlines": "\n" * MAX_BYTES,
    "blanks": " " * MAX_BYTES,
    "tabs": "\t" * MAX_BYTES,
    "open": "[" * 10_000,
    "open lines": "[\n" * 10_000,
    "open maps": '{"a":' * 10_000,
    "dashes": "- " * (MAX_BYTES // 2),
    "questions": "? " * (MAX_BYTES // 2),
    "colons": ": " * (MAX_BYTES // 2),
    "keys": "{" + "a," * (MAX_BYTES // 2),
    "block": "a: |\n" + " x\n" * (MAX_BYTES // 3),
    "folded": "a: x\n" + " x\n" * (MAX_BYTES // 3),
    "slashes": "/" * MAX_BYTES,
    "stars": "/*" * (MAX_BYTES // 2),
    "backslashes": '"' + "\\" * MAX_BYTES,
    "bangs": "!" * MAX_BYTES,
    "anchors": "&" * MAX_BYTES,
    "quotes": "'" * MAX_BYTES,
    "brackets": "{[" * (MAX_BYTES // 2),
    "laughs": "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 99)),
}


def work(data: bytes, kind: str) -> int:
    """How many calls it takes to read something or to refuse it."""

    def read() -> None:
        with contextlib.suppress(ConfigError):
            parse(data, name="f", kind=kind)

    return calls(read)


@pytest.mark.parametrize("kind", ["json", "yaml"])
@pytest.mark.parametrize("part", [pytest.param(1, id="whole", marks=pytest.mark.slow), pytest.param(8, id="an eighth")])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_ends_quickly(name: str, part: int, kind: str) -> None:
    data = HOSTILE[name][: MAX_BYTES // part].encode()
    assert work(data, kind) < WORK + WORK_PER_BYTE * len(data)


def test_these_tests_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit on depth, the scanner's work grows with the cube of what is refused here at once."""
    monkeypatch.setattr(reader, "MAX_DEPTH", 10**9)
    assert work(b"[" * 1200, "yaml") > WORK + WORK_PER_BYTE * 1200


ALPHABET = st.sampled_from(list("{}[]:,\"'\\/*#&!|>%@`-?~ \n\t\r.e+0123456789aNtrufls\0\ufeff\u2028\x85é😀"))


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.one_of(st.binary(max_size=300), st.text(ALPHABET, max_size=200).map(str.encode)),
    st.sampled_from(["json", "yaml"]),
)
@example(b"\xef\xbb\xbf", "json")
@example(b"{{a}: b}", "yaml")
@example(b'{"a": "\\ud800"}', "json")
def test_any_bytes_give_values_or_a_refusal(data: bytes, kind: str) -> None:
    where = "f"
    document = None
    try:
        document = parse(data, name="f", kind=kind)
    except ConfigError as error:
        where = error.where
    assert where.startswith("f")
    assert document is None or all((top,) in document.keys for top in document.tree)
