"""Operations of the sockets: rows with a guard, a handler and a line of the manual.

A handler gets one ``Request``; the server has checked the guard, and sends what the handler
raises to the peer.

The way of a message that is sent, until its reply: ``server`` reads the frame and identifies the
sender; ``send`` here has the guard; one change queues the message and fires waits for messages
(``runtime.agents.messages``); the journal commits it and tells who watches; the agent's next run
begins with it, or its resident program receives it (``runtime.life.runs``, ``residents``); output
is streamed to who is connected (``streams``); one change records the reply, the history and the
end of the message (``conclusions``); and the sender gets the last frame from here.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any, Final

import trio

from runtime.agents.answers import check_call_id
from runtime.agents.messages import SENDING, check_id
from runtime.agents.pruning import Old
from runtime.authority.facts import Facts
from runtime.authority.guard import AnyGuard, Guard, unless
from runtime.caller import CONTROLLERS, HISTORIANS, INSIDERS, OPERATORS, PARTIES, Caller, Role
from runtime.errors import (
    DeniedError,
    MalformedError,
    MissingError,
    NotRunningError,
    WrongStateError,
)
from runtime.ids import CallId, Incarnation, MessageId
from runtime.kernel import linux
from runtime.life.streams import Stream
from runtime.life.windows import Wanted
from runtime.records.items import REPORTED, Message, MessageStatus
from runtime.records.lifecycle import Status
from runtime.records.model import Agent
from runtime.sockets.replay import check_event_id, check_following
from runtime.sockets.request import Request
from runtime.texts import policy
from runtime.texts.names import check_agent, check_name, parse_duration, quote

#: characters of a reply in one frame
_DELTA_MAX: Final = 16 << 10
#: sentences on declared agents in an answer; the log has all
_COMPLAINTS_MAX: Final = 100
#: what relays say before the number of an incarnation; PREFIX of relay.c
_RELAYED: Final = ipaddress.IPv6Network("fd63:7478:6673::/64")
#: reads all agents that there ever were, so one at a time
_RECALLING: Final = trio.CapacityLimiter(1)

Handler = Callable[[Request], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One row of the protocol. An operation that ``stays`` answers later, others at once; after
    the ``last`` one its connection has something else. The ``id`` of a request ``of_message``
    names a message, or a call that is pending, which its sender may ask about."""

    name: str
    guard: Guard[Request]
    handler: Handler
    doc: str
    stays: bool = False
    last: bool = False
    of_message: bool = False


# at both sockets


async def _ping(request: Request) -> None:
    await request.answer({"type": "pong"})


async def _tool(request: Request) -> None:
    name = request.text("name", "the name of a tool")
    call_id, services = _call_id(request), request.services
    output: dict[str, Any] | None = None
    with services.calls.pending(request.caller, call_id) as scope:
        output = await services.call_tool(
            request.caller, name, request.fields.get("input", {}), call_id, request.progress
        )
    if output is None or scope.cancel_called:
        return  # nobody waits for the answer
    frame = {"type": "tool", "output": output}
    if call_id is not None:
        frame["id"] = call_id
    await request.finish(frame)


async def _ctl(request: Request) -> None:
    """By default of the agent whose socket it is."""
    agent, task, line = (request.fields.get(name, "") for name in ("agent", "task", "line"))
    if not isinstance(agent, str) or not isinstance(task, str):
        raise MalformedError("agent, task: write names")
    if agent:
        check_agent(agent)
    if task:
        check_name(task)
    if not isinstance(line, str) or not line.strip():
        raise MalformedError("line: write a verb, as in ctl")
    if "said" not in request.progress:
        request.progress["said"] = True
        own = request.server.agent
        agent = agent or (own.name if own is not None else "")
        await request.services.say(request.caller, agent, task, line)
    await request.finish({"type": "ctl"})


def _call_id(request: Request) -> CallId | None:
    """The id of a call, if it has one; ``MalformedError``."""
    if request.fields.get("id") is None:
        return None
    return check_call_id(request.text("id", "a string that names this call"))


async def _why(request: Request) -> None:
    agent = request.agent
    perm, target = str(request.fields.get("verb")), str(request.fields.get("object"))
    cls, name = policy.parse_question(perm, target)
    allowed, lines = request.agents.authority.explain(agent, cls, name, perm)
    await request.answer({"type": "why", "agent": agent.name, "allowed": allowed, "lines": lines})


