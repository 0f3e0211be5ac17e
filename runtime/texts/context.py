"""The context that a forked child inherits: a bounded view of its parent, derived from a snapshot.

Pure: the same snapshot, hand-off and limit give the same bytes. There are two
renderings of one content, ``inherited.md`` for the child to read and
``inherited.json`` for programs.

Content is in order of importance, which is also the order from the lasting to
the volatile: what does not fit is cut from the end, and two forks between which
only a later part changed have all that is before it in common (models cache
prompts by their prefix). For that the room of a part depends on nothing after it.

In the Markdown every line of a text of several lines begins with a TAB, and a
text of one line follows its key. So a heading, a key or a note of ours is what
begins in the first column, and no text of an agent can forge one. Fences would
need a count of the backticks inside, and would still show a heading of the
agent's in the first column to who reads line by line. A newline takes two bytes
then, as it does in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from runtime.texts import names

#: the least ``limit``: what is not content fits into it, and a little more
LIMIT_MIN: Final = 4096

#: items related to the current one that are shown
RELATED_MAX: Final = 256
#: "the last few messages": more would be a transcript
TAIL_MESSAGES: Final = 10

_INTRODUCTION: Final = """\
# Inherited context

Derived from the state of the agent that this one was forked from. What follows a key, and lines
that begin with a TAB, are texts as they were written there: they make no section of this file.

"""

_WORD: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._+-]*")


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of a text that has so many bytes: the rest has no room in any case."""

    text: str
    size: int


Taken = str | Beginning
#: or what takes it: texts are taken in the order in which they have room
Text = Taken | Callable[[], Taken]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """A work item; ``blocked_by`` are the ids of others."""

    id: str
    objective: Text = ""
    plan: Text = ""
    acceptance: Text = ""
    status: str = "open"
    blocked_by: tuple[str, ...] = ()
    parent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """An entry of the waiting plane; ``work`` is the item that it blocks, or empty."""

    id: str
    on: str
    work: str = ""
    status: str = "armed"
    deadline: str = ""
    payload: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A child and what it gave back; ``work`` is the item that it was made for, or empty."""

    name: str
    status: str
    result: Text = ""
    work: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A message of the conversation; ``sender`` is its ``from``."""

    role: str
    sender: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The parent at one moment. Texts are such as UTF-8 can encode.

    ``focus`` is the id of the current work item, or empty; ``episodes`` are by
    id of their work item; ``tail`` are messages of ``run``, oldest first; ``over``
    are ids of items that are in nobody's way. The order of everything else does not matter.
    """

    agent: str
    session: str
    run: str
    items: tuple[WorkItem, ...] = ()
    focus: str = ""
    waits: tuple[Wait, ...] = ()
    memory: Text = ""
    episodes: Mapping[str, Text]
    children: tuple[Child, ...] = ()
    tail: tuple[Line, ...] = ()
    over: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Inherited:
    """``inherited.md`` and ``inherited.json``, each within the limit."""

    markdown: str
    json: str


def derive(snapshot: Snapshot, handoff: str, limit: int) -> Inherited:
    """The context that a child with this hand-off inherits, in at most ``limit`` bytes each.

    JSON: ``{agent, session, work, waits, related, memory, episodes, results, tail,
    left_out}``; ``work`` and ``memory`` are an object or null, ``left_out`` maps
    sections to the bytes of entries that are missing altogether, the others are
    lists of objects. An object some text of which is cut has ``left_out``, too:
    bytes by key. ``ValueError`` if ``limit`` is less than ``LIMIT_MIN``.
    """
    if limit < LIMIT_MIN:
        raise ValueError(f"{limit} bytes are too few for a context; use at least {LIMIT_MIN}")
    sections = _sections(snapshot, handoff)
    hollow = [replace(section, entries=(), left_out=10**18) for section in sections]
    room = limit - max(_size(_markdown(snapshot, hollow)), _size(_json(snapshot, hollow)))
    fitted = _fit(sections, room)
    return Inherited(_markdown(snapshot, fitted), _json(snapshot, fitted))


# What an agent is at now


#: bytes of each part of ``now.md``, titles and notes included
NOW_WORKSPACE: Final = 4 << 10
NOW_FOCUS: Final = 20 << 10
NOW_WAITS: Final = 8 << 10
NOW_THINGS: Final = 16 << 10
NOW_REPORTS: Final = 16 << 10
#: for the title of a part, and what it says that it left out
_NOW_ROOM: Final = 200

_NOW_INTRODUCTION: Final = """\
# Now

