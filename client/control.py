"""Writing verbs to agents and tasks, and handling Ctrl-C while waiting for them."""

from __future__ import annotations

import _signal  # signal itself takes a millisecond to import
import errno

from client.exits import FAILED, OK, USAGE, Failure, Misuse
from client.files import value_of
from client.output import complain
from client.root import Root, label
from client.types import Callable, Item, Sequence


class Terminated(BaseException):
    """A signal has come that ends this program in order."""


def terminate(*_: object) -> None:
    """Handle such a signal."""
    raise Terminated


def catch_interrupts(action: Callable[[int], None]) -> Callable[[], object]:
    """Call `action` with the running count at every Ctrl-C; return a function that undoes this.

    Python runs the handler between two instructions and restarts the interrupted system call.
    Unlike KeyboardInterrupt, this loses no data that is being copied.
    """
    # what `control` needs, before a signal can cut its import off
    import client.sockets  # noqa: F401

    count = 0

    def handle(*_: object) -> None:
        nonlocal count
        count += 1
        action(count)

    previous = _signal.signal(_signal.SIGINT, handle)
    return lambda: _signal.signal(_signal.SIGINT, previous)


def interrupt(root: Root, owner: str, count: int) -> None:
    """Handle Ctrl-C: the first stops the agent or task, the second kills, the third leaves it."""
    if count > 2:
        raise KeyboardInterrupt
    verb, more = ("stop", " (Ctrl-C again kills it)") if count == 1 else ("kill", "")
    complain(f"{label(owner)}: {verb}{more}")
    end(root, owner, verb)


def end(root: Root, owner: str, verb: str) -> None:
    """Stop or kill an agent or a task; it may already have ended, or be ending."""
    try:
        control(root, owner, verb)
    except Failure as failure:
        if failure.number != errno.EBUSY:
            complain(str(failure))


def control(root: Root, owner: str, line: str) -> None:
    """Say a verb to an agent or a task, at a socket or by its `ctl` file."""
    from client.sockets import say

    if "\n" in line:
        raise Misuse(f'"{line}" has more than one line; a verb is one line')
    if not say(root, owner, line):
        root.write(f"{owner}/ctl", value_of(line))


def all_worked(names: Sequence[str], action: Callable[[str], object]) -> int:
    """Do as `for_each`, and return the exit status."""
    return OK if len(for_each(names, action)) == len(names) else FAILED


def for_each(items: Sequence[Item], action: Callable[[Item], object]) -> list[Item]:
    """Apply an action to each item, report failures, and return the items without failure."""
    worked = []
    for item in items:
        try:
            action(item)
            worked.append(item)
        except Failure as failure:
            if failure.status == USAGE or failure.number == errno.ENOTCONN:
                raise  # of the others the same would be said
            complain(str(failure))
    return worked