async def _audit(request: Request) -> None:
    refusals = request.services.refusals(request.caller, request.about)
    await request.answer({"type": "audit", "refusals": refusals})


async def _quota(request: Request) -> None:
    accounts, caller = request.agents.accounts, request.caller
    if request.server.agent is not None:
        owners = [request.server.agent.owner]
    else:
        master = request.agents.identity.is_master(caller)
        owners = accounts.owners() if master else [caller.uid]
    rows = [asdict(row) for owner in owners for row in accounts.standings(owner)]
    await request.answer({"type": "quota", "accounts": rows})


async def _window(request: Request) -> None:
    """A daemon that is executed again before it has answered opens another one."""
    remove, agent = request.flag("remove"), request.named
    if agent is None:
        raise MissingError("the agent was removed")
    request.progress["opened"] = True
    with request.services.windows.make(agent, request.connection.who, remove=remove) as window:
        frame = {"type": "window", "agent": agent.name}
        await request.connection.hand(frame, window.fileno(), request)


async def _terminal(request: Request) -> None:
    """A daemon that is executed again before it has answered sends what this one has opened."""
    agent, progress, windows = request.named, request.progress, request.services.windows
    if agent is None:
        raise MissingError("the agent was removed")
    name = request.fields.get("task")
    task = request.agents.tasks.find(agent, request.text("task", "a name")) if name else None
    if "viewer" not in progress:
        wanted = Wanted(
            looks=request.flag("look"),
            starts=request.flag("start"),
            hangs_up=request.flag("hangup"),
            removes=request.flag("remove"),
            screen=request.screen,
        )
        who = request.connection.who
        await windows.view(request.caller, who, agent, task, wanted, progress)
    number = progress["viewer"]
    where = {"run": agent.run.id} if task is None else {"task": task.name}
    with windows.sending(agent, task, number) as end:
        frame = {"type": "terminal", "agent": agent.name, **where, "viewer": number}
        await request.connection.hand(frame, end.fileno(), request)


async def _prune(request: Request) -> None:
    """Goes on in a daemon that is executed again, which tells of what is left then."""
    before = time.time() - parse_duration(request.text("older", "a duration such as 30d"))
    dry, progress = request.flag("dry_run"), request.progress

    async def tell(old: Old) -> None:
        what = "left" if old.why else "removed"
        progress[what] = progress.get(what, 0) + 1
        await request.answer({"type": what, **old.facts()})

    pruning = request.agents.pruning
    await pruning.prune(request.caller, tell, ended=before, sessions=before, dry=dry)
    counts = {what: progress.get(what, 0) for what in ("removed", "left")}
    await request.finish({"type": "prune", **counts})


# at an agent's


async def _wait(request: Request) -> None:
    await request.server.ended.wait()
    agent = request.agent
    await request.finish(
        {
            "type": "wait",
            "agent": agent.name,
            "status": str(agent.status),
            "outcome": agent.outcome,
            "reason": agent.reason,
        }
    )


async def _resume(request: Request) -> None:
    after = check_event_id(request.progress.get("after", request.fields.get("after")))
    session = request.agents.sessions.get(request.agent.session)
    if session is None:
        raise MissingError("the session was removed")
    replays = request.services.replays
    ended, progress = request.server.ended, request.progress
    await replays.send(request.connection, session, after, ended, progress)


async def _send(request: Request) -> None:
    """Queues a message and sends its reply as it grows; a known id is told again."""
    messages, agent, caller = request.agents.messages, request.agent, request.caller
    name = request.text("id", "a string that names this message")
    text = request.text("input", "a string, the text of the message")
    message = messages.meant(caller, agent, check_id(name))
    if message is None and "sent" in request.progress:
        raise MissingError(f"the message {quote(name)} was removed")
    if message is None or message.asked != caller.key:
        priority = request.fields.get("priority", "normal")
        message = messages.send(
            caller, agent, text, priority=str(priority), name=name, asked=caller.key
        )
    request.progress["sent"] = True
    await _tell_reply(request, message)


def _is_only_reported(request: Request, message: Message, more: Role) -> bool:
    """Whether it is a report, and the caller has none of the roles that may do more."""
    roles = request.agents.identity.roles(request.caller, request.agent)
    return message.provenance == REPORTED and not roles & more


