"""The small texts of ctxfs(5): what is accepted, and what is refused with which words."""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import MalformedError
from runtime.texts import names
from runtime.texts.names import (
    JSON_DEPTH,
    JSON_VALUES,
    check_absolute,
    check_choice,
    check_name,
    dump_json,
    escape,
    free_number,
    parse_duration,
    parse_env_line,
    parse_json,
    parse_json_object,
    parse_moment,
    parse_number,
    parse_size,
    quote,
    some_of,
    split_command,
    timestamp,
)

ALPHABET = "abzABZ0189._+-"


@pytest.mark.parametrize(
    "name", ["a", "0", "coder", "a.b", "a_b", "a+b", "a-b", "A9", "a" * 64, "sock", "d", "x.socks"]
)
def test_names_that_are_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a" * 65,
        ".a",
        "-a",
        "_a",
        "+a",
        "a/b",
        "a b",
        "a\n",
        "a\0",
        "..",
        "a.sock",
        "a.d",
        "current",
        "ä",
        "٣",
        "a٣",
        "a~1",
        "a\u2028",
        "\udcff",
    ],
)
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(MalformedError, match="is not a name"):
        check_name(name)


@given(st.text(max_size=70))
def test_an_accepted_name_is_ascii_and_one_path_component(name: str) -> None:
    try:
        check_name(name)
    except MalformedError as error:
        assert "\n" not in error.sentence
        return
    assert name.isascii()
    assert 1 <= len(name) <= 64
    assert not set(name) & set("/\0\n ")


@given(st.text(ALPHABET, min_size=1, max_size=64))
def test_names_of_the_alphabet_are_accepted_unless_reserved(name: str) -> None:
    reserved = name.endswith((".sock", ".d")) or name[0] in "._+-" or name == "current"
    try:
        check_name(name)
    except MalformedError:
        assert reserved
    else:
        assert not reserved


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30.0), ("10m", 600.0), ("2h", 7200.0), ("1d", 86400.0), ("0s", 0.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", "5 s", "5s ", "5s\n", "-5s", "1.5s", "5S", "٥s", "5w", "1h30m", "+1s"]
)
def test_texts_that_are_no_duration(text: str) -> None:
    with pytest.raises(MalformedError, match="is not a duration such as"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1048576", 1048576), ("512K", 524288), ("64M", 64 << 20), ("2G", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "1k", "1KB", "1 K", "1K\n", "-1", "٣", "1.5M", "0x10"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(MalformedError, match="is not a size such as"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", " 1", "1\n", "-1", "+1", "٣", "²", "1_000", "9" * 19, "0x1"])
def test_texts_that_are_no_number(text: str) -> None:
    with pytest.raises(MalformedError, match="is not a number"):
        parse_number(text)


@given(st.integers(min_value=0, max_value=10**18 - 1))
def test_numbers_are_read_as_written(value: int) -> None:
    assert parse_number(str(value)) == value


@given(st.text(max_size=12))
def test_parsers_of_numbers_raise_nothing_else(text: str) -> None:
    for parse in (parse_number, parse_size, parse_duration):
        try:
            assert parse(text) >= 0
        except MalformedError:
            continue


def test_a_choice_names_what_there_is() -> None:
    assert check_choice("b", ("a", "b")) == "b"
    with pytest.raises(MalformedError, match=re.escape('unknown value "c"; use a, b')):
        check_choice("c", ("a", "b"))


@pytest.mark.parametrize(
    ("line", "pair"),
    [
        ("A=1", ("A", "1")),
        ("A=", ("A", "")),
        ("_a9=x=y", ("_a9", "x=y")),
        ("A=$HOME", ("A", "$HOME")),
        ("A= b ", ("A", " b ")),
        ("CTX=1", ("CTX", "1")),
    ],
)
def test_environment_lines_are_taken_as_written(line: str, pair: tuple[str, str]) -> None:
    assert parse_env_line(line) == pair


@pytest.mark.parametrize("line", ["", "A", "=1", "9A=1", "A B=1", "Ä=1", "A\n=1", "A٣=1"])
def test_environment_lines_without_a_plain_key_are_refused(line: str) -> None:
    with pytest.raises(MalformedError, match="is not KEY=VALUE"):
        parse_env_line(line)


def test_the_runtimes_own_variables_are_not_given() -> None:
    with pytest.raises(MalformedError, match=r"CTX_ROOT.*the runtime sets CTX_"):
        parse_env_line("CTX_ROOT=/evil")


@pytest.mark.parametrize("path", ["/", "/a", "/a/b", "/a b", "/ä", "/a/.b", "/a/..b", "/..."])
def test_plain_absolute_paths(path: str) -> None:
    assert check_absolute(path) == path


