"""The command prune: removes what ended long ago."""

from __future__ import annotations

from client.declaring import JSON, Arguments, command, flag, option
from client.exits import NOT_RUNNING, Failure, Misuse
from client.output import STDOUT, Part, some
from client.root import Root
from client.sockets import NO_ANSWER, ask, connect_own, frames, refusal
from client.types import Any, Iterator


@command(
    "prune",
    option("--older", "DURATION", "what ended longer ago than this, such as 30d"),
    flag("--dry-run", "only show what would be removed"),
    JSON,
)
def do_prune(root: Root, args: Arguments) -> None:
    """Remove what ended long ago.

    Removes dead agents, ended tasks and work items, and histories of removed agents, with results
    and durable homes. Shows each, and what is left and why: nothing that lives, that is declared,
    or that has commits which nobody took over. In an agent, what the agent owns.
    """
    import json

    if not args.older:
        raise Misuse("say what is old: ctx prune --older 30d")
    for batch in some(pruned(root, args.older, args.dry_run)):
        if args.json:
            STDOUT.text("".join(json.dumps(frame) + "\n" for frame in batch))
            continue
        word = "would remove" if args.dry_run else "removed"
        STDOUT.lines(described(frame, word) for frame in batch)


def pruned(root: Root, older: str, dry: bool) -> Iterator[dict[str, Any]]:
    """Yield what is removed, or left, as it is told."""
    with connect_own(root) as connection:
        ask(connection, op="prune", older=older, dry_run=dry)
        for frame in frames(connection):
            if frame.get("type") == "error":
                raise refusal(frame, {})
            if frame.get("type") == "prune":
                return
            yield frame
    raise Failure(NO_ANSWER, NOT_RUNNING)


def described(frame: dict[str, Any], word: str) -> list[Part]:
    """Return what became of one thing, as a line."""
    when = (str(frame.get("ended")), "faint")
    left = frame.get("left")
    line: list[Part] = [when, f" {'left' if left else word} ", (str(frame.get("path")), "name")]
    return [*line, f": {left}"] if left else line
