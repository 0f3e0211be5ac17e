"""Questions of other programs, such as whether a tool may be used, as asks of the agent that they
run in (ctxfs-tasks(5), Asks)."""

from __future__ import annotations

import errno
import os

from client.agents import create_numbered
from client.exits import Failure
from client.files import close, value_of
from client.following import RETRY
from client.jsonrpc import objects_in, text_in
from client.loop import POLLPRI, Loop, encode, parse_object
from client.output import complain, decode
from client.root import Root, agent, own_name
from client.types import Any, Callable, Sequence
from client.words import ASK_ENDS

#: what a person says of a permission, with what is shown of it
ALLOW, DENY = "allow", "deny"
BOTH = ((ALLOW, "Allow it once"), (DENY, "Refuse it; a note tells why"))
#: bytes of a question, and of what is told about it
QUESTION_MAX, DETAIL_MAX = 1000, 60_000
#: options of a permission request of the Agent Client Protocol, the best one first
ALLOWING, REJECTING = ("allow_once", "allow_always"), ("reject_once", "reject_always")
#: what is answered to one that nobody decides
CANCELLED = {"outcome": "cancelled"}
#: the tool of Claude Code by which its model asks people
ASKING = "AskUserQuestion"
#: fields of a tool's input that say most of it, the best one first
HEADS = ("command", "file_path", "path", "url", "query", "pattern", "description")


class End:
    """How an ask ended: `answer` is a line or the object of a form, `by` who gave it."""

    def __init__(self, status: str, text: str = "", by: str = "") -> None:
        self.status = status
        self.by = by
        self.text = text
        self.answer, _, self.note = text.partition("\n")

    def why(self) -> str:
        """Return why what was asked for is refused."""
        if self.note:
            return self.note
        return f"refused by {self.by}" if self.answer else "the question was withdrawn"


class Asked:
    """An ask of the own agent, until it is over; `then` gets its end, once."""

    def __init__(
        self, loop: Loop, root: Root, stem: str, files: Sequence[tuple[str, bytes]],
        then: Callable[[End], object],
    ) -> None:
        self.loop = loop
        self.root = root
        self.then: Callable[[End], object] | None = then
        self.fd = -1
        self.owner = create_numbered(root, f"{agent(own_name(root), 'ask')}/{stem}", files)
        self.look()

    def look(self) -> None:
        """Look whether it is over."""
        if self.then is None:
            return
        try:
            if self.fd < 0:
                self.fd = self.root.open(f"{self.owner}/status")
                self.loop.watch(self.fd, self.look, POLLPRI)
            status = decode(os.pread(self.fd, 64, 0)).strip()
            if status in ASK_ENDS:
                text, by = (self.root.value(f"{self.owner}/{file}") for file in ("answer", "by"))
                self.end(End(status, text, by))
        except (Failure, OSError) as error:
            self.close()
            number = error.errno if isinstance(error, OSError) else error.number
            if number in (errno.ENOENT, errno.ESTALE):  # somebody removed it
                self.end(End("withdrawn"))
            else:
                self.loop.later(RETRY, self.look)

    def end(self, end: End) -> None:
        """Tell how it ended."""
        then, self.then = self.then, None
        self.close()
        if then is not None:
            then(end)

    def withdraw(self) -> None:
        """Nobody wants the answer any more."""
        if self.then is not None:
            self.then = None
            self.close()
            remove(self.root, self.owner)

    def close(self) -> None:
        """Close its status."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.loop.forget(fd)
            close(fd)


class Asking:
    """Asks of the own agent that are not over; `stem` begins their names."""

    def __init__(self, loop: Loop, root: Root, stem: str) -> None:
        self.loop = loop
        self.root = root
        self.stem = stem
        self.asked: list[Asked] = []

    def ask(self, files: Sequence[tuple[str, bytes]], then: Callable[[End], object]) -> bool:
        """Ask, and have `then` get the end, also a withdrawal; return False if nobody can be
        asked."""
        try:
            asked = Asked(self.loop, self.root, self.stem, files, then)
        except Failure as failure:
            complain(f"nobody is asked: {failure}")
            return False
        self.asked = [*(each for each in self.asked if each.then is not None), asked]
        return True

    def withdraw(self) -> None:
        """Withdraw all of them."""
        asked, self.asked = self.asked, []
        for each in asked:
            then = each.then
            each.withdraw()
            if then is not None:
                then(End("withdrawn"))


def remove(root: Root, owner: str) -> None:
    """Withdraw an ask, unless it is gone."""
    try:
        root.remove(owner)
    except Failure:
        return


def fields_of(
    question: str,
    detail: str,
    options: Sequence[tuple[str, str]] = (),
    form: dict[str, Any] | None = None,
) -> list[tuple[str, bytes]]:
    """Return the files of an ask that ends with the run, whatever its texts have in them."""
    lines = {
        "kind": "permission",
        "life": "run",
        "options": "\n".join(f"{word} {one_line(label, 200)}".strip() for word, label in options),
        "form": encode(form).decode().strip() if form else "",
        "detail": detail,
        "question": one_line(question, QUESTION_MAX) or "?",
    }
    return [(file, value_of(line)) for file, line in lines.items() if line]


def words_for(names: Sequence[str]) -> dict[str, int]:
    """Return a word for each name, with its place: the name itself if it can be one."""
    words: dict[str, int] = {}
    for place, name in enumerate(names):
        fits = 0 < len(name) <= 64 and all("!" <= c <= "~" for c in name) and name not in words
        words[name if fits else f"option-{place + 1}"] = place
    return words


def cut(text: str, most: int) -> str:
    """Return what of a text has at most so many bytes, with a mark if it is not all."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= most else decode(data[: most - 8]).rstrip() + " ..."


