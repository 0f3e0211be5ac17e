"""The commands for asks: asking people, showing what is asked, and answering it."""

from __future__ import annotations

import errno
import os
import time

from client.declaring import COLOR, JSON, Arguments, command, flag, operand, option
from client.exits import FAILED, INTERRUPTED, OK, TIMED_OUT, Failure, Misuse
from client.files import read_stdin, timestamp, value_of
from client.following import RETRY, versions
from client.jsontext import dumps, loads
from client.output import STDOUT, age, as_json, complain, decode, escape, gist, show_table
from client.root import Root, agent, label, own_agent
from client.types import Any, Callable, Iterator, Result, Sequence

#: one that is open, as `asks` of the root tells of it
Ask = dict[str, Any]

GONE = (errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE)
LOST_MAX = 60.0  # seconds after which it is given up
COLUMNS = ("ASK", "AGE", "KIND", "TO", "ANSWERS", "QUESTION")


def parse_asks(data: bytes) -> list[Ask]:
    """Return the asks of some lines."""
    return [loads(line) for line in decode(data).splitlines()]


def open_asks(root: Root) -> list[Ask]:
    """Return the open asks that the caller may answer, or asks itself, oldest first."""
    return parse_asks(root.read("asks"))


def path_of(row: Ask) -> str:
    """Return what a command line calls an ask."""
    return f"{row['agent']}/{row['ask']}"


def named_ask(root: Root, named: str) -> Ask | None:
    """Return the open ask of NAME/X, or the only one of the agent NAME; None if it is not open."""
    name, _, ask = named.partition("/")
    found = [row for row in open_asks(root) if row["agent"] == name and ask in ("", row["ask"])]
    if len(found) > 1:
        several = ", ".join(map(path_of, found))
        raise Misuse(f"{name} asks {len(found)} things: say which one: {several}")
    return found[0] if found else None


# asking


@command(
    "ask",
    option("-o", "--option", "OPTION...", 'an answer that there is: WORD, or "WORD LABEL"'),
    option("--form", "JSON", "instead: a JSON schema of an object with fields"),
    option("--default", "ANSWER", "the answer if there is none before the deadline"),
    option("--deadline", "WHEN", "a time, or a duration from now"),
    option("--detail", "TEXT", "more about it; -: standard input"),
    option("--to", "WHOM", "operator (default), or supervisor", choices=("operator", "supervisor")),
    option("--kind", "KIND", "question (default), or permission",
           choices=("question", "permission")),
    option("--life", "LIFE", "agent (default); run: withdraw it when your run ends",
           choices=("agent", "run")),
    operand("question", "QUESTION", "one line"),
)
def do_ask(root: Root, args: Arguments) -> int:
    """Ask people something, and print the answer.

    Only agents ask; see ctx asks and ctx answer. A note goes to standard error. Ctrl-C withdraws
    the question. Exit status: 0 answered, 1 withdrawn, 124 if the deadline is over and there is no
    default.
    """
    from client.agents import Removing
    from client.following import wait_ended
    from client.items import create_object

    if not own_agent(root):
        raise Misuse("only agents ask: run this inside of one")
    detail = decode(read_stdin()) if args.detail == "-" else args.detail
    lines = {"kind": args.kind, "options": "\n".join(args.option), "form": args.form,
             "default": args.default, "deadline": args.deadline, "detail": detail, "to": args.to,
             "life": args.life}  # fmt: skip
    files = [(file, value_of(line)) for file, line in lines.items() if line]
    if not args.question:
        raise Misuse("nothing to ask: the question is empty")
    owner = create_object(root, Arguments(group="ask", agent=None, name=None), files)

    def ask() -> None:  # unless ctxd died before it could say that it is asked
        if root.value(f"{owner}/status") == "new":
            root.write(f"{owner}/question", value_of(args.question))

    with Removing(root, owner):
        outlasting(ask)
    try:
        outlasting(lambda: list(wait_ended(root, [owner])))
    except KeyboardInterrupt:
        root.remove(owner)
        return INTERRUPTED
    status, by, answered = outlasting(lambda: [
        root.value(f"{owner}/{file}") for file in ("status", "by", "answer")
    ])  # fmt: skip
    answer, _, note = answered.partition("\n")
    if status not in ("answered", "expired"):
        complain(f"{label(owner)}: withdrawn {by and 'by '}{by}".rstrip())
        return FAILED
    if not answer:
        complain(f"{label(owner)}: nobody answered before the deadline")
        return TIMED_OUT
    STDOUT.copy(value_of(answer))
    if note:
        complain(f"{label(owner)}: {note}")
    return OK


def outlasting(look: Callable[[], Result]) -> Result:
    """Return a result; a ctxd that dies meanwhile is waited for."""
    lost = 0.0  # seconds
    while True:
        began = time.monotonic()
        try:
            return look()
        except Failure as failure:
            lost = lost + RETRY if time.monotonic() - began < RETRY else 0.0
            if failure.number not in GONE or lost > LOST_MAX:
                raise
        time.sleep(RETRY)


# the inbox


def cells(row: Ask) -> list[str]:
    """Return the cells of an ask in a table."""
    answers = [line.partition(" ")[0] for line in row["options"]]
    answers = answers or [f"{name}=" for name in (row["form"] or {}).get("properties", ())]
    how_old = age(max(0, int(time.time() - timestamp(row["asked_at"]))))
    return [path_of(row), how_old, row["kind"], row["to"], " ".join(answers), gist(row["question"])]


