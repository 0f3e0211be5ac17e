"""Questions of an agent to people, put to the editor that talks with it: one answer counts."""

from __future__ import annotations

from client.asks import Ask, answer_text, open_asks
from client.exits import Failure
from client.files import value_of
from client.jsonrpc import Peer, object_in, text_in
from client.jsontext import dumps
from client.root import Root, agent
from client.types import Any

#: kinds of options in a permission request, by how their words begin
REFUSING = ("deny", "reject", "no", "refuse")


class Inbox:
    """The open asks of the agent of a session."""

    def __init__(
        self, editor: Peer, root: Root, name: str, session: str, *, elicits: bool
    ) -> None:
        self.editor = editor
        self.root = root
        self.name = name
        self.session = session
        #: whether the editor shows forms
        self.elicits = elicits
        #: the ids of requests to the editor, by the ask and the time of its asking; 0 once it has
        #: answered
        self.asked: dict[tuple[str, str], int] = {}

    def look(self) -> None:
        """Put what is new to the editor, and take back what is over."""
        try:
            rows = [row for row in open_asks(self.root)
                    if row["agent"] == self.name and row["to"] == "operator"]
        except Failure:  # the next event tells that there is something to look at
            return
        found = {(row["ask"], row["asked_at"]): row for row in rows}
        for key in [key for key in self.asked if key not in found]:
            if ident := self.asked.pop(key):  # it may say something all the same, too late
                self.editor.notify("$/cancel_request", {"requestId": ident})
        for key, row in found.items():
            if key not in self.asked:
                self.put(key, row)

    def put(self, key: tuple[str, str], row: Ask) -> None:
        """Ask the editor, if it can show the question."""
        about: dict[str, Any] = {"sessionId": self.session}
        if row["options"]:
            method = "session/request_permission"
            about |= {"toolCall": tool_call(row), "options": options_of(row)}
        elif self.elicits:
            method = "elicitation/create"
            about |= {"mode": "form", "message": row["question"], "requestedSchema": form_of(row)}
        else:
            return

        def then(result: dict[str, Any], error: dict[str, Any] | None) -> None:
            words = words_in(row, result)
            if key not in self.asked:
                return  # somebody was faster
            self.asked[key] = 0
            if not words:
                return  # it stays in the inbox of others
            try:
                text = answer_text(row["form"], words)
                self.root.write(f"{agent(self.name)}/ask/{row['ask']}/answer", value_of(text))
            except Failure:  # as before
                return

        self.asked[key] = self.editor.request(method, about, then)


def tool_call(row: Ask) -> dict[str, Any]:
    """Return what a permission request shows."""
    text = {"type": "text", "text": row["detail"]}
    content = [{"type": "content", "content": text}] if row["detail"] else []
    ident = f"ask.{row['ask']}.{row['asked_at']}"
    return {"toolCallId": ident, "title": row["question"], "kind": "other", "status": "pending",
            "content": content}  # fmt: skip


def options_of(row: Ask) -> list[dict[str, Any]]:
    """Return the options of a permission request."""
    options = []
    for line in row["options"]:
        word, _, label = line.partition(" ")
        refuses = word.lower().startswith(REFUSING)
        kind = "reject_once" if refuses else "allow_once"
        options.append({"optionId": word, "name": label or word, "kind": kind})
    return options


def form_of(row: Ask) -> dict[str, Any]:
    """Return a form: that of the ask, or one for a text."""
    answer = {"type": "object", "properties": {"answer": {"type": "string"}},
              "required": ["answer"]}  # fmt: skip
    return row["form"] or answer


def words_in(row: Ask, result: dict[str, Any]) -> list[str]:
    """Return the answer in what the editor says, as words of a command line; none if it has
    none."""
    if row["options"]:
        chosen = object_in(result, "outcome")
        return [text_in(chosen, "optionId")] if chosen.get("outcome") == "selected" else []
    if result.get("action") != "accept":
        return []
    content = object_in(result, "content")
    return [dumps(content)] if row["form"] else [text_in(content, "answer")]
