"""Writing verbs, to one or to many, and what Ctrl-C does while one is waited for."""

from __future__ import annotations

import errno

from client.exits import USAGE, Failure
from client.files import value_of
from client.output import complain
from client.root import Root, label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def catch_interrupts(action: Callable[[int], None]) -> Callable[[], object]:
    """Call `action` with the count of every Ctrl-C; returns what undoes this.

    Python runs the handler between two instructions and goes on with the system call that was
    interrupted, so nothing that is being copied is lost, unlike with KeyboardInterrupt.
    """
    import signal

    count = 0

    def handle(*_: object) -> None:
        nonlocal count
        count += 1
        action(count)

    previous = signal.signal(signal.SIGINT, handle)
    return lambda: signal.signal(signal.SIGINT, previous)


def interrupt(root: Root, owner: str, count: int) -> None:
    """Act on the first, second or third Ctrl-C: stop the agent or task, kill it, leave it alone."""
    if count > 2:
        raise KeyboardInterrupt
    verb, more = ("stop", " (Ctrl-C again kills it)") if count == 1 else ("kill", "")
    complain(f"{label(owner)}: {verb}{more}")
    end(root, owner, verb)


def end(root: Root, owner: str, verb: str) -> None:
    """Stop or kill an agent or a task, which may have ended, or be ending, already."""
    try:
        control(root, owner, verb)
    except Failure as failure:
        if failure.number != errno.EBUSY:
            complain(str(failure))


def control(root: Root, owner: str, line: str) -> None:
    """Write a verb to the `ctl` file of an agent or a task."""
    if "\n" in line:
        raise Failure(f'"{line}" is more than one line', USAGE)
    root.write(f"{owner}/ctl", value_of(line))


def for_each(names: Sequence[str], action: Callable[[str], object]) -> list[str]:
    """Apply an action to each name, complaining about failures, and return those it worked for."""
    worked = []
    for name in names:
        try:
            action(name)
            worked.append(name)
        except Failure as failure:
            if failure.status == USAGE:
                raise
            complain(str(failure))
    return worked
