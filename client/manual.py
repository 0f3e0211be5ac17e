"""The man pages: where they are, and what to show them with."""

from __future__ import annotations

import os

from client.exits import OK, Failure
from client.files import find_program, read_file
from client.output import STDOUT, decode, escape
from client.shipped import find_shipped
from client.types import Sequence

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
}
#: macros of mdoc(7) that are left out of plain text, and those that stand for characters
SILENT = frozenset((
    "Ar", "Cm", "D1", "Dl", "Dv", "Em", "Er", "Ev", "Ic", "Li", "No", "Nm", "Pa", "Sx", "Sy",
    "Va", "Vt",
))  # fmt: skip
OPENING = {"Oo": "[", "Po": "(", "Do": '"', "So": "'"}
CLOSING = {"Oc": "]", "Pc": ")", "Dc": '"', "Sc": "'"}
AROUND = {
    "Op": ("[", "]"), "Pq": ("(", ")"), "Ql": ("'", "'"), "Dq": ('"', '"'), "Sq": ("'", "'"),
}  # fmt: skip
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


def show_page(page: str, pattern: str = "") -> int:
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
    return OK


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
    text, glued, flags, number = "", True, False, 0
    while number < len(words):
        word, rest = words[number], words[number + 1 :]
        number += 1
        piece, opens = "", False
        if word in AROUND:
            left, right = AROUND[word]
            end = len(rest)
            while end and rest[end - 1] in PUNCTUATION:
                end -= 1
            piece = left + rendered(rest[:end], name) + right + "".join(rest[end:])
            number = len(words)
        elif word == "Xr" and len(rest) > 1:
            piece, number = f"{rest[0]}({rest[1]})", number + 2
        elif word == "Nm" and (not rest or rest[0] in PUNCTUATION):
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