Made from the records of this agent when it is read. What follows a key, and lines that begin with
a TAB, are texts as they were written there: they make no section of this file.

"""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of ``now.md``, which has so much ``room``; ``more`` of its sort are not among its
    entries. ``order`` has the place of each where they are not shown as they are."""

    section: Section
    room: int
    more: int = 0
    order: Sequence[int] = ()


def now(agent: str, session: str, parts: Iterable[Part]) -> str:
    """``now.md``: the parts in the order from the lasting to the volatile, each in a room of its
    own, so that what comes before a change stays as it is."""
    text = _NOW_INTRODUCTION + _field_markdown("agent", agent) + _field_markdown("session", session)
    used = _size(text)
    for part in parts:
        section, room = part.section, part.room - _NOW_ROOM - used
        (fitted,) = _fit([section], room, lambda entry: _size(_entry_markdown(entry)))
        left = part.more + len(section.entries) - len(fitted.entries)
        shown = [_entry_markdown(entry) for entry in fitted.entries]
        if part.order:
            shown = [entry for _, entry in sorted(zip(part.order, shown, strict=False))]
        if left:
            shown.append(f"\n[{left} {'older' if section.newest_first else 'more'} left out]\n")
        if section.newest_first:
            shown.reverse()
        text += "".join([f"\n## {section.title}\n", *shown] if shown else [])
        used = 0
    return text


# What belongs to it


def named_in(text: str) -> frozenset[str]:
    """The whole words of ``text`` that could be names; one may end a sentence."""
    words = _WORD.findall(text)
    return frozenset(words) | {word.rstrip(".") for word in words}


def related(focus: WorkItem, items: Iterable[WorkItem], handoff: str) -> list[tuple[str, WorkItem]]:
    """(why, item) for each item related to the current one, by reason, the strongest first,
    and then by id."""
    named, blockers = named_in(handoff), frozenset(focus.blocked_by)
    found: dict[str, list[WorkItem]] = {"blocks": [], "named": [], "same_parent": []}
    for item in sorted(items, key=lambda item: item.id):
        if item.id == focus.id:
            continue
        if item.id in blockers:
            found["blocks"].append(item)
        elif item.id in named:
            found["named"].append(item)
        elif item.parent == focus.parent != "":
            found["same_parent"].append(item)
    return [(why, item) for why, group in found.items() for item in group]


