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
    flag,
    one_of,
    operand,
    option,
)
from client.exits import FAILED, OK, TIMED_OUT, Failure, Misuse
from client.jsontext import dumps
from client.output import STDOUT, complain
from client.planes import path_of
from client.root import Root, agent, label
from client.types import Any
from client.words import STATUSES, VERBS

ASKING = "asking"  # an agent that asks somebody, whatever its status is
WAITED_FOR = (*STATUSES, ASKING)


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


@command(
    "wait",
    flag("--any", "wait for the first of the agents, or of all without a name"),
    option("--status", "S[,S]", "with --any: one of these (default: dead)", words=WAITED_FOR),
    *LISTING,
    TIMEOUT,
    operand("names", "[NAME...]", "the agents"),
)
def do_wait_agents(root: Root, args: Arguments) -> int:
    """Wait until agents are dead.

    Prints NAME, outcome and reason of each. Exits 0 if all are done, 1 if not, 124 on timeout.
    With --any, prints NAME and status of the first that has one of the statuses, and exits 0.
    """
    if args.any:
        return wait_any(root, args)
    if args.status:
        raise Misuse("--status says what --any waits for: add --any")
    if not args.names:
        raise Misuse("name the agents, or wait for any: ctx wait --any")
    return do_wait(root, args)


def do_wait(root: Root, args: Arguments) -> int:
    """Wait until agents or tasks have ended, and tell how."""
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


def wait_any(root: Root, args: Arguments) -> int:
    """Wait until one agent has one of some statuses, and print the first that there is."""
    from client.following import versions
    from client.loop import parse_object

    wanted = (args.status or "dead").split(",")
    for word in wanted:
        if word not in WAITED_FOR:
            raise Misuse(f'"{word}" is not a status: {", ".join(WAITED_FOR)}')
    names = dict.fromkeys(args.names)
    for name in names:
        if missing := root.missing(agent(name)):
            raise Failure(missing)
    for data in versions(root, "agents", args.timeout):
        rows = [row for row in map(parse_object, data.split(b"\n")) if row]
        gone = names.keys() - {row["name"] for row in rows}
        rows += [{"name": name, "status": "dead"} for name in gone]  # and removed
        for row in rows:
            status = next((word for word in wanted if word in states(row)), "")
            if not status or (names and row["name"] not in names):
                continue
            if args.json:
                STDOUT.text(dumps(row) + "\n")
            else:
                STDOUT.lines([[f"{row['name']} ", (status, status)]])
            return OK
    complain(f"no agent was {one_of(wanted) if len(wanted) > 1 else wanted[0]} in time")
    return TIMED_OUT


def states(row: dict[str, Any]) -> set[str]:
    """Return the words for what an agent is, by its line of `agents`."""
    return {str(row.get("status")), *([ASKING] if row.get("asks") else [])}


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
