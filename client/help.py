"""Help about all commands, a group, or one command; the man pages, and what shows them."""

from __future__ import annotations

import os

from client.commands import (
    CHAPTERS,
    GROUPS,
    OTHERWISE,
    SUBJECTS,
    commands_of,
    find_command,
    meant,
    no_command,
    parser_for,
)
from client.declaring import Arguments, Command, command, operand
from client.exits import Failure, Misuse
from client.files import find_program, read_file
from client.output import STDOUT, decode, escape
from client.root import Root
from client.shipped import find_shipped
from client.types import Sequence

# man pages


#: what each topic is about, and its page
TOPICS = {
    "tour": ("the idea, the tree, and a tour", "ctxfs.7"),
    "client": ("this command, with all that it can do", "ctx.1"),
    "files": ("every file and its format", "ctxfs.5"),
    "programs": ("what the program of an agent gets, and how it answers", "ctxfs-programs.7"),
    "tasks": ("tasks, work items and waits", "ctxfs-tasks.5"),
    "tools": ("tools and sockets, for programs that speak JSON", "ctxfs-tools.5"),
    "orchestrators": ("agents that have others do their work", "ctxfs-orchestrators.7"),
    "worktrees": ("children with the context or the repository of a parent", "ctxfs-worktrees.7"),
    "policy": ("who may do what", "ctxfs-policy.5"),
    "settings": ("the configuration of ctxd, and declared agents", "ctxfs.yaml.5"),
    "daemon": ("ctxd, its limits and files", "ctxd.8"),
    "meter": ("what agents use of models: how it is counted and limited", "ctxfs-meter.8"),
}
#: macros of mdoc(7) that are left out of plain text, and those that stand for characters
SILENT = frozenset((
    "Ar", "Cm", "D1", "Dl", "Dv", "Em", "Er", "Ev", "Ic", "Li", "No", "Nm", "Pa", "Sx", "Sy",
    "Va", "Vt",
))  # fmt: skip
OPENING = {"Oo": "[", "Po": "(", "Do": '"', "So": "'"}
CLOSING = {"Oc": "]", "Pc": ")", "Dc": '"', "Sc": "'"}
#: macros for what opens here and closes at the end of the line
AROUND = {"Op": "Oo", "Pq": "Po", "Ql": "So", "Dq": "Do", "Sq": "So"}
ESCAPES = (("\\(dq", '"'), ("\\(aq", "'"), ("\\&", ""), ("\\-", "-"), ("\\e", "\\"))
PUNCTUATION = (",", ".", ";", ":", ")", "]")
WIDTH = 78
INDENT, ITEM = " " * 6, " " * 3


def page_of(word: str) -> str:
    """Return the file name of a page, empty if there is none.

    A page is named by its topic, as NAME, as NAME(SECTION), or by the end of its name: yaml.
    """
    if word in TOPICS:
        return TOPICS[word][1]
    name = word.replace("(", ".").rstrip(")")
    pages = [page for _, page in TOPICS.values()]
    names = (name, f"ctxfs.{name}")
    return next((page for page in pages if {page, page.rpartition(".")[0]} & {*names}), "")


def find_page(page: str) -> str:
    """Return the path of a page, empty if it is not here."""
    return find_shipped(f"man/{page}", f"man/man{page[-1]}/{page}", ("", ".gz"))


def show_page(page: str, pattern: str = "") -> None:
    """Show a page by man(1), else as plain text, from the first line with a pattern on."""
    path = find_page(page)
    if not path:
        name, _, section = page.rpartition(".")
        raise Failure(f"the page {name}({section}) is not here; it is where ctxfs is installed")
    man = find_program("man")
    if man:
        less = ["-P", f"less '+/{pattern}'"] if pattern and find_program("less") else []
        import signal

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and man would, too
        os.execv(man, ["man", *less, "-l", path])
    STDOUT.text(escape(plain(read_page(path)), keep="\n"))


def read_page(path: str) -> str:
    """Return the source of a page."""
    data = read_file(path)
    if path.endswith(".gz"):
        import gzip

        data = gzip.decompress(data)
    return decode(data)


def unescape(text: str) -> str:
    """Return the characters that escapes of roff stand for."""
    for escaped, char in ESCAPES:
        text = text.replace(escaped, char)
    return text


def rendered(words: Sequence[str], name: str) -> str:
    """Return a line of macros as text; `name` is what the page is about."""
    text, glued, flags, left = "", True, False, list(words)
    while left:
        word = left.pop(0)
        piece, opens = "", False
        if word in AROUND:
            end, opening = len(left), AROUND[word]
            while end and (left[end - 1] in PUNCTUATION or left[end - 1] in CLOSING):
                end -= 1
            left = [opening, *left[:end], f"{opening[0]}c", *left[end:]]
        elif word == "Xr" and len(left) > 1:
            piece = f"{left.pop(0)}({left.pop(0)})"
        elif word == "Nm" and (not left or left[0] in PUNCTUATION):
            piece = name
        elif word in ("Fl", "Ns", "Ap") or word in SILENT:
            text += "'" if word == "Ap" else ""
            glued, flags = glued or word in ("Ns", "Ap"), word == "Fl"
        elif word in OPENING or word in CLOSING:
            piece, opens = OPENING.get(word) or CLOSING[word], word in OPENING
            glued = glued or not opens
            flags = False
        else:
            piece, opens = unescape(word).strip('"'), word in ("(", "[")
            glued = glued or word in PUNCTUATION
            if flags and word != "|" and word not in PUNCTUATION:
                piece = f"-{piece}"
        if piece:
            text += piece if glued else f" {piece}"
            glued = opens
    return text