def _sections(snapshot: Snapshot, handoff: str) -> list[Section]:
    over = snapshot.over
    focus = next((open_of(i, over) for i in snapshot.items if i.id == snapshot.focus), None)
    others = related(focus, snapshot.items, handoff) if focus else []
    others, more = others[:RELATED_MAX], others[RELATED_MAX:]
    ids = [item.id for item in (focus, *(item for _, item in others)) if item]
    waits = [w for w in snapshot.waits if focus and (w.work, w.status) == (focus.id, "armed")]
    # a child that is for no item in particular may well be for this one
    wanted = {"", *ids}
    children = [c for c in snapshot.children if focus and c.work in wanted]
    return [
        Section(
            "work",
            "Current work item",
            tuple(item_entry(item) for item in (focus,) if item),
            single=True,
        ),
        Section(
            "waits",
            "Waits of the current work item",
            tuple(_wait(wait) for wait in sorted(waits, key=lambda wait: wait.id)),
        ),
        Section(
            "related",
            "Related work items",
            tuple(item_entry(open_of(item, over), ("relation", why)) for why, item in others),
            left_out=sum(
                _text("", text).size
                for _, item in more
                for text in (item.objective, item.acceptance, item.plan)
            ),
        ),
        Section(
            "memory",
            "Memory",
            tuple(entry(text=memory) for memory in (_take(snapshot.memory),) if memory),
            single=True,
        ),
        Section(
            "episodes",
            "Episodes of these work items",
            tuple(
                entry(("work", id), text=text)
                for id in ids
                if (text := _take(snapshot.episodes.get(id, "")))
            ),
        ),
        Section(
            "results",
            "Results of children",
            tuple(
                entry(("child", child.name), ("status", child.status), result=result)
                for child in sorted(children, key=lambda child: child.name)
                if (result := _take(child.result))
            ),
        ),
        Section(
            "tail",
            "Last messages of the run",
            tuple(
                entry(
                    ("run", snapshot.run),
                    ("role", message.role),
                    ("from", message.sender),
                    content=message.content,
                )
                for message in reversed(snapshot.tail[-TAIL_MESSAGES:])
            ),
            newest_first=True,
        ),
    ]


def open_of(item: WorkItem, over: frozenset[str]) -> WorkItem:
    """A work item with the others that are in its way still."""
    if over.isdisjoint(item.blocked_by):  # of hundreds of items with a thousand each
        return item
    return replace(item, blocked_by=tuple(each for each in item.blocked_by if each not in over))


def item_entry(item: WorkItem, *labels: tuple[str, str]) -> Entry:
    # the plan last: it is the longest, and changes most
    return entry(
        ("id", item.id),
        *labels,
        ("status", item.status),
        ("parent", item.parent),
        objective=item.objective,
        acceptance=item.acceptance,
        blocked_by="\n".join(sorted(item.blocked_by)),
        plan=item.plan,
    )


def _wait(wait: Wait) -> Entry:
    return entry(
        ("id", wait.id), ("on", wait.on), ("deadline", wait.deadline), payload=wait.payload
    )


def entry(*labels: tuple[str, str], **texts: Text) -> Entry:
    return Entry(
        tuple(_text(key, text) for key, text in labels),
        tuple(_text(key, text) for key, text in texts.items()),
    )


def _take(text: Text) -> Taken:
    return text() if callable(text) else text


def _text(key: str, text: Text) -> _Text:
    text = _take(text)
    if isinstance(text, Beginning):
        return _Text(key, text.text, text.size)
    return _Text(key, text, _size(text))


# How much of it has room


