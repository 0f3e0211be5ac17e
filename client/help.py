"""Help about all commands, a group, or one command."""

from __future__ import annotations

import os

from client.commands import (
    CHAPTERS,
    GROUPS,
    SUBJECTS,
    commands_of,
    find_command,
    no_command,
)
from client.declaring import Arguments, Command, command, operand
from client.exits import OK, USAGE, Failure
from client.files import find_program
from client.manual import TOPICS, find_page, page_of, show_page
from client.output import STDOUT
from client.parsing import parser_for
from client.root import Root

EXAMPLES = """\
Examples
  ctx spawn hello --wait --rm -- echo "hello from a sandbox"
  ctx spawn build --mount "$PWD:/src:rw" --cwd /src --timeout 10m -- make
  ctx spawn watch --restart on-failure -- my-agent
  echo "review the last commit" | ctx spawn rev --parent coder -- my-agent
  ctx wait rev && ctx result rev
  ctx log -f coder
  ctx run coder --keep --message "fix the test" -- my-agent && ctx chat coder
  ctx task start -a coder --wait -- 'make test 2>&1 | tail'
  ctx work new -a coder --focus "make the tests pass"
  ctx waits add -a coder later timer 30m
  ctx tool call AgentGet '{"agent_id": "coder"}'
"""


def overview() -> str:
    """Return the help about all commands."""
    listed = ""
    for chapter, words in CHAPTERS.items():
        listed += f"\n{chapter}\n"
        for word in words:
            group = GROUPS.get(word)
            rows = commands_of(word)
            about = f"{group.summary}: {' '.join(rows)}" if group else rows[""].summary
            listed += f"  {word:<8} {about}\n"
    width = max(map(len, TOPICS))
    topics = "".join(f"  {topic:<{width}} {about}\n" for topic, (about, _) in TOPICS.items())
    return (
        "usage: ctx [--root DIR] COMMAND [ARGUMENT...]\n\n"
        "Manages the agents of a mounted ctxfs. For a first look: ctx help tour\n\n"
        f"Commands (for details: ctx help COMMAND)\n{listed}\n"
        f"Topics (man pages: ctx help TOPIC)\n{topics}\n"
        "Options\n  --root DIR  where ctxfs is mounted (default: $CTX_ROOT, else the mount\n"
        "              of your own ctxd, else /ctx)\n"
        f"  -h, --help  show this help\n  --version   show the version of ctx\n\n{EXAMPLES}"
    )


def group_help(name: str) -> str:
    """Return the help about a group."""
    group = GROUPS[name]
    rows = "".join(f"  {word:<7} {row.summary}\n" for word, row in commands_of(name).items())
    notes = f"\n{group.notes}\n" if group.notes else ""
    return (
        f"usage: ctx {name} [COMMAND] [ARGUMENT...]\n\n"
        f"{group.summary[0].upper()}{group.summary[1:]}. Without a COMMAND, runs list.\n\n"
        f"commands (for details: ctx help {name} COMMAND):\n{rows}{notes}"
    )


def show_help(topic: list[str]) -> int:
    """Show help about a command, a group, or all commands."""
    if not topic:
        STDOUT.text(overview())
    elif len(topic) == 1 and topic[0] in GROUPS:
        STDOUT.text(group_help(topic[0]))
    else:
        command, rest = find_command(topic)
        if rest:
            raise no_command(" ".join(topic))
        parser_for(command).print_help()
    return OK


def place_of(command: Command) -> str:
    """Return the pattern of the line at which a command is explained in its page.

    The command is less indented than what is said of it, and its arguments or a sentence follow.
    There is no `$`, where less(1) takes the end of the pattern to be.
    """
    return f"^ {{4,8}}{command.name} +([A-Z[]|acp|name|tool)"


@command("help", operand("topic", "[TOPIC...]", "a command, a topic or a man page"))
def do_help(root: Root, args: Arguments) -> int:
    """Show help.

    Topics and man pages are shown by man(1), or else as plain text. On a terminal, that of a
    command is its place in ctx(1); ctx COMMAND --help shows its arguments.
    """
    words = args.topic
    page = page_of(words[0]) if len(words) == 1 else ""
    if page:
        return show_page(page)
    if words and words[0] not in SUBJECTS:
        raise Failure(f'unknown command or topic "{words[0]}"; see: ctx help', USAGE)
    known = words and not (len(words) == 1 and words[0] in GROUPS)
    if known and os.isatty(1) and find_page("ctx.1") and find_program("man"):
        command, rest = find_command(words)
        if not rest:
            return show_page("ctx.1", place_of(command))
    return show_help(words)