async def _tell_reply(request: Request, message: Message) -> None:
    """``start``, ``delta``…, ``message``, ``done``; of a report ``start`` and ``done``: what its
    supervisor says then is not for the child."""
    name = message.name
    silent = _is_only_reported(request, message, CONTROLLERS | Role.WRITER)
    stream = request.services.streams.of(message.index) if not message.over else Stream()
    progress = request.progress
    told, shown = progress.get("told", False), progress.get("shown", 0)
    while True:
        over, count = message.over, stream.changed.count
        if message.run and not told:
            told = progress["told"] = True
            await request.answer({"type": "start", "id": name, "run": message.run})
        elif told and not silent and shown < len(stream.text):
            text = stream.text[shown : shown + _DELTA_MAX]
            shown = progress["shown"] = shown + len(text)
            await request.answer({"type": "delta", "id": name, "text": text})
        elif over:
            break
        else:
            await stream.changed.after(count)
    if message.status is MessageStatus.PROCESSED and not silent and "message" not in progress:
        progress["message"] = True
        await request.answer({"type": "message", "id": name, "text": message.reply})
    done = {"type": "done", "id": name, "status": message.status.value}
    if message.reason:
        done["reason"] = message.reason
    await request.finish(done)


async def _cancel(request: Request) -> None:
    if request.services.calls.has(request.caller, request.fields.get("id")):
        await _cancel_call(request)
        return
    name, messages = MessageId(str(request.fields.get("id"))), request.agents.messages
    message = messages.meant(request.caller, request.agent, name)
    if message is None:
        raise MissingError(f"there is no message {quote(name)} in this session")
    if message.over:
        raise NotRunningError(f"the message {quote(name)} is already {message.status}")
    if message.run and _is_only_reported(request, message, CONTROLLERS | Role.STOPPER):
        raise DeniedError("a report that is being worked on cannot be cancelled by its reporter")
    with request.agents.journal.acting(request.caller):
        messages.cancel(request.agent, message)


async def _cancel_call(request: Request) -> None:
    calls, name = request.services.calls, request.fields.get("id")
    if not calls.has(request.caller, name):
        raise MissingError(f"no call {quote(str(name))} of yours is pending")
    calls.cancel(request.caller, str(name))


# at the daemon's


async def _status(request: Request) -> None:
    await request.answer({"type": "status", **request.services.status()})


async def _events(request: Request) -> None:
    """Keeps nothing of who reads but a number: where it is."""
    after, wanted, follow = check_following(request.fields)
    progress, agents = request.progress, request.agents
    owner = agents.identity.whose(request.caller)
    if "after" not in progress:
        progress["after"] = agents.fleet.last(owner) if after is None else after
    with agents.fleet.reading(owner, progress["after"]) as reader:
        connection, replays = request.connection, request.services.replays
        await replays.follow(connection, reader, wanted, progress, forever=follow)
    await request.finish({"type": "end", "seq": reader.after})


async def _who(request: Request) -> None:
    """Tells of removed agents, too; of no agent but to its owner and to root."""
    incarnation = _relayed(request.text("address", "an address such as fd63:7478:6673:0:a:b:c:d"))
    agents = request.agents
    found = await trio.to_thread.run_sync(
        agents.store.holders, [incarnation], abandon_on_cancel=True, limiter=_RECALLING
    )
    owner, name = found.get(incarnation, (None, ""))
    if owner is None or agents.identity.whose(request.caller) not in (None, owner):
        raise MissingError(f"address: no agent of yours ever had {incarnation}")
    agent = agents.registry.named(name)
    lives = agent is not None and agent.incarnation == incarnation
    await request.finish(
        {
            "type": "who",
            "agent": name,
            "owner": owner,
            "incarnation": incarnation,
            "status": str(agent.status) if agent is not None and lives else "removed",
        }
    )