@dataclass(frozen=True, slots=True)
class _Text:
    """The part that is left of a text that had ``size`` bytes."""

    key: str
    text: str
    size: int

    @property
    def left_out(self) -> int:
        return self.size - _size(self.text)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing: ``labels`` are whole or it is not there, ``texts`` may be cut."""

    labels: tuple[_Text, ...]
    texts: tuple[_Text, ...]

    @property
    def fields(self) -> tuple[_Text, ...]:
        return self.labels + self.texts

    @property
    def size(self) -> int:
        return sum(field.size for field in self.fields)

    @property
    def characters(self) -> int:
        """How many there are that may be cut."""
        return sum(len(field.text) for field in self.texts)

    def cut(self, characters: int) -> Entry:
        """With no more than the first so many characters of its texts."""
        texts = []
        for field in self.texts:
            texts.append(replace(field, text=field.text[:characters]))
            characters -= len(texts[-1].text)
        return Entry(self.labels, tuple(texts))

    def cost(self) -> int:
        """The bytes that it takes in the rendering that needs more, a comma included."""
        return max(_size(_entry_markdown(self)), _size(names.dump_json(_entry_json(self))) + 1)


@dataclass(frozen=True, slots=True)
class Section:
    """Entries, the most important first; ``left_out`` are the bytes of those that had no room.

    ``single``: never more than one entry, in JSON without a list. ``newest_first``:
    the other way round from how they are shown.
    """

    key: str
    title: str
    entries: tuple[Entry, ...]
    single: bool = False
    newest_first: bool = False
    left_out: int = 0


def _fit(
    sections: list[Section], room: int, cost_of: Callable[[Entry], int] = Entry.cost
) -> list[Section]:
    """The first entries that have room, one that is cut, and none after that."""
    fitted = []
    for section in sections:
        kept: list[Entry] = []
        for entry in section.entries:
            largest = _largest(entry, room, cost_of) if room > 0 else None
            if largest is not None:
                kept.append(largest[0])
                room -= largest[1]
            if largest is None or largest[0] is not entry:
                room = 0
        left_out = section.left_out + sum(entry.size for entry in section.entries[len(kept) :])
        fitted.append(replace(section, entries=tuple(kept), left_out=left_out))
    return fitted


def _largest(
    entry: Entry, room: int, cost_of: Callable[[Entry], int]
) -> tuple[Entry, int] | None:
    """The entry, cut if it must be, and what it costs; None if its labels alone have no room."""
    # a character takes a byte at least, so only this much needs to be looked at
    fits, too_many = -1, min(entry.characters, max(room, 0)) + 1
    if entry.characters < too_many and (cost := cost_of(entry)) <= room:
        return entry, cost
    cut: tuple[Entry, int] | None = None
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        part = entry.cut(middle)
        if (cost := cost_of(part)) <= room:
            fits, cut = middle, (part, cost)
        else:
            too_many = middle
    return cut


# The two renderings


def _size(text: str) -> int:
    return len(text.encode())


def _note(left_out: int) -> str:
    return f"[{left_out} bytes left out]\n"


def _field_markdown(key: str, text: str) -> str:
    if not text:
        return f"{key}:\n"
    # splitlines() knows every character that some reader takes for the end of a line
    lines = (text if text.endswith("\n") else text + "\n").splitlines(keepends=True)
    if lines == [text + "\n"] and text.splitlines() == [text]:
        return f"{key}: {text}\n"
    return f"{key}:\n\t" + "\t".join(lines)


def _entry_markdown(entry: Entry) -> str:
    parts = []
    for field in entry.fields:
        if field.size:
            parts.append(_field_markdown(field.key, field.text))
        if field.left_out:
            parts.append(_note(field.left_out))
    return "\n" + "".join(parts)


def _markdown(snapshot: Snapshot, sections: list[Section]) -> str:
    parts = [
        _INTRODUCTION,
        _field_markdown("agent", snapshot.agent),
        _field_markdown("session", snapshot.session),
    ]
    for section in sections:
        shown = [_entry_markdown(entry) for entry in section.entries]
        if section.left_out:
            shown.append("\n" + _note(section.left_out))
        if section.newest_first:
            shown.reverse()
        if shown:
            parts += [f"\n## {section.title}\n", *shown]
    return "".join(parts)


def _entry_json(entry: Entry) -> dict[str, Any]:
    shown: dict[str, Any] = {field.key: field.text for field in entry.fields}
    left_out = {field.key: field.left_out for field in entry.texts if field.left_out}
    return shown | ({"left_out": left_out} if left_out else {})


def _json(snapshot: Snapshot, sections: list[Section]) -> str:
    shown: dict[str, Any] = {"agent": snapshot.agent, "session": snapshot.session}
    for section in sections:
        entries = [_entry_json(entry) for entry in section.entries]
        if section.newest_first:
            entries.reverse()
        shown[section.key] = next(iter(entries), None) if section.single else entries
    shown["left_out"] = {section.key: section.left_out for section in sections if section.left_out}
    return names.dump_json(shown) + "\n"