@pytest.mark.parametrize(
    "path",
    ["", "a", "./a", "/a/", "//", "//a", "/a//b", "/a/../b", "/..", "/.", "/a/.", "/a\n", "/a\x7f"],
)
def test_paths_that_are_not_plain(path: str) -> None:
    with pytest.raises(MalformedError, match="must begin with"):
        check_absolute(path)


def test_a_path_is_as_long_as_the_kernel_takes() -> None:
    longest = "/" + "a" * 4094
    assert check_absolute(longest) == longest
    with pytest.raises(MalformedError, match="longer than 4095 bytes"):
        check_absolute(longest + "a")


def test_a_command_is_split_like_a_shell_does_without_expansion() -> None:
    line = """sh -c 'echo "$A"' "b c" d\\ e * #f ~"""
    assert split_command(line) == ["sh", "-c", 'echo "$A"', "b c", "d e", "*", "#f", "~"]


@pytest.mark.parametrize(
    "line",
    [
        r"""$'a\nb\t\'\\\e\r\a\b\f\v\?\"' x$'y\x41\101\u00e9\U0001F600'z $'\xff\303\251\x0a0'""",
        """$'two\tfields' a$ "$'c'" $'' \\$'s' '$'"it's" $""",
    ],
)
def test_escapes_in_a_command_are_those_of_bash(line: str) -> None:
    script = f"printf '%s\\0' {line}"
    shown = subprocess.run(
        ["bash", "-c", script], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert [os.fsencode(word) for word in split_command(line)] == shown.stdout.split(b"\0")[:-1]


@pytest.mark.parametrize("text", [r"\0", r"\x00", r"\u0000", r"\q", r"\777", r"\uD800",
                                  r"\U00110000", r"\xg"])  # fmt: skip
def test_what_stands_for_nothing_is_refused_with_what_does(text: str) -> None:
    with pytest.raises(MalformedError, match=r"stands for nothing in \$'\.\.\.'.*: write \\n,"):
        split_command(f"sh -c $'a{text}b'")


@pytest.mark.parametrize("line", ["'", '"a', "a\\", "$'", "a$'b\\'"])
def test_an_open_quotation_is_refused_with_a_way_out(line: str) -> None:
    with pytest.raises(MalformedError, match=r"is not a command line.*close the quotation"):
        split_command(line)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "NaN", "Infinity", "-Infinity", "[1,]", "{1:2}", "'a'", "01", "\ufeff1"],
)
def test_texts_that_are_no_json(text: str) -> None:
    with pytest.raises(MalformedError):
        parse_json(text)


def test_a_number_that_is_no_finite_one_is_refused() -> None:
    """It would be written back as Infinity, which no JSON parser takes."""
    with pytest.raises(MalformedError):
        parse_json("[1e999]")


@pytest.mark.parametrize("bracket", ["[", '{"a":', "[[[{"])
def test_sixty_thousand_brackets_are_refused(bracket: str) -> None:
    with pytest.raises(MalformedError, match="nested deeper"):
        parse_json(bracket * 60_000)


def test_nesting_is_accepted_up_to_the_limit() -> None:
    assert parse_json("[" * JSON_DEPTH + "]" * JSON_DEPTH) is not None
    with pytest.raises(MalformedError, match="nested deeper"):
        parse_json("[" * (JSON_DEPTH + 1) + "]" * (JSON_DEPTH + 1))


def test_brackets_in_strings_do_not_nest() -> None:
    value = {"a": "[" * 1000, 'b"\\': "{" * 1000}
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ['"\\ud800"', '{"\\udfff": 1}', '["\\udc00\\ud800"]'])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(MalformedError, match="surrogate"):
        parse_json(text)


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_json('"\\ud83d\\ude00"') == "😀"


def test_a_number_of_many_digits_is_refused_not_computed() -> None:
    with pytest.raises(MalformedError):
        parse_json("1" * 100_000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{a: 1}", "not JSON: column 2: a key in double quotes belongs here"),
        ("{}\n", None),
        ("", "not JSON: column 1: a value is missing here, or a text is not in double quotes"),
        ('{\n"a": 1,\nb}', "not JSON: line 3, column 1: a key in double quotes belongs here"),
        ("\n {a: 1}", "not JSON: line 2, column 3: a key in double quotes belongs here"),
        ('{"a": 1\n', "not JSON: column 8: a comma or a colon belongs here, or the end of a list "
                      "or an object"),
        ("[1 2]", "not JSON: column 4: a comma or a colon belongs here, or the end of a list or an "
                  "object"),
        ("9" * 5000, "the JSON has too long a number, or is nested too deep"),
    ],
)  # fmt: skip
def test_what_is_not_json_is_told_by_place_and_what_belongs_there(
    text: str, said: str | None
) -> None:
    if said is None:
        assert parse_json(text) == {}
        return
    with pytest.raises(MalformedError) as raised:
        parse_json(text)
    assert raised.value.sentence == said


