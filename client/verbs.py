"""The verbs of agents and tasks, and waiting for their ends."""

from __future__ import annotations

from client.arguments import LISTING, NAME, NAMES, TIMEOUT, WAIT, Command, arg
from client.control import control, for_each
from client.ends import ending, session_of, task_ending
from client.exits import FAILED, OK, TIMED_OUT
from client.following import wait_ended
from client.output import STDOUT, complain
from client.planes import path_of
from client.root import Root, agent, label

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.arguments import Arguments


def do_verb(root: Root, args: Arguments) -> int:
    """Write the verb of the command's name to each agent or task; with --wait, wait."""
    owners = [path_of(root, args, name) for name in args.names]
    worked = for_each(owners, lambda owner: control(root, owner, args.command))
    if getattr(args, "wait", False):
        worked = list(wait_ended(root, worked))
    return OK if len(worked) == len(owners) else FAILED


def do_order(root: Root, args: Arguments) -> int:
    """Write the verb of the command's name and its argument to an agent."""
    control(root, agent(args.name), " ".join(filter(None, (args.command, args.word))))
    return OK


def do_wait(root: Root, args: Arguments) -> int:
    """Wait until all agents or tasks have ended, and print their ends."""
    import json

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
                STDOUT.text(json.dumps(ended) + "\n")
            else:
                end = (outcome or "-", outcome)
                STDOUT.lines([[f"{label(owner)} ", end, f" {reason or '-'}"]])
    except TimeoutError as error:
        complain(f"did not end in time: {error}")
        return TIMED_OUT
    return OK if all(outcome in ("done", "completed") for outcome in outcomes) else FAILED


COMMANDS = (
    Command("start", "start agents", (NAMES,), do_verb),
    Command("stop", "stop agents; kill them after their grace period", (NAMES, WAIT), do_verb),
    Command("kill", "stop agents at once", (NAMES, WAIT), do_verb),
    Command("pause", "freeze agents and all that they own", (NAMES,), do_verb),
    Command("resume", "let paused agents continue", (NAMES,), do_verb),
    Command(
        "abort",
        "kill only the current run of an agent",
        (
            arg("--run", dest="word", metavar="RUN", help="only if this is the current run"),
            NAME,
        ),
        do_order,
        "The agent is then paused; resume continues with its next message.",
    ),
    Command("reset", "replace dead agents with new ones", (NAMES,), do_verb),
    Command(
        "session",
        "switch an agent to another session",
        (NAME, arg("word", metavar="SESSION", help="a session of the agent, or a new name")),
        do_order,
    ),
    Command(
        "wait",
        "wait until agents are dead",
        (*LISTING, TIMEOUT, NAMES),
        do_wait,
        "Prints NAME, outcome and reason of each. Exits 0 if all are done, 1 if not, 124 on"
        " timeout.",
    ),
)
