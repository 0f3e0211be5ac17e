"""This machine as a lead: the commands that lead to its nodes, one for each node and owner.

A command is a process of the operator's choice, such as ssh(1), which connects its standard input
and output to ``ctx peer`` on the other machine. It reads what a stranger says: so it has an
account of its own (link.c), and a cgroup whose processes have no rights towards ctxd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

from runtime import crashpoints
from runtime.agents.nodes import Ways
from runtime.authority.accounts import Payer
from runtime.authority.loop import Timed, Turns
from runtime.cell.port import Host, Part
from runtime.errors import CtxError, MissingError, QuotaError
from runtime.kernel import linux, orders
from runtime.kernel.cgroups import Cgroup
from runtime.kernel.daemonlog import Rates, because_of
from runtime.kernel.handover import Descriptors
from runtime.kernel.inotify import Wakeup
from runtime.kernel.spawn import Process
from runtime.kernel.users import find_user
from runtime.peers.complaints import COMPLAINT_SECONDS, SAID_MAX, ended, said_instead, told
from runtime.peers.hello import told_of_itself
from runtime.peers.leading import Leading
from runtime.peers.lease import Grants
from runtime.peers.peering import (
    CREDIT_MAX,
    GREETING,
    Acknowledged,
    BrokenLinkError,
    Bytes,
    Event,
    Grown,
    Hello,
    Lead,
    SilentLinkError,
    Want,
    breaking,
)
from runtime.peers.post import NODE, Post, key_of
from runtime.peers.registrations import Registrations
from runtime.peers.streams import Stream
from runtime.peers.talking import Talk, now
from runtime.records.model import Agent
from runtime.records.nodes import PEER, Node, argv
from runtime.records.settings import PLACED_GRACE
from runtime.texts.names import quote

log = logging.getLogger("ctxd.peers")

#: for which a command that nobody needs any more is kept
_IDLE_SECONDS: Final = 60.0
#: that a node is told that it is forgotten
_FORGET_SECONDS: Final = 5.0
#: until the other side has said hello
_OPEN_SECONDS: Final = 30.0
#: of complaints of a command, what is read at once, and the pause after that
_PIECE: Final = 64 << 10
_REST_SECONDS: Final = 0.05
_FIRST_RETRY: Final = 1.0
#: between two starts of a command, whoever wants it
_LEAST_RETRY: Final = 0.5
_HOUR: Final = 3600.0
_LATE_RETRY: Final = 60.0
_END_SECONDS: Final = 2.0
#: that a key has to show what it leads to
_CHECK_SECONDS: Final = 10.0
#: where the command of a node is found, and what an ordinary user's own ssh needs to know
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_USERS: Final = ("HOME", "USER", "LOGNAME", "PATH", "SSH_AUTH_SOCK")


@dataclass(slots=True, eq=False)
class Link:
    """The way to a node for one owner."""

    node: str
    owner: int
    state: str = "idle"
    #: when it got that state, and when something was heard last, in seconds since the epoch
    since: float = field(default_factory=time.time)
    seen: float = 0.0
    error: str = ""
    #: what the host said of itself
    host: Mapping[str, Any] = field(default_factory=dict)
    #: seconds between hello and its answer
    trip: float = 0.0
    changed: Wakeup = field(default_factory=Wakeup)
    #: whoever waits does not wait for the next try; how many have failed, or ended
    wanted: Wakeup = field(default_factory=Wakeup)
    tries: int = 0
    #: when commands were started in the last hour
    starts: list[float] = field(default_factory=list)
    talk: Talk | None = None
    #: of its command, which is open
    process: Process | None = None
    ends: tuple[socket.socket, ...] = ()
    #: by the clock of trio: until then it is to be open
    needed: float = 0.0
    runs: bool = False
    #: bytes that were read and written on earlier connections
    moved: list[int] = field(default_factory=lambda: [0, 0])
    #: of a host that breaks the rules a line in the log is enough for so long
    refusals: Rates = field(default_factory=lambda: Rates(window=COMPLAINT_SECONDS))
    #: the state that the log has
    logged: str = "idle"
    #: called when what is shown of it has changed
    told: Callable[[], object] = lambda: None

    @property
    def key(self) -> tuple[str, int]:
        return self.node, self.owner

    def last_seen(self) -> float:
        """When something was heard last, in seconds since the epoch."""
        if self.talk and self.talk.peering.is_open:
            self.seen = time.time() - (trio.current_time() - self.talk.heard)
        return self.seen

    def shown(self) -> dict[str, Any]:
        """As callers are told of it."""
        known = ("node", "alias", "product", "version", "lease_max", "networks", "shared")
        return {
            "name": self.node,
            "state": self.state,
            "since": self.since,
            "seen": self.last_seen(),
            "error": self.error,
            "trip": self.trip,
            **{f"host.{name}" if name == "node" else name: self.host.get(name) for name in known},
        }

    def become(self, state: str, error: str = "") -> None:
        if state != self.state:
            self.state, self.since = state, time.time()
        is_told, more = state != self.logged, 0
        if state == "refused":
            is_told, more = self.refusals.admit("", 1)
        if is_told:
            self.logged = state
            said = f"{state}: {error}" if error else state
            said += f" ({more} more before)" if more else ""
            extra = because_of(self.owner)
            log.info("link of uid %d to %s: %s", self.owner, self.node, said, extra=extra)
        self.error = error
        self.changed.notify()
        self.told()


class Links(Part, Ways):
    """Opens links that are needed, and closes them when they are not."""

    def __init__(
        self, host: Host, registrations: Registrations, post: Post, leading: Leading
    ) -> None:
        super().__init__(host)
        self._registrations = registrations
        self._post = post
        self._leading = leading
        leading.want = self.want
        self._base = self._port.hierarchy.links
        self._links: dict[tuple[str, int], Link] = {}
        self._opening = trio.CapacityLimiter(16)
        self._turns = Turns()

    async def clear(self) -> None:
        """Ends commands that did not end with the daemon before, by themselves if they do."""
        if self._base.exists():
            with trio.move_on_after(_END_SECONDS):
                while self._base.populated():
                    await trio.sleep(_REST_SECONDS)
            self._base.kill()
            for leaf in self._base.children():
                self._port.remove(int(leaf.path.name.rpartition("-")[2]), leaf)

    def of(self, owner: int) -> list[Link]:
        """The nodes that an owner may use, each with its link."""
        nodes = self._agents.settings.config.nodes
        return [self._link(name, owner) for name in sorted(nodes) if self._login(name, owner)]

    def counted(self) -> dict[str, dict[str, float]]:
        """By node, what ``metrics`` tells of its links, of all owners together."""
        found = {}
        for name in self._agents.settings.config.nodes:
            links = [link for link in self._links.values() if link.node == name]
            moved = [link.moved for link in links]
            moved += [link.talk.moved for link in links if link.talk]
            found[name] = {
                "up": sum(link.state == "up" for link in links),
                "wanted": sum(link.runs for link in links),
                "lease": self._leading.left(name),
                "operations": self._leading.undone(name),
                "lost": self._leading.lost[name],
                "read": sum(each[0] for each in moved),
                "written": sum(each[1] for each in moved),
            }
        return found

    def setting(self) -> dict[str, Any]:
        """For whoever adds a node, or looks after them: the names of all; whether ssh leads to
        one; the directory of the key, with its uid and gid, None if the user's own ssh has the
        keys; the name of this machine at nodes."""
        config, privilege = self._agents.settings.config, self._agents.privilege
        by_ssh = any(node.ssh for node in config.nodes.values())
        uid, gid, _ = config.link_ids()
        keys = None if privilege.rootless else [str(self._places.state / "ssh"), uid, gid]
        names = sorted(config.nodes)
        return {"configured": names, "ssh": by_ssh, "keys": keys, "alias": config.node_name}

    def heard(self, node: str, owner: int) -> Mapping[str, Any]:
        link = self._links.get((node, owner))
        if link is None:
            return {}
        host = {key: link.host.get(key, ()) for key in ("directories", "networks", "shared")}
        version = str(link.host.get("product", ""))
        seen = link.last_seen()
        shown = {"state": link.state, "since": link.since, "seen": seen, "error": link.error}
        return {**shown, **host, "version": version}

    def of_agent(self, agent: Agent) -> Mapping[str, Any]:
        return self._leading.state_of(agent)

    def owners(self) -> Iterable[int]:
        return (owner for _, owner in self._links)

    def _link(self, name: str, owner: int) -> Link:
        told = self._agents.nodes.told
        return self._links.setdefault((name, owner), Link(name, owner, told=told))

    def _login(self, name: str, owner: int) -> str | None:
        """As whom an owner is at a node; None for whoever may not use it."""
        node = self._agents.settings.config.nodes.get(name)
        return node.login(owner) if node else None

    async def opened(self, name: str, owner: int) -> Link:
        """The link to a node, once it is up, or cannot be. ``MissingError`` for no such node."""
        if not self._login(name, owner):
            if name in self._agents.settings.config.nodes and not owner:
                raise MissingError(
                    f"{quote(name)}: root has no login there: ask as a user who has one, or add "
                    "root: LOGIN to its users"
                )
            usable = ", ".join(link.node for link in self.of(owner)) or "none"
            raise MissingError(f"{quote(name)}: no such node for you; there is {usable}")
        link, most = self._link(name, owner), self._agents.settings.config.links
        if not link.runs and sum(each.runs for each in self._links.values()) >= most:
            raise QuotaError(f"{most} links are open, the configured maximum (links): try later")
        self.want(name, owner)
        tries = link.tries
        with trio.move_on_after(_OPEN_SECONDS):
            await link.changed.until(lambda: link.state == "up" or link.tries > tries)
            return link
        link.become("down", f"no answer within {_OPEN_SECONDS:g} s")
        return link

    def want(self, name: str, owner: int) -> None:
        """Has a link opened, if it is not, and kept for a while."""
        link = self._link(name, owner)
        link.needed = trio.current_time() + _IDLE_SECONDS
        link.wanted.notify()
        if not link.runs:
            link.runs = True
            self._nursery.start_soon(self._keep, link, None)

    def _is_needed(self, link: Link) -> bool:
        if self._leading.needs(*link.key):
            link.needed = trio.current_time() + _IDLE_SECONDS
        return trio.current_time() < link.needed

    async def forget(self, name: str, owner: int | None) -> None:
        """Waits no more for agents at a node, of one owner or of all, of which nothing is heard:
        whoever answers there next is another host. One that answers now takes away what they have
        left there. ``WrongStateError``."""
        with trio.move_on_after(_FORGET_SECONDS):
            await self._leading.leave(name, owner)
        owners = self._leading.forget(name, owner)
        if not owners and name not in self._agents.settings.config.nodes:
            raise MissingError(f"{quote(name)}: there is no such node, and nothing of one is known")
        # a host that has just said hello may be waiting for the disk
        greeted = {each for node, each in self._links if node == name and owner in (None, each)}
        for each in owners | greeted:
            self._registrations.note_host(name, each, "")
            talk = self._link(name, each).talk
            if talk is not None:
                talk.close()
        await self._registrations.written()

    def save(self, descriptors: Descriptors) -> list[dict[str, Any]]:
        """The links that are open, as JSON values."""
        return [
            {
                "node": link.node,
                "owner": link.owner,
                "since": link.since,
                "seen": link.last_seen(),
                "host": dict(link.host),
                "trip": link.trip,
                "needed": link.needed - trio.current_time(),
                "pid": link.process.pid,
                "ends": [descriptors.keep(end.fileno()) for end in link.ends],
                "left": bytes(link.talk.left),
                "unheard": bytes(link.talk.unheard),
                "peering": link.talk.peering.save(descriptors),
            }
            for link in self._links.values()
            if link.state == "up" and link.talk and link.process
        ]

    def take_over(self, saved: list[dict[str, Any]]) -> None:
        """Goes on with links that the daemon before had open."""
        for each in saved:
            link = self._link(each["node"], each["owner"])
            link.state, link.since, link.seen = "up", each["since"], each["seen"]
            link.host, link.trip = each["host"], each["trip"]
            link.needed = trio.current_time() + each["needed"]
            link.process = Process(each["pid"])
            link.ends = tuple(socket.socket(fileno=fd) for fd in each["ends"])
            link.runs = True
            self._nursery.start_soon(self._keep, link, each)

    async def _keep(self, link: Link, saved: dict[str, Any] | None) -> None:
        """Opens it again and again, as long as it is needed."""
        pause = 0.0
        try:
            while saved or self._is_needed(link):
                began = trio.current_time()
                try:
                    await self._open(link, saved)
                except Exception as error:
                    why = getattr(error, "sentence", str(error))
                    if not isinstance(error, CtxError | OSError):
                        log.exception("link to %s: a bug in ctxfs", link.node)
                        why = "a bug in ctxfs, see the log of ctxd"
                    link.become("down", why)
                    self._leading.closed(*link.key, why)
                saved = None
                link.tries += 1
                link.changed.notify()
                lease = self._lease(link)
                late = trio.current_time() - link.needed + _IDLE_SECONDS > lease
                lasted = trio.current_time() - began > lease
                most = _LATE_RETRY if late else lease / 6
                pause = _FIRST_RETRY if lasted else min(max(2 * pause, _FIRST_RETRY), most)
                await self._rest(link, began, pause)
        finally:
            link.runs = False
            link.become("idle", link.error)

    async def _rest(self, link: Link, began: float, pause: float) -> None:
        """Before the next start: less if somebody wants it, more if there were many."""
        count = link.wanted.count
        with trio.move_on_after(pause):
            await link.wanted.after(count)
        await trio.sleep_until(began + _LEAST_RETRY)
        link.starts = [each for each in link.starts if each > began - _HOUR] + [began]
        most = self._agents.settings.config.connections
        if self._agents.privilege.rootless and len(link.starts) >= most:
            await trio.sleep(_LATE_RETRY)

    def _lease(self, link: Link) -> float:
        node = self._agents.settings.config.nodes.get(link.node)
        return node.lease if node else _OPEN_SECONDS

    async def _open(self, link: Link, saved: dict[str, Any] | None) -> None:
        """Runs the command once, until it ends; or goes on with one that runs."""
        node, login = self._agents.settings.config.nodes.get(link.node), self._login(*link.key)
        leaf = self._base.child(f"{link.node}-{link.owner}")
        if node is None or login is None:
            raise MissingError(f"{link.node} is no longer configured")
        with contextlib.ExitStack() as stack:
            stack.callback(self._port.remove, link.owner, leaf, wanted=True)
            if saved is None:
                crashpoints.reach("link.planned")
                pairs = [_pair(stack) for _ in range(2)]
                for each in pairs[0]:
                    linux.take_more(each.fileno(), CREDIT_MAX)
                async with self._opening:
                    end, errors = theirs = [end for _, end in pairs]
                    link.process = await self._start(link, node, login, leaf, end, errors)
                    crashpoints.reach("link.started")
                for end in theirs:
                    end.close()
                link.ends = tuple(end for end, _ in pairs)
            stack.callback(leaf.kill)
            for end in link.ends:
                stack.callback(end.close)
            await self._until_ended(link, node, saved)

    async def _until_ended(self, link: Link, node: Node, saved: dict[str, Any] | None) -> None:
        ours, said = link.ends
        assert link.process
        words: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hear_errors, said, words)
            try:
                state, error = await self._talk(link, node, ours.fileno(), saved)
            finally:  # also when this daemon ends
                with contextlib.suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)
                with trio.CancelScope(shield=True):
                    status = await link.process.end(_END_SECONDS)
            if status is not None:
                error = error or ("" if link.host else ended(status))
                with contextlib.suppress(OSError):
                    _take_errors(said, words)
            nursery.cancel_scope.cancel()
        rootless = self._agents.privilege.rootless
        last = told("".join(words), "" if rootless else f"{self._places.state}/ssh")
        refused = state == "refused"
        if refused or trio.current_time() < link.needed or not link.host:
            link.become(state, ": ".join(filter(None, (error, last))))
        self._leading.closed(*link.key, link.error, refused=refused)

    async def is_restricted(self, link: Link) -> bool:
        """Whether the key of a node leads to ctxd there, whatever it is used for; also if that
        cannot be known."""
        node, login = self._agents.settings.config.nodes.get(link.node), self._login(*link.key)
        if node is None or login is None or not node.ssh or self._agents.privilege.rootless:
            return True
        leaf = self._base.child(f"@{link.node}-{link.owner}")  # no node is called so
        said = b""
        with contextlib.ExitStack() as stack:
            stack.callback(self._port.remove, link.owner, leaf, wanted=True)
            (ours, end), (_, errors) = (_pair(stack) for _ in range(2))
            word = "ctxfs-key-is-not-restricted"
            process = await self._start(link, node, login, leaf, end, errors, ("echo", word))
            stack.callback(leaf.kill)
            for each in (end, errors):
                each.close()
            with trio.move_on_after(_CHECK_SECONDS):
                while GREETING not in said and word.encode() not in said:
                    await trio.lowlevel.wait_readable(ours)
                    if not (more := ours.recv(_PIECE)) or len(said) > _PIECE:
                        break
                    said += more
            leaf.kill()
            await process.wait()
        return word.encode() not in said

    async def _start(
        self, link: Link, node: Node, login: str, leaf: Cgroup, end: socket.socket,
        errors: socket.socket, there: Sequence[str] = PEER,
    ) -> Process:  # fmt: skip
        privilege, config = self._agents.privilege, self._agents.settings.config
        await self._port.sweeper.removed(link.owner, leaf)
        leaf.create(())
        env, apart = node.env, ""
        if privilege.rootless:
            ids: tuple[orders.Order, ...] = (privilege.uid, privilege.gid, "=")
            env = {**{key: os.environ[key] for key in _USERS if key in os.environ}, **env}
        elif node.as_ == "owner" and (user := find_user(link.owner)) is not None:
            of = os.getgrouplist(user.pw_name, user.pw_gid)
            ids = (user.pw_uid, user.pw_gid, list(map(str, of)))
        else:
            uid, gid, groups = config.link_ids()
            ids, apart = (uid, gid, list(map(str, groups))), "apart"
        command = argv(node, login, rootless=privilege.rootless, there=there)
        own = node.ssh and not privilege.rootless
        directory = self._places.state / "ssh" if own else "/"
        command[0] = shutil.which(command[0], path=_PATH) or command[0]
        words = orders.words(self._places.program("link"), *ids, directory, apart, command)
        fds = [end.fileno(), end.fileno(), errors.fileno()]
        return await self._port.spawner.start(leaf, words, owner=link.owner, env=env, fds=fds)

    async def _talk(
        self, link: Link, node: Node, fd: int, saved: dict[str, Any] | None
    ) -> tuple[str, str]:
        """The state of the link after that, and why it is over."""
        config, owner = self._agents.settings.config, find_user(link.owner)
        before = self._registrations.host(*link.key)
        said = {
            "name": config.node_name,
            "as": before,
            "owner": owner.pw_name if owner else str(link.owner),
            "ttl": node.lease,
            "grace": PLACED_GRACE,
        }
        key = key_of(NODE, before) if before else ""
        files = self._leading.returns
        stream = self._post.stream(key) if key else Stream()
        grants = self._grants(link, key, node) if key else Grants(node.lease, PLACED_GRACE, now())
        lead = Lead(said, stream, grants)
        patience, payer = _OPEN_SECONDS if saved is None else node.lease, Payer(link.owner)
        link.talk = talk = Talk(lead, fd, patience, partial(self._turns.take, payer))
        began = trio.current_time()

        def opened() -> None:
            """Both sides have said hello."""
            self._post.tell(key, talk.said)
            files.opened(key, lead)
            self._leading.opened(key, link.host)
            self._nursery.start_soon(self._close_unneeded, link, talk)

        if saved is not None:
            lead.restore(saved["peering"])
            talk.left = memoryview(saved["left"])
            opened()

        async def hear(event: Event, *more: Event) -> None:
            nonlocal key
            if isinstance(event, Acknowledged):
                self._post.acknowledged(key, event.number)
                return
            if isinstance(event, Want | Bytes | Grown):
                files.hear(key, lead, event)
                return
            if not isinstance(event, Hello):
                await self._leading.hear(key, event, *more)
                return
            crashpoints.reach("link.greeted")
            if self._registrations.is_own(known := event.said["as"]):
                self._registrations.note_host(*link.key, known)  # so it is one, however often
                raise BrokenLinkError("it leads to this ctxd, which is no node of itself")
            with breaking():
                told, new = told_of_itself(event.said), None
            if not lead.fits(event):
                if key:
                    self._leading.parted(key)
                if known == before or not known:
                    self._registrations.note_host(*link.key, "")
                    with breaking():
                        await self._registrations.written()
                    raise BrokenLinkError("it is where it was before, and knows too little")
                if self._leading.knows(key_of(NODE, known)):
                    raise BrokenLinkError("it says of a new registration what another one has")
                self._registrations.note_host(*link.key, known)
                with breaking():
                    await self._registrations.written()
                key = key_of(NODE, known)
                new = self._post.stream(key), self._grants(link, key, node)
            lead.go_on(event, new=new)
            talk.expect(node.lease)
            link.host, link.trip = told, trio.current_time() - began
            link.become("up")
            opened()

        state, error, unheard = "down", "", bytes(saved.get("unheard", b"")) if saved else b""
        try:
            pay = partial(self._agents.accounts.time.pay, payer)
            await Timed(talk.run(hear, unheard), pay)
        except* SilentLinkError as errors:
            error = str(errors.exceptions[0])
        except* BrokenLinkError as errors:
            state, error = "refused", str(errors.exceptions[0])
        finally:
            link.last_seen()
            link.talk = None
            files.closed(key, lead)
            link.moved = [a + b for a, b in zip(link.moved, talk.moved, strict=True)]
        return state, error if lead.is_open or error else said_instead(lead.before)

    def _grants(self, link: Link, key: str, node: Node) -> Grants:
        return self._leading.grants(key, *link.key, node.lease)

    async def _close_unneeded(self, link: Link, talk: Talk) -> None:
        while self._is_needed(link):
            await trio.sleep(link.needed - trio.current_time())
        if link.talk is talk:
            talk.close()


def _pair(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """(ours, the command's): descriptors that the other end sends are refused."""
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        stack.callback(each.close)
    ours.setblocking(False)
    linux.refuse_descriptors(ours)
    return ours, theirs


async def _hear_errors(said: socket.socket, words: list[str]) -> None:
    """Keeps the last of what a command complains of; who says much waits."""
    while True:
        await trio.lowlevel.wait_readable(said)
        if not _take_errors(said, words):
            return
        await trio.sleep(_REST_SECONDS)


def _take_errors(said: socket.socket, words: list[str]) -> bool:
    data = said.recv(_PIECE)
    words[:] = ["".join((*words, data.decode(errors="replace")))[-SAID_MAX:]]
    return bool(data)
