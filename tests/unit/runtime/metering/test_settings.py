"""The configuration of the meter: each mistake is told with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import StartupError
from runtime.metering.main import main
from runtime.metering.settings import Network, Rate, load

NETWORK = "{api: anthropic, socket: /run/a, upstream: /run/b}"
GOOD = f"networks:\n  a: {NETWORK}\n"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "meter.yaml"
    path.write_text(f"""{GOOD}drain: 250ms
relay_user: root
rates:
  claude-*: {{in: 5, cached: 0.5, written: 6.25, out: 25}}
  "*": {{in: 0.001, out: 0}}
""")
    settings = load(path)
    assert settings.networks == {"/run/a": Network("anthropic", "/run/a", "/run/b")}
    assert (settings.drain, settings.relay_user) == (0.25, 0)
    assert list(settings.rates.items()) == [
        ("claude-*", Rate(5000, 25000, 500, 6250)), ("*", Rate(1, 0)),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "said"), [
    ("", 1, "no networks"),
    ("- a\n", 1, "not a map of settings"),
    ("networks: {}\n", 1, "no networks"),
    ("networks: 5\n", 1, "networks: 5 is not a map of names"),
    (f"networks:\n  a: {NETWORK}\n  a: {NETWORK}\n", 3, "is there twice"),
    ("networks:\n  a: [\n", 3, "not YAML"),
    (f"{GOOD}rate: {{}}\n", 3, "unknown setting; did you mean rates?"),
    (f"{GOOD}  b: {{api: x, socket: /run/c, upstream: /run/d}}\n", 3,
     'api: unknown value "x"; use anthropic, openai, gemini'),
    (f"{GOOD}  b: {{api: [x], socket: /run/c, upstream: /run/d}}\n", 3, "unknown value"),
    (f"{GOOD}  b: {{api: openai, socket: run/c, upstream: /run/d}}\n", 3, "socket"),
    (f"{GOOD}  b: {{api: openai, socket: /run/c, upstream: d}}\n", 3, "upstream"),
    (f"{GOOD}  b: {{api: openai, socket: /{'c' * 107}, upstream: /d}}\n", 3, "longer than"),
    (f"{GOOD}  b: {{api: openai, socket: /run/a, upstream: /d}}\n", 3, "is that of a"),
    (f"{GOOD}  b: {{api: openai, socket: /run/b, upstream: /d}}\n", 3, "is that of a"),
    (f"{GOOD}  b: {{api: openai, socket: /run/d, upstream: /run/d}}\n", 3, "is that of b"),
    (f"{GOOD}  b: {{api: openai, socket: /run/d}}\n", 3, "b: upstream is missing"),
    (f"{GOOD}  b: {{api: openai, socket: /c, upstream: /d, port: 1}}\n", 3,
     "port: unknown key; use api, socket"),
    (f"{GOOD}  b: text\n", 3, "is not a map with api, socket, upstream"),
    (f"{GOOD}drain: 5\n", 3, "is not a duration"),
    (f"{GOOD}drain: -5s\n", 3, "is not a duration"),
    (f"{GOOD}relay_user: nobody-at-all\n", 3, 'no user "nobody-at-all"'),
    (f"{GOOD}rates: [1]\n", 3, "is not a map of patterns"),
    (f"{GOOD}rates:\n  a: {{in: 1, out: 2}}\n  b: {{in: -1, out: 2}}\n", 5, "in: -1 is no price"),
    (f"{GOOD}rates:\n  b: {{in: 0.0001, out: 2}}\n", 4, "in: 0.0001 is finer than a thousandth"),
    (f"{GOOD}rates:\n  b: {{in: 1e-9, out: 2}}\n", 4, "is finer than a thousandth"),
    (f"{GOOD}rates:\n  b: {{in: 1000001, out: 2}}\n", 4, "is no price"),
    (f"{GOOD}rates:\n  b: {{in: true, out: 2}}\n", 4, "is no price"),
    (f"{GOOD}rates:\n  b: {{in: '1', out: 2}}\n", 4, "is no price"),
    (f"{GOOD}rates:\n  b: {{in: .nan, out: 2}}\n", 4, "is no price"),
    (f"{GOOD}rates:\n  b: {{in: 1, out: 2, cached: null}}\n", 4, "cached: None is no price"),
    (f"{GOOD}rates:\n  b: {{in: 1}}\n", 4, "b: out is missing"),
    (f"{GOOD}rates:\n  b: {{in: 1, out: 2, outs: 3}}\n", 4, "outs: unknown key; did you mean out?"),
])  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: int, said: str
) -> None:
    path = tmp_path / "meter.yaml"
    path.write_text(text)
    assert main(["--config", str(path), "--check-config"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"ctxfs-meter: {path}:{line}: ") and said in told
    assert main(["--config", str(path)]) == 1, "a start says the same"
    assert capsys.readouterr().err == told


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "meter.yaml"
    path.write_text(f"drain: x\n{GOOD}rates:\n  a: {{}}\n  b: {{}}\n")
    with pytest.raises(StartupError) as wrong:
        load(path)
    lines = str(wrong.value).split("\n")
    assert [each.split(":")[1] for each in lines] == ["1", "5", "6"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StartupError, match=str(path)):
            load(path)
    path = tmp_path / "latin"
    path.write_bytes(b"\xff")
    with pytest.raises(StartupError, match="not UTF-8"):
        load(path)


def test_a_good_one_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "meter.yaml"
    path.write_text(GOOD)
    assert main(["--config", str(path), "--check-config"]) == 0
    assert capsys.readouterr().err == ""
