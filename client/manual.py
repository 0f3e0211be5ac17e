"""The man pages: where they are, and what to show them with."""

from __future__ import annotations

import os

from client.exits import OK, Failure
from client.files import find_program, read_file
from client.output import STDOUT, decode, escape
from client.shipped import find_shipped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


#: what each topic is about, and its page
TOPICS = {
    "tour": ("the idea, the tree, and a tour", "ctxfs.7"),
    "client": ("this command, with all that it can do", "ctx.1"),
    "files": ("every file and its format; writing agents", "ctxfs.5"),
    "policy": ("who may do what", "ctxfs-policy.5"),
    "settings": ("the configuration of ctxd, and declared agents", "ctxfs.yaml.5"),
    "daemon": ("ctxd, its limits and files", "ctxd.8"),
}
#: macros of mdoc(7) that are left out of plain text, and those that stand for characters
SILENT = frozenset(("Ar", "Cm", "Em", "Ev", "Ic", "Li", "No", "Nm", "Pa", "Sy", "Va", "Vt"))
SIGNS = {"Oo": "[", "Oc": "]", "Po": "(", "Pc": ")", "Ap": "'"}
AROUND = {
    "Op": ("[", "]"), "Pq": ("(", ")"), "Ql": ("'", "'"), "Dq": ('"', '"'), "Sq": ("'", "'"),
}  # fmt: skip
ESCAPES = (("\\(dq", '"'), ("\\(aq", "'"), ("\\&", ""), ("\\-", "-"), ("\\e", "\\"))
PUNCTUATION = (",", ".", ";", ":")
WIDTH = 78
INDENT, ITEM = " " * 6, " " * 3


def page_of(word: str) -> str:
    """Return the file name of a page from a topic, a name or NAME(SECTION); empty if unknown."""
    if word in TOPICS:
        return TOPICS[word][1]
    name = word.replace("(", ".").rstrip(")")
    pages = [page for _, page in TOPICS.values()]
    return next((page for page in pages if name in (page, page.rpartition(".")[0])), "")


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
    text, glue, mark, last = "", True, "", ""
    for number, word in enumerate(words):
        rest = words[number + 1 :]
        if word in AROUND:
            left, right = AROUND[word]
            end = len(rest) - (bool(rest) and rest[-1] in PUNCTUATION)
            tail = "".join(rest[end:])
            piece = left + rendered(rest[:end], name) + right + tail
            return text + ("" if glue else " ") + piece
        if word == "Xr" and len(rest) > 1:
            return text + ("" if glue else " ") + f"{rest[0]}({rest[1]}){rendered(rest[2:], name)}"
        if word == "Ns":
            glue = True
        elif word == "Fl":
            mark = "-"
        elif word == "Nm" and (not rest or rest[0] in PUNCTUATION):
            text, glue = text + ("" if glue else " ") + name, False
        elif word not in SILENT:
            sign = SIGNS.get(word, word)
            glue = glue or sign in (*PUNCTUATION, ")", "]", "'")
            text += ("" if glue else " ") + mark + unescape(sign).strip('"')
            glue, mark, last = sign in ("(", "["), last if sign == "|" else "", mark
    return text


def plain(source: str) -> str:
    """Return a page of mdoc(7) as text: what our own pages use of it."""
    import textwrap

    lines: list[str] = []
    words: list[str] = []
    name = source.partition(".Dt ")[2].partition(" ")[0].lower()
    literal = False

    def end_paragraph() -> None:
        text = " ".join(words).replace("( ", "(").replace(" )", ")")
        for line in textwrap.wrap(text, WIDTH - len(INDENT), break_on_hyphens=False):
            lines.append(INDENT + line)
        words.clear()

    for line in source.splitlines():
        macro, _, rest = line.partition(" ")
        if macro == ".Ed":
            literal = False
        elif literal:
            lines.append(f"{INDENT}    {unescape(line)}".rstrip())
        elif not line.startswith("."):
            words.append(unescape(line))
        elif macro in (".Sh", ".Ss", ".Pp", ".Bd", ".It", ".Dl"):
            end_paragraph()
            if macro != ".It" or not lines[-1].startswith(ITEM):
                lines.append("")
            if macro in (".Sh", ".Ss"):
                lines.append(rest if macro == ".Sh" else f"  {rest}")
            elif macro == ".It":
                lines.append(ITEM + (rendered(rest.split(), name) or "*"))
            elif macro == ".Dl":
                lines.append(f"{INDENT}    {unescape(rest)}")
            literal = macro == ".Bd"
        elif macro == ".Nd":
            words.append(f"- {rest}")
        elif macro not in (".Dd", ".Dt", ".Os", ".Bl", ".El"):
            words.append(rendered([macro[1:], *rest.split()], name))
    end_paragraph()
    return "\n".join(lines).strip("\n") + "\n"