def one_line(text: str, most: int) -> str:
    """Return a text as a line of printable characters."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return cut(" ".join(shown.split()), most)


def detail_of(given: object) -> str:
    """Return the input of a tool as people read it, the same for the same input."""
    return cut(encode(given).decode().strip(), DETAIL_MAX)


# what Claude Code asks


def asks_for(tool: str, given: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Return the files of an ask for a use of a tool by Claude Code."""
    detail = use_of(tool, given)
    form = form_of(given) if tool == ASKING else None
    if form:
        questions = objects_in(given, "questions")
        return fields_of(" / ".join(text_in(each, "question") for each in questions), detail,
                         form=form)
    head = next((text for name in HEADS if (text := text_in(given, name))), detail)
    return fields_of(f"{tool}: {one_line(head, 300)}", detail, BOTH)


def use_of(tool: str, given: dict[str, Any]) -> str:
    """Return the detail for a use of a tool, the same before and after it.

    After a dialogue, the input of AskUserQuestion has the answers, too.
    """
    return detail_of({"questions": given.get("questions")} if tool == ASKING else given)


def form_of(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return a form with a field for each question of the input of AskUserQuestion."""
    fields: dict[str, Any] = {}
    for name, each in named(given):
        labels = list(filter(None, (text_in(o, "label") for o in objects_in(each, "options"))))
        choice: dict[str, Any] = {"type": "string", **({"enum": labels} if labels else {})}
        if each.get("multiSelect") is True:
            choice = {"type": "array", "items": choice}
        about = {"title": text_in(each, "header"), "description": text_in(each, "question")}
        fields[name] = {**choice, **about}
    return {"type": "object", "properties": fields, "required": list(fields)} if fields else None


def named(given: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the questions of AskUserQuestion, each with the name of its field."""
    questions = objects_in(given, "questions")
    if len(questions) == 1:
        return [("answer", questions[0])]
    return [(f"answer_{number}", each) for number, each in enumerate(questions, 1)]


def filled(given: dict[str, Any], end: End) -> dict[str, Any]:
    """Return the input of AskUserQuestion with the answers to its questions."""
    said = parse_object(end.text.encode()) or {}
    answers = {}
    for name, each in named(given):
        value = said.get(name, "")
        chosen = value if isinstance(value, list) else [value]
        answers[text_in(each, "question")] = ", ".join(map(str, chosen))
    return {**given, "answers": answers}


def decided(tool: str, given: dict[str, Any], end: End) -> dict[str, Any]:
    """Return a decision in the words of Claude Code."""
    if tool == ASKING and end.answer:
        return {"behavior": "allow", "updatedInput": filled(given, end)}
    if end.answer == ALLOW:
        return {"behavior": "allow", "updatedInput": given}
    return {"behavior": "deny", "message": end.why()}


# what agents of the Agent Client Protocol ask


def choose(options: Sequence[dict[str, Any]], allowed: bool) -> dict[str, Any]:
    """Return the outcome of a permission request: the best option that allows, or rejects."""
    for kind in ALLOWING if allowed else REJECTING:
        for each in options:
            if each.get("kind") == kind:
                return {"outcome": "selected", "optionId": each.get("optionId")}
    return CANCELLED


def selected(options: Sequence[dict[str, Any]], place: int | None) -> dict[str, Any]:
    """Return the outcome of a permission request: one option, or none of them."""
    if place is None:
        return CANCELLED
    return {"outcome": "selected", "optionId": options[place].get("optionId")}