@command(
    "asks",
    flag("-a", "--all", "also those that supervisors are asked"),
    flag("-f", "--follow", "continue with those that come"),
    JSON,
    COLOR,
)
def do_asks(root: Root, args: Arguments) -> None:
    """List what agents ask.

    Shows the open asks that you may answer, oldest first; inside an agent, also its own. In JSON,
    -f prints one object per line.
    """
    every = args.all or bool(own_agent(root))
    if not args.follow:
        rows = [row for row in open_asks(root) if every or row["to"] == "operator"]
        if args.json:
            STDOUT.text(as_json(rows))
        else:
            show_table(COLUMNS, map(cells, rows))
        return
    known: set[tuple[str, str]] = set()
    for data in versions(root, "asks"):
        rows = [row for row in parse_asks(data) if every or row["to"] == "operator"]
        keys = {(path_of(row), row["asked_at"]) for row in rows}
        for row in rows:
            if (path_of(row), row["asked_at"]) in known:
                continue
            STDOUT.lines([dumps(row) if args.json else "  ".join(map(str, cells(row)))])
        known = keys


# answering


def value_for(field: dict[str, Any], text: str) -> object:
    """Return the value of a field of a form; the text itself if it is none, for ctxd to refuse."""
    kind = field.get("type")
    if kind == "array":
        return [each.strip() for each in text.split(",") if each.strip()]
    if kind in ("integer", "number", "boolean"):
        try:
            return loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def answer_text(form: dict[str, Any] | None, words: Sequence[str], note: str = "") -> str:
    """Return what to write to `answer`: words as a line, or FIELD=VALUE for each field of a form
    or an object of JSON, and a note."""
    if not form:
        return "\n".join(filter(None, [" ".join(words), note]))
    if note:
        raise Misuse("an answer to a form has no note")
    if len(words) == 1 and words[0].startswith("{"):
        return words[0]
    fields, filled = form.get("properties", {}), dict[str, object]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise Misuse(f'"{word}" is not FIELD=VALUE; fields: {", ".join(fields)}')
        filled[name] = value_for(fields.get(name, {}), value)
    return dumps(filled)


def described(row: Ask) -> Iterator[str]:
    """Yield the lines that show a question."""
    yield f"{path_of(row)} asks ({row['kind']}, {row['asked_at']}):"
    yield f"  {row['question']}"
    yield from (f"    {line}" for line in row["detail"].splitlines())
    for line in row["options"]:
        word, _, text = line.partition(" ")
        yield f"  {word}{'  ' + text if text else ''}"
    for name, field in (row["form"] or {}).get("properties", {}).items():
        yield f"  {name}={described_field(field)}"
    if row["deadline"]:
        yield f"  until {row['deadline']}{', then ' + row['default'] if row['default'] else ''}"


def described_field(field: dict[str, Any]) -> str:
    """Return what a field of a form takes."""
    items = field.get("items", field)
    choices = items.get("enum") or [
        each.get("const") for each in items.get("oneOf", items.get("anyOf", ()))
    ]
    about = field.get("description") or field.get("title") or ""
    kind = "|".join(map(str, choices)) or str(field.get("type"))
    return f"{kind.upper() if not choices else kind}{'  ' + str(about) if about else ''}"


def typed_answer(row: Ask) -> list[str]:
    """Show a question, and return the words that are typed."""
    if not os.isatty(0):
        raise Misuse("no answer given: say it after the name of the ask")
    STDOUT.lines(described(row))
    fields = (row["form"] or {}).get("properties", {})
    if not fields:
        return [input("answer: ")]
    typed = ((name, input(escape(f"{name}="))) for name in fields)
    return [f"{name}={value}" for name, value in typed if value]


def send_answer(root: Root, row: Ask, text: str) -> None:
    """Answer an ask as it was shown.

    Its agent may have withdrawn it meanwhile, and ask something else by the same name.
    """
    owner = agent(row["agent"], f"ask/{row['ask']}")
    shown = Root(root.path)
    shown.hold(owner)
    try:
        for file in ("asked_at", "question"):
            if shown.value(f"{owner}/{file}") != row[file]:
                raise Failure(f"{path_of(row)} asks something else by now: look again")
        shown.write(f"{owner}/answer", value_of(text))
    finally:
        shown.let_go()


@command(
    "answer",
    option("--note", "TEXT", "what to say beside the answer"),
    operand("name", "ASK", "NAME/X; or NAME, if that agent asks one thing"),
    operand("words", "[ANSWER...]", "a word or a text; of a form FIELD=VALUE..."),
)
def do_answer(root: Root, args: Arguments) -> int | None:
    """Answer what an agent asks.

    Without an answer, shows the question and asks for one. It is answered once: exits 1 if
    somebody was faster, and says who.
    """
    row = named_ask(root, args.name)
    name, _, ask = args.name.partition("/")
    if row is None and not ask:
        root.call(agent(name), os.stat)
        raise Failure(f"{name} asks nothing that you may answer")
    if row is None:  # ctxd says what has become of it
        root.write(agent(name, f"ask/{ask}/answer"), value_of(" ".join(args.words)))
        return None
    try:
        words = args.words or typed_answer(row)
    except (EOFError, KeyboardInterrupt):
        STDOUT.text("\n")
        return INTERRUPTED
    send_answer(root, row, answer_text(row["form"], words, args.note or ""))
    if args.words and os.isatty(2):  # the agent may have asked something else since it was listed
        complain(escape(f"answered {path_of(row)}: {row['question']}"))
    return None
