"""The command export: an agent as a file that declares one (ctxfs.yaml(5))."""

from __future__ import annotations

import re

from client import files
from client.declaring import NAME, Arguments, command
from client.exits import FAILED, Failure
from client.output import STDOUT, escape
from client.root import Root, agent
from client.shipped import find_shipped
from client.types import Iterator
from client.words import AGENT_DEFAULTS, AGENT_FORMS

SCHEMA = "ctxfs-agent.schema.json"
#: what is a word to every reader of YAML without quotes
PLAIN = re.compile(r"""[A-Za-z/](?:[A-Za-z0-9_/.,@%+=~*'"();$|&<>?! -]|:(?=[^ ]))*""")
#: and these are not, to some
OTHERS = frozenset(("true", "false", "null", "yes", "no", "on", "off", "y", "n"))


# YAML


def flow(value: object) -> str:
    """Return a value of JSON, such as a text, as YAML on one line and printable."""
    import json

    return escape(json.dumps(value, ensure_ascii=False))


def scalar(text: str) -> str:
    """Return a text as YAML: plain where every reader takes it for one."""
    plain = PLAIN.fullmatch(text) and not text.endswith(" ") and text.lower() not in OTHERS
    return text if plain else flow(text)


def is_block(text: str) -> bool:
    """Return whether a text of several lines can stand in YAML as it is."""
    lines = text.split("\n")
    return (
        lines.pop() == ""
        and all(line.isprintable() for line in lines)
        and bool(lines)
        and lines[0][:1] not in ("", " ")
        and lines[-1].strip(" ") != ""
    )


def items(lines: list[str]) -> str:
    return "".join(f"\n  - {line}" for line in lines) if lines else " []"


def block(text: str) -> str:
    if not is_block(text):
        return " " + flow(text)
    return " |\n" + "\n".join(f"  {line}" if line else "" for line in text.split("\n")[:-1])


def pairs(lines: list[str]) -> str:
    split = (line.partition("=") for line in lines)
    made = "".join(f"\n  {key}: {scalar(value)}" for key, _, value in split)
    return made or " {}"


def yaml_value(form: str, text: str) -> str:
    """Return what stands after `KEY:` for a file with this text."""
    if form == "lines":
        return items([scalar(line) for line in text.removesuffix("\n").split("\n") if text])
    lines = [line for line in text.split("\n") if line]
    if form in ("word", "parent"):
        return " " + scalar(text.removesuffix("\n"))
    if form == "number":
        return " " + text.strip()
    if form == "numbers":
        return f" [{', '.join(lines)}]"
    if form == "pairs":
        return pairs(lines)
    import json

    if form == "json":
        return " " + flow(json.loads(text))
    if form == "json_lines":
        return items([flow(json.loads(line)) for line in lines])
    return block(text)


# an agent


class Exported:
    """The files of an agent, as far as they say what it was told to be."""

    def __init__(self, root: Root, name: str) -> None:
        self.root = root
        self.name = name
        self.live = root.read(agent(name, "status")).decode().strip() not in ("new", "dead")
        lineage = self.text("parent")
        self.parent = lineage[6:].split()[0] if lineage.startswith("agent:") else ""

    def text(self, file: str) -> str:
        return text_of(self.root.read(agent(self.name, file)), f"{self.name}: {file}")

    def keys(self) -> Iterator[tuple[str, str]]:
        """Yield the files that are not as they would be at first, and their texts."""
        own = {"parent": lambda: self.parent, "limits": self.limits}
        for file in AGENT_FORMS:
            text = own[file]() if file in own else self.text(file)
            if not self.is_default(file, text):
                yield file, text

    def is_default(self, file: str, text: str) -> bool:
        """Return whether a file need not be said."""
        value = text.removesuffix("\n")
        if file in ("uid", "gid", "profile"):
            return bool(self.parent) or file == "profile"  # the parent's; what life says
        if self.parent and file in ("groups", "exec"):
            return text == self.root.read(agent(self.parent, file)).decode()
        if file == "groups":
            return not value and self.text("owner") == "0\n"
        defaults = {
            **AGENT_DEFAULTS,
            "owner": "0",
            "life": "owned" if self.parent else "detached",
            "label": f"{self.name}_t",
            "workspace": "inherit",
            "path": self.root.join("tool"),
            "meta.json": "{}",
        }
        return file != "policy" and value == defaults.get(file, "")

    def limits(self) -> str:
        """Return its limits without those that the configuration sets."""
        configured = files.pairs(self.root.value("status")).get("limits", "").split(",")
        lines = self.text("limits").split("\n")
        return "".join(
            f"{line}\n"
            for line in lines
            if line and not line.endswith("=max") and line not in configured
        )

    def yaml(self) -> str:
        """Return the file that declares it."""
        schema = find_shipped(f"contrib/{SCHEMA}", f"ctxfs/{SCHEMA}")
        schema = schema or f"/usr/share/ctxfs/{SCHEMA}"
        head = f"# yaml-language-server: $schema={schema}\n"
        body = "".join(
            f"{file}:{yaml_value(AGENT_FORMS[file], text)}\n" for file, text in self.keys()
        )
        return f"{head}start: {'true' if self.live else 'false'}\n{body}"


def text_of(data: bytes, what: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise Failure(f"{what} is not a text, which YAML could hold", FAILED)
    return text


@command("export", NAME)
def do_export(root: Root, args: Arguments) -> None:
    """Print a file for agents.d that declares an agent as it is.

    Its configuration and delegated task are printed, with the values of env, which may be
    secret. Not printed: histories, results, messages, tasks, work items and waits.
    """
    STDOUT.text(Exported(root, args.name).yaml())
