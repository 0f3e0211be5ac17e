"""The verbs of agents and tasks, and waiting for their ends."""

from __future__ import annotations

from client.control import control, for_each
from client.declaring import (
    LISTING,
    NAME,
    NAMES,
    TIMEOUT,
    WAIT,
    Arguments,
    command,
    declare,
    operand,
    option,
)
from client.exits import FAILED, OK, TIMED_OUT
from client.jsontext import dumps
from client.output import STDOUT, complain
from client.planes import path_of
from client.root import Root, agent, label
from client.words import VERBS


def do_verb(root: Root, args: Arguments) -> int:
    """Write the verb of the command's name to each agent or task; with --wait, wait."""
    owners = [path_of(root, args, name) for name in args.names]
    worked = for_each(owners, lambda owner: control(root, owner, args.command))
    if getattr(args, "wait", False):
        from client.following import wait_ended

        worked = list(wait_ended(root, worked))
    return OK if len(worked) == len(owners) else FAILED


def do_order(root: Root, args: Arguments) -> None:
    """Write the verb of the command's name and its argument to an agent."""
    control(root, agent(args.name), " ".join(filter(None, (args.command, args.word))))


@command("wait", *LISTING, TIMEOUT, NAMES)
def do_wait(root: Root, args: Arguments) -> int:
    """Wait until agents are dead.

    Prints NAME, outcome and reason of each. Exits 0 if all are done, 1 if not, 124 on timeout.
    """
    from client.events import ending, session_of, task_ending
    from client.following import wait_ended

    outcomes = []
    owners = [path_of(root, args, name) for name in args.names]
    sessions = {owner: session_of(root, owner) for owner in owners}
    try:
        for owner in wait_ended(root, sessions, args.timeout):
            if args.group:
                outcome, reason = task_ending(root, owner)
            else:
                outcome, reason = ending(root, owner, sessions[owner])
            outcomes.append(outcome)
            if args.json:
                keys = ("status", "exit") if args.group else ("outcome", "reason")
                ended = {"name": label(owner), **dict(zip(keys, (outcome, reason), strict=True))}
                STDOUT.text(dumps(ended) + "\n")
            else:
                end = (outcome or "-", outcome)
                STDOUT.lines([[f"{label(owner)} ", end, f" {reason or '-'}"]])
    except TimeoutError as error:
        complain(f"did not end in time: {error}")
        return TIMED_OUT
    return OK if all(outcome in ("done", "completed") for outcome in outcomes) else FAILED


for verb, what in VERBS.items():
    more = [WAIT] if verb in ("stop", "kill") else []
    declare(do_verb, verb, f"{what[0].upper()}{what[1:]}.", NAMES, *more)
declare(
    do_order,
    "abort",
    "Kill only the current run of an agent.\n\nThe agent is then paused; resume continues with its"
    " next message.",
    option("--run", "RUN", "only if this is the current run", dest="word"),
    NAME,
)
declare(
    do_order,
    "session",
    "Switch an agent to another session.",
    NAME,
    operand("word", "SESSION", "a session of the agent, or a new name"),
)