def table_as_list(source: str) -> str:
    """Return the rows of a table of tbl(1) as a list: the first cell, then the others named."""
    import re

    def one_line(cell: re.Match[str]) -> str:
        return cell[1].replace("\n", " ")

    source = re.sub(r"T\{\n(.*?)\nT\}", one_line, source, flags=re.S)
    head, *rows = (line.split("\t") for line in source.splitlines() if line != "_")
    lines = [".Bl -tag"]
    for first, *others in rows:
        named = zip(head[1:], others, strict=False)
        lines += [f".It {first}", *(f"{about}: {text.rstrip('.')}." for about, text in named)]
    return "\n".join((*lines, ".El", ""))


def plain(source: str) -> str:
    """Return a page of mdoc(7) as text: what our own pages use of it."""
    import re
    import textwrap

    source = re.sub(
        r"^\.TS\n.*?\.\n(.*?)^\.TE\n", lambda match: table_as_list(match[1]), source,
        flags=re.M | re.S,
    )  # fmt: skip
    lines: list[str] = []
    words: list[str] = []
    name = source.partition(".Dt ")[2].partition(" ")[0].lower()
    literal = False
    marks: list[str] = []  # of the next items of the lists that are open

    def end_paragraph() -> None:
        text = " ".join(words).replace("( ", "(").replace(" )", ")")
        for line in textwrap.wrap(
            text, WIDTH - len(INDENT), break_on_hyphens=False, break_long_words=False
        ):
            lines.append(INDENT + line)
        words.clear()

    for line in source.splitlines():
        macro, _, rest = line.partition(" ")
        if macro == ".Ed":
            literal = False
        elif literal:
            lines.append(f"{INDENT}    {unescape(line)}".rstrip())
        elif line.startswith(('.\\"', "'\\\"")):
            continue
        elif not line.startswith("."):
            words.append(unescape(line))
        elif macro in (".Sh", ".Ss", ".Pp", ".Bd", ".It", ".Dl", ".D1"):
            end_paragraph()
            if macro != ".It" or not lines[-1].startswith(ITEM):
                lines.append("")
            if macro in (".Sh", ".Ss"):
                lines.append(rest if macro == ".Sh" else f"  {rest}")
            elif macro == ".It" and rest:
                lines.append(ITEM + rendered(rest.split(), name))
            elif macro == ".It" and marks[-1]:
                lines.append(ITEM + marks[-1])
                if marks[-1] != "*":
                    marks[-1] = f"{int(marks[-1][:-1]) + 1}."
            elif macro in (".Dl", ".D1"):
                shown = unescape(rest) if macro == ".Dl" else rendered(rest.split(), name)
                lines.append(f"{INDENT}    {shown}")
            literal = macro == ".Bd"
        elif macro == ".Nd":
            words.append(f"- {rest}")
        elif macro == ".Bl":
            kind = rest.partition(" ")[0]
            marks.append({"-bullet": "*", "-enum": "1."}.get(kind, ""))
        elif macro == ".El":
            marks.pop()
        elif macro not in (".Dd", ".Dt", ".Os", ".ad"):
            words.append(rendered([macro[1:], *rest.split()], name))
    end_paragraph()
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


# help


EXAMPLES = """\
Examples
  ctx spawn hello --wait --rm -- echo "hello from a sandbox"
  ctx spawn build --mount "$PWD:/src:rw" --cwd /src --timeout 10m -- make
  ctx spawn watch --restart on-failure -- my-agent
  echo "review the last commit" | ctx spawn rev --parent coder --handoff - -- my-agent
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
            about = f"{group}: {' '.join(rows)}" if group else rows[""].summary
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
    other = OTHERWISE.get(name)
    notes = f"\nctx {name} NAME JSON also {other}s a {name}.\n" if other else ""
    return (
        f"usage: ctx {name} [COMMAND] [ARGUMENT...]\n\n"
        f"{group[0].upper()}{group[1:]}. Without a COMMAND, runs list.\n\n"
        f"commands (for details: ctx help {name} COMMAND):\n{rows}{notes}"
    )


def show_help(topic: list[str]) -> None:
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


def place_of(command: Command) -> str:
    """Return the pattern of the line at which a command is explained in its page.

    The command is less indented than what is said of it, and its arguments or a sentence follow.
    There is no `$`, where less(1) takes the end of the pattern to be.
    """
    return f"^ {{4,8}}{command.name} +([A-Z[]|acp|claude|name|tool)"


@command("help", operand("topic", "[TOPIC...]", "a command, a topic or a man page"))
def do_help(root: Root, args: Arguments) -> None:
    """Show help.

    Topics and man pages are shown by man(1), or else as plain text. On a terminal, that of a
    command is its place in ctx(1); ctx COMMAND --help shows its arguments.
    """
    words = args.topic
    page = page_of(words[0]) if len(words) == 1 else ""
    if page:
        show_page(page)
        return
    if words and words[0] not in SUBJECTS:
        like = meant(words[0], (*SUBJECTS, *TOPICS), "help ")
        raise Misuse(f'unknown command or topic "{words[0]}"{like or "; see: ctx help"}')
    known = words and not (len(words) == 1 and words[0] in GROUPS)
    if known and os.isatty(1) and find_page("ctx.1") and find_program("man"):
        command, rest = find_command(words)
        if not rest:
            show_page("ctx.1", place_of(command))
            return
    show_help(words)