@pytest.mark.parametrize("text", ["2026-13-01T00:00:00Z", "2026-02-30T00:00:00Z", "soon", "5"])
def test_what_is_no_time_is_shown_one(text: str) -> None:
    with pytest.raises(MalformedError) as raised:
        parse_moment(text, 0)
    remedy = "use a duration such as 30s, or 2027-01-31T09:00:00Z"
    assert raised.value.sentence == f'"{text}" is not a time; {remedy}'


@pytest.mark.parametrize("text", ["[]", "1", '"a"', "null"])
def test_an_object_is_wanted(text: str) -> None:
    with pytest.raises(MalformedError, match="is not a JSON object"):
        parse_json_object(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" + "1," * JSON_VALUES + "1]", "more than 32768 values"),
        ("[]" * (JSON_VALUES + 1), "more than 32768 values"),
        ('"' * (5 * JSON_VALUES), "more than 32768 values"),
        ("[" + "1" * 40_000 + "]", "a number of 400 digits|digits"),
    ],
)
def test_what_would_cost_much_more_than_its_size_is_refused(text: str, why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        parse_json(text)


def test_a_control_full_of_values_is_no_such_text() -> None:
    assert len(parse_json("[" + "1," * 32_000 + "1]")) == 32_001


@given(st.text('\\"[]{},a', max_size=40))
def test_nesting_is_counted_outside_of_strings(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError:
        return
    deepest = 0
    left = [(value, 1)]
    while left:
        at, depth = left.pop()
        if isinstance(at, list | dict):
            deepest = max(deepest, depth)
            inner = at.values() if isinstance(at, dict) else at
            left += [(each, depth + 1) for each in inner]
    assert names._nesting(names._outside(text))[0] == deepest


@given(VALUES)
def test_what_is_dumped_is_one_line_and_parsed_back(value: Any) -> None:
    line = dump_json(value)
    assert "\n" not in line
    assert parse_json(line) == value


@given(st.text(max_size=60))
def test_parsing_json_raises_nothing_but_malformed(text: str) -> None:
    try:
        parse_json(text)
    except MalformedError as error:
        assert error.sentence


@given(st.text())
def test_escaped_text_has_only_printable_characters(text: str) -> None:
    assert escape(text).isprintable()


@pytest.mark.parametrize("text", ["plain", "ä😀", "\\n is kept"])
def test_printable_text_is_not_changed_by_escaping(text: str) -> None:
    assert escape(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\n", "\\n"), ("\x1b[31m", "\\x1b[31m"), ("\u202e", "\\u202e"), ("\udcff", "\\udcff")],
)
def test_what_could_change_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_a_quotation_is_cut() -> None:
    assert quote("a" * 100) == '"' + "a" * 80 + '…"'


@given(st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_timestamps_are_utc_to_the_millisecond(moment: datetime) -> None:
    text = timestamp(moment.timestamp())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text)
    read = datetime.fromisoformat(text.replace("Z", "+00:00"))
    assert abs((moment - read).total_seconds()) < 0.0011


def test_a_timestamp_is_now_unless_told() -> None:
    before = timestamp()
    assert before <= timestamp(datetime.now(UTC).timestamp() + 0.001)


def test_what_is_quoted_shows_its_own_quotes() -> None:
    assert quote('say "no"') == r'"say \"no\""'
    assert quote("a\tb") == r'"a\tb"'


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4, 7, 8, 9, 1000, 3000])
def test_a_free_number_is_found_without_looking_at_all(taken: int) -> None:
    asked: list[int] = []

    def is_taken(number: int) -> bool:
        asked.append(number)
        return number <= taken

    assert free_number(is_taken) == taken + 1
    assert len(asked) <= 2 * taken.bit_length() + 1
    assert free_number(is_taken, most=max(1, 2 * taken)) == taken + 1
    assert free_number(is_taken, most=taken) == (0 if taken else 1)


def test_a_free_number_is_one_after_one_that_is_taken() -> None:
    gaps = {1, 2, 3, 4, 6, 8}
    number = free_number(gaps.__contains__)
    assert number not in gaps
    assert number - 1 in gaps


@pytest.mark.parametrize(
    ("names", "count", "said"),
    [
        ([], 0, ""),
        ([], 7, "7"),
        (["a"], 1, "a"),
        (["a", "b\n"], 2, "a, b\\n"),
        (["a", "b"], 9, "a, b and 7 more"),
        (["abcde", "fghij"], 2, "abcde and 1 more"),
        (["x" * 11, "y"], 2, "2"),
    ],
)
def test_as_many_names_as_fit_are_told_and_how_many_are_not(
    names: list[str], count: int, said: str
) -> None:
    assert some_of(names, count, 10) == said
