"""What README files and man pages lead to is there, and their configurations can be read."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from client.commands import parse_command

CHECKOUT = Path(__file__).parents[2]
FOLDERS = ("bench", "contrib", "tests")
READMES = sorted(
    [*CHECKOUT.glob("*.md"), *(p for each in FOLDERS for p in (CHECKOUT / each).rglob("README.md"))]
)
PAGES = sorted((CHECKOUT / "man").glob("*.[1-8]"))
EXAMPLES = CHECKOUT / "contrib" / "examples" / "README.md"


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize(
    "page", [*READMES, *PAGES], ids=lambda page: str(page.relative_to(CHECKOUT))
)
def test_files_of_the_source_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"(?:`|Pa |Ql |sh )((?:contrib|man)/[\w./-]*\w)", page.read_text())
    assert not [path for path in named if not (CHECKOUT / path).exists()]


def test_tests_that_the_readme_of_tests_names_are_there() -> None:
    text = (CHECKOUT / "tests/README.md").read_text()
    named = re.findall(r"`(test_\w+)`", text)
    there = "".join(path.read_text() for path in (CHECKOUT / "tests").rglob("test_*.py"))
    assert len(named) > 10
    assert not [name for name in named if f"def {name}(" not in there]


def test_pages_say_who_reads_env() -> None:
    for page, words in (("ctxfs.5", "root of a node"), ("ctxfs-nodes.7", "root there")):
        text = " ".join((CHECKOUT / "man" / page).read_text().split())
        assert re.search(rf"(?:env|environment)\b[^.]*{words}|{words}[^.]*\benv\b", text), page


def test_the_architecture_is_short_and_names_modules_that_there_are() -> None:
    text = (CHECKOUT / "ARCHITECTURE.md").read_text()
    assert text.count("\n") <= 150
    folders = ("client", "ctxfs", "runtime", "contrib", "man", "tests")
    there = [f"/{path}" for each in folders for path in (CHECKOUT / each).rglob("*.*")]
    named = re.findall(r"`([\w./-]+\.(?:py|c|h|txt|1))`", text)
    assert len(named) > 50
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in there)]


def test_the_readme_names_sections_that_there_are() -> None:
    text = " ".join((CHECKOUT / "README.md").read_text().split())
    pages, found = {path.name: path.read_text() for path in PAGES}, []
    for section, name, more in re.findall(r"`man (?:(\d) )?([\w.-]+)`([^`*\[.]*)", text):
        (page,) = (page for page in pages if re.fullmatch(rf"{name}\.{section or '.'}", page))
        sections = re.findall(r"\b[A-Z]{3,}(?: [A-Z]+)*\b", more)
        found += sections
        assert not [each for each in sections if f"\n.Sh {each}\n" not in pages[page]]
    assert len(found) > 2


def servers() -> list[dict[str, Any]]:
    """What programs are told to start, in the configurations of the examples."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", EXAMPLES.read_text(), re.M | re.S)
    read = [(json.loads if kind == "json" else tomllib.loads)(text) for kind, text in blocks]
    kinds = ("mcpServers", "mcp_servers", "agent_servers")
    return [server for each in read for kind in kinds for server in each.get(kind, {}).values()]


def test_the_configurations_of_examples_start_commands_that_there_are() -> None:
    found = servers()
    assert len(found) == 5
    for server in found:
        assert server["command"] == "ctx"
        command, _ = parse_command(server["args"])
        assert command.name in ("mcp", "acp")


def test_alerts_name_commands_that_there_are() -> None:
    rules = yaml.safe_load((CHECKOUT / "contrib" / "monitoring" / "rules.yaml").read_text())
    said = [rule["annotations"]["description"] for rule in rules["groups"][0]["rules"]]
    found = [words.split() for text in said for words in re.findall(r"\bctx ([a-zA-Z ]+)", text)]
    assert len(found) >= 4
    for words in found:
        parse_command(words)