def _relayed(text: str) -> Incarnation:
    """The incarnation in an address that a relay said first; ``MalformedError``."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        raise MalformedError(f"address: {quote(text)} is no IPv6 address") from None
    if address not in _RELAYED:
        raise MalformedError(f"address: {address} is no agent's: those begin with fd63:7478:6673:0")
    return Incarnation(f"{int(address) & (1 << 64) - 1:016x}")


async def _peer(request: Request) -> None:
    """Whatever else comes by this connection is said by a daemon of another machine."""
    connection, hosting = request.connection, request.services.hosting
    fd, rest = connection.stream.socket.fileno(), connection.take_rest()
    linux.take_more(fd, hosting.at_once)
    connection.charge(hosting.memory)
    try:
        await hosting.serve(fd, request.caller.uid, rest, request.progress)
    finally:
        connection.charge(-hosting.memory)
    request.progress["done"] = True


async def _nodes(request: Request) -> None:
    """With a node, once its link is up, or cannot be. Who may change the configuration is told of
    all nodes, and where the keys of links are."""
    links, caller = request.services.links, request.caller
    if request.fields.get("forget") is not None:
        name = request.text("forget", "the name of a node, or of a lead")
        whose = request.agents.identity.whose(caller)
        if request.fields.get("lead"):
            await request.services.hosting.guests.forget_lead(name, whose)
        else:
            await links.forget(name, whose)
        rows = []
    elif request.fields.get("check") is None:
        rows = [link.shown() for link in links.of(caller.uid)]
    else:
        link = await links.opened(request.text("check", "the name of a node"), caller.uid)
        rows = [{**link.shown(), "restricted": await links.is_restricted(link)}]
    frame: dict[str, Any] = {"type": "nodes", "nodes": rows}
    if request.agents.identity.is_master(caller):
        frame |= links.setting()
    await request.finish(frame)


async def _reexec(request: Request) -> None:
    """The daemon that is executed answers."""
    before = request.progress.setdefault("before", request.services.version)
    if "executed" not in request.progress:
        request.progress["executed"] = True
        await request.services.reexecute()
    request.progress["done"] = True
    frame = {"type": "reexec", "version": request.services.version, "before": before}
    wrong = (await request.services.complaints())[:_COMPLAINTS_MAX]
    await request.answer({**frame, "wrong": wrong} if wrong else frame)


# guards


@unless("it is stopping", WrongStateError)
def _stopping(facts: Facts, caller: Caller, request: Request) -> str:
    return "the agent is stopping" if request.server.refusing else ""


@unless("it is stopping and the id is a new one", WrongStateError)
def _no_more(facts: Facts, caller: Caller, request: Request) -> str:
    return "the agent is stopping" if request.server.refusing and not request.own else ""


@unless("it names no agent", MissingError)
def _no_name(facts: Facts, caller: Caller, request: Request) -> str:
    return "agent: write the name of an agent" if request.name is None else ""


@unless("the caller is not an operator of the agent that it names", MissingError)
def _not_operated(facts: Facts, caller: Caller, request: Request) -> str:
    name, agent = request.name, request.named
    if name is None:
        return ""
    if agent is not None and facts.identity.roles(caller, agent) & OPERATORS:
        return ""
    return f"{quote(name)}: no such agent, or the caller is not its operator"


@unless("the caller may not remove the agent that it names", MissingError)
def _not_controlled(facts: Facts, caller: Caller, request: Request) -> str:
    name, agent = request.name, request.named
    if name is None or (agent and facts.identity.roles(caller, agent) & CONTROLLERS):
        return ""
    return f"{quote(name)}: no such agent, or the caller may not remove it"


@unless("that was started, or has a window", WrongStateError)
def _not_new(facts: Facts, caller: Caller, request: Request) -> str:
    agent = request.named
    if agent is None or request.services.windows.is_lost(agent):
        return ""
    if agent.status is not Status.NEW:
        what = f"{quote(agent.name)} is {agent.status}"
        return f"{what}: open the window of an agent before you start it"
    return f"{quote(agent.name)} has a window" if agent.window else ""


#: who may use the socket of a public agent, of a private agent, and of the daemon
CONNECTING: Final[AnyGuard] = Guard(who=Role.ANYONE)
CONNECTING_PRIVATE: Final[AnyGuard] = Guard(who=INSIDERS)
CONNECTING_DAEMON: Final[AnyGuard] = Guard(who=OPERATORS)


def connecting(agent: Agent | None) -> AnyGuard:
    """The guard of who may use a socket."""
    if agent is None:
        return CONNECTING_DAEMON
    return CONNECTING_PRIVATE if agent.private else CONNECTING


def _table(*operations: Operation) -> dict[str, Operation]:
    return {operation.name: operation for operation in operations}


def _guard(who: Role) -> Guard[Request]:
    """The guard of an operation that is refused while the agent ends."""
    return Guard(who=who, unless=(_stopping,))


OPERATIONS: Final = _table(
    Operation(name="ping", guard=_guard(Role.ANYONE), handler=_ping,
        doc="answer that the socket is served"),
    Operation(name="wait", guard=Guard(who=Role.ANYONE), handler=_wait, stays=True,
        doc="answer when the agent is dead"),
    Operation(name="resume", guard=Guard(who=HISTORIANS), handler=_resume, stays=True,
        doc="replay the events of the session, then send new ones"),
    Operation(name="send", handler=_send, stays=True, of_message=True,
        guard=Guard(who=SENDING.who | Role.SENDER, unless=(_no_more,), delegated=True),
        doc="send a message, and receive its reply as it grows"),
    Operation(name="cancel", handler=_cancel, of_message=True,
        guard=_guard(CONTROLLERS | Role.STOPPER | Role.SENDER),
        doc="end a message, or end the waiting of a pending tool call"),
    Operation(name="tool", guard=_guard(Role.SELF), handler=_tool, stays=True,
        doc="call a tool about the agent itself"),
    Operation(name="ctl", guard=_guard(Role.SELF), handler=_ctl, stays=True,
        doc="say a verb to the agent itself, or to the named agent or task"),
    Operation(name="window", handler=_window, stays=True,
        guard=Guard(who=Role.SELF, unless=(_stopping, _no_name, _not_controlled, _not_new)),
        doc="answer with a descriptor; the named child ends when that is closed"),
    Operation(name="prune", guard=_guard(Role.SELF), handler=_prune, stays=True,
        doc="remove children, tasks and work items of the agent that ended long ago"),
    Operation(name="why", guard=_guard(PARTIES), handler=_why,
        doc="tell which line of a policy permits something"),
    Operation(name="audit", guard=_guard(OPERATORS | Role.SELF), handler=_audit,
        doc="tell what was refused to the agent and, to operators, about it"),
    Operation(name="quota", guard=_guard(PARTIES), handler=_quota,
        doc="tell what the agent's owner uses of its accounts"),
)  # fmt: skip

_OPERATORS: Final[Guard[Request]] = Guard(who=OPERATORS)
_MASTERS: Final[Guard[Request]] = Guard(who=Role.ROOT)

DAEMON_OPERATIONS: Final = _table(
    Operation(name="ping", guard=_OPERATORS, handler=_ping,
        doc="answer that the socket is served"),
    Operation(name="status", guard=_OPERATORS, handler=_status,
        doc="tell the facts of the file status"),
    Operation(name="tool", guard=_OPERATORS, handler=_tool, stays=True,
        doc="call a tool about an agent"),
    Operation(name="ctl", guard=Guard(who=OPERATORS, unless=(_no_name,)), handler=_ctl,
        stays=True, doc="say a verb to the named agent, or to its task"),
    Operation(name="cancel", guard=_OPERATORS, handler=_cancel_call,
        doc="end the waiting of a pending tool call"),
    Operation(name="window", handler=_window, stays=True,
        guard=Guard(who=OPERATORS, unless=(_no_name, _not_controlled, _not_new)),
        doc="answer with a descriptor; the named agent ends when that is closed"),
    Operation(name="terminal", handler=_terminal, stays=True,
        guard=Guard(who=OPERATORS, unless=(_no_name, _not_operated)),
        doc="answer with a descriptor, by which somebody looks at the terminal of the named agent "
        "or its task, and types there"),
    Operation(name="prune", guard=_OPERATORS, handler=_prune, stays=True,
        doc="remove what of the caller's ended long ago"),
    Operation(name="events", guard=_OPERATORS, handler=_events, stays=True,
        doc="send the events of all agents of the caller, to root of all, then new ones"),
    Operation(name="who", guard=_OPERATORS, handler=_who, stays=True,
        doc="tell whose the address is that the relay of an agent of the caller's says first, to "
        "root any agent's"),
    Operation(name="nodes", guard=_OPERATORS, handler=_nodes, stays=True,
        doc="tell of the nodes at which the caller may place agents; of a named one, once its "
        "link is up"),
    Operation(name="peer", guard=_OPERATORS, handler=_peer, stays=True, last=True,
        doc="serve a daemon of another machine by this connection from now on (ctx peer)"),
    Operation(name="reexec", guard=_MASTERS, handler=_reexec, stays=True,
        doc="execute the program of the daemon again, and answer when it is ready"),
    Operation(name="why", handler=_why,
        guard=Guard(who=OPERATORS, unless=(_no_name, _not_operated)),
        doc="tell which line of a policy permits something to the named agent"),
    Operation(name="audit", handler=_audit,
        guard=Guard(who=OPERATORS, unless=(_not_operated,)),
        doc="tell what was refused to and about the caller's agents, or the named one"),
    Operation(name="quota", guard=_OPERATORS, handler=_quota,
        doc="tell what the caller uses of its accounts; to root, all owners"),
)  # fmt: skip
