"""ctxd: the runtime and the filesystem, composed and run in the foreground."""

from __future__ import annotations

import runtime.unaided  # noqa: F401  # before trio

# isort: split
import argparse
import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyfuse3
import trio

from ctxfs import recipes
from ctxfs.collecting import Collecting
from ctxfs.declared import read_directory, schema, unread
from ctxfs.declaring import Declaring
from ctxfs.errnos import name_of
from ctxfs.filesystem import Filesystem
from ctxfs.handshake import Handshake
from ctxfs.mount import (
    MountGuard,
    check_device,
    check_own,
    check_point,
    check_user,
    clear_stale,
    mounted,
)
from ctxfs.operations import WORKERS, Operations
from ctxfs.placing import Placing
from ctxfs.program import program
from ctxfs.reexec import CHECK, SIGNALS, Reexecution, checked
from ctxfs.saying import say
from ctxfs.service import Service
from ctxfs.tools import registry as tools
from runtime import crashpoints
from runtime.cell.cell import Places
from runtime.errors import StartupError
from runtime.kernel import cgroups, handover
from runtime.kernel.daemonlog import DaemonLog
from runtime.kernel.privilege import Privilege
from runtime.kernel.spawn import own_children, reap_children
from runtime.kernel.systemd import Journal
from runtime.records.config import Config, load_config, read_config
from runtime.records.store import check_state
from runtime.runtime import VERSION, Runtime, open_runtime
from runtime.sockets.replay import Replays
from runtime.sockets.request import Services
from runtime.sockets.server import Sockets

log = logging.getLogger("ctxd")

#: as that of the machine's own services that others wait for (setpriority(2))
_NICE: Final = -10
#: callers wait at most so long for a daemon that takes over what ends just then
_HELD_SECONDS: Final = 2.0
_LEVELS: Final = ("debug", "info", "warning", "error")
#: their default action would end the daemon (signal(7)), which nobody who sends one means
_REFUSED: Final = (signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM)
_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Where things are if no option says so."""

    mount: Path
    state: Path
    runtime: Path
    config: Path

    @classmethod
    def of(cls, privilege: Privilege, environment: Mapping[str, str]) -> Defaults:
        """The system's places, or those of a user (XDG Base Directory Specification)."""
        if not privilege.rootless:
            return cls(
                mount=Path("/ctx"),
                state=Path("/var/lib/ctxfs"),
                runtime=Path("/run/ctxfs"),
                config=Path("/etc/ctxfs/config.yaml"),
            )
        home = Path(environment.get("HOME") or "/")
        # systemd's place for it where nobody says; as mountinfo will name it
        run = Path(
            os.path.realpath(environment.get("XDG_RUNTIME_DIR") or f"/run/user/{privilege.uid}")
        )
        state = Path(environment.get("XDG_STATE_HOME") or home / ".local" / "state")
        config = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
        return cls(
            mount=run / "ctx",
            state=state / "ctxfs",
            runtime=run / "ctxfs",
            config=config / "ctxfs" / "config.yaml",
        )


def parse_arguments(argv: list[str] | None, defaults: Defaults) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ctxd",
        description="Show agents as files, and own their processes.",
        epilog="ctxd runs in the foreground. When the mount answers, it writes 'ready' to standard "
        "error. On SIGTERM, it cancels every agent, unmounts the file system and exits. "
        "See ctxd(8).",
    )
    for name, what in (
        ("mount", "mount the file system on this directory"),
        ("state", "keep agents and histories in this directory"),
        ("runtime", "keep run-time files in this directory"),
    ):
        default: Path = getattr(defaults, name)
        what = f"{what} (default: {_shown(default)})"
        parser.add_argument(f"--{name}", metavar="DIR", type=Path, default=default, help=what)
    for option, kind, what in (
        ("--cgroup", "PATH", "create the agents' cgroups below this cgroup (default: the cgroup "
         "delegated to ctxd; for root, otherwise ctxfs in the v2 hierarchy)"),
        ("--config", "FILE", f"read settings from this file (default: {_shown(defaults.config)}, "
         "if it exists), and agents from the directory agents.d beside it"),
    ):  # fmt: skip
        parser.add_argument(option, metavar=kind, type=Path, help=what)
    for option, what in (
        ("--check-config", "read the settings and the agents that are declared beside them, print "
         "what is wrong and exit"),
        ("--print-schema", "print the JSON schema of a file that declares an agent and exit"),
        (CHECK, "look whether ctxd could start here, or take over from the one that runs: read "
         "program, settings and state, change nothing, and exit"),
    ):  # fmt: skip
        parser.add_argument(option, action="store_true", help=what)
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        choices=_LEVELS,
        default="info",
        help=f"log messages of this level and above: {', '.join(_LEVELS)} (default: info)",
    )
    parser.add_argument("--version", action="version", version=f"ctxd {VERSION}")
    return parser.parse_args(argv)


def _shown(path: Path) -> str:
    """For argparse, which formats its texts."""
    return str(path).replace("%", "%%")


def _raise_file_limit() -> None:
    """Each live agent holds a few descriptors, each known real file one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _take_precedence() -> None:
    """However many processes agents have, the one that answers all of them gets its turn.

    Only its main thread: what it starts, agents above all, is of the ordinary kind again
    (sched(7)). An ordinary user may not, and root not in every container.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
        ordinary = os.SCHED_OTHER | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, ordinary, os.sched_param(0))
    # Where the kernel groups processes by session, each cell competes with the daemon's
    # session as a whole; one that the daemon shares with a shell is left as it is.
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICE), encoding="ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The circumstances of a start. ``before`` is what the daemon before in the same process has
    left, and ``early`` are the signals that came before there was anybody to handle them."""

    config: Config
    config_file: Path
    places: Places
    cgroup: Path | None
    privilege: Privilege
    daemon_log: DaemonLog
    before: dict[str, Any] | None
    early: list[int]


async def serve(given: Given) -> None:
    """Runs the daemon until SIGTERM or SIGINT. Raises ``StartupError``."""
    before = given.before
    children = own_children() if before is not None else []
    async with open_runtime(
        config=given.config,
        places=given.places,
        cgroup=given.cgroup,
        privilege=given.privilege,
        inherited=before["runtime"]["held"] if before is not None else None,
    ) as runtime:
        fs = Filesystem(runtime)
        handshake = Handshake(before["kernel"] if before is not None else None)
        operations = Operations(fs, handshake)
        # unmounted before the runtime below it goes
        with mounted(operations, runtime, handshake) as guard:
            async with trio.open_nursery() as nursery:
                daemon = Daemon(given, fs, handshake, operations, guard, nursery)
                daemon.answer(children)
                await handshake.agreed.wait()
                if before is None:
                    await daemon.come_up()
                else:
                    await daemon.take_over(before)
                daemon.be_ready()
                await daemon.stopping.wait()
                await daemon.end()
    log.info("every agent is gone, unmounted")


@dataclass(eq=False)
class Daemon:
    """The daemon between its mount and its end, in the steps of ``serve``."""

    given: Given
    fs: Filesystem
    handshake: Handshake
    operations: Operations
    guard: MountGuard
    nursery: trio.Nursery

    def __post_init__(self) -> None:
        self.base, self.runtime = self.fs.base, self.fs.base.runtime
        self.runtime.guests.putting.files = Placing(self.base)
        self.base.recipe_places = self.given.config_file.parent / "agents", recipes.shipped()
        self.stopping, self.taken_over = trio.Event(), trio.Event()
        self.service = Service(self.runtime)
        self.reexecution = Reexecution(self.base, self.operations, self.guard, self.nursery)
        services = Services(
            agents=self.base.agents,
            streams=self.runtime.streams,
            windows=self.runtime.supervisor.windows,
            replays=Replays(self.base.agents.sessions),
            links=self.runtime.links,
            hosting=self.runtime.hosting,
            status=self.runtime.status,
            call_tool=partial(tools.call, self.base, self.fs.root),
            say=partial(say, self.base, self.fs.root),
            refusals=self.base.reasons.recent,
            reexecute=self.reexecution.ask,
            complaints=self._complaints,
            version=VERSION,
        )
        self.sockets = Sockets(
            services,
            places=self.given.places,
            binder=self.runtime.binder,
            nursery=self.nursery,
            code=name_of,
            refused=self.base.reasons.note,
        )
        self.reexecution.passes(self.handshake, self.sockets)
        self.declaring = Declaring(self.fs, _declared_in(self.given.config_file))

    def answer(self, children: Iterable[int]) -> None:
        """Begins to answer the kernel, callers of sockets and signals. What the daemon before
        started ends meanwhile; it holds up its callers until it is ready."""
        base = self.base
        self.operations.beginning = self.given.before is None
        if self.given.before is not None:
            self.operations.scheduler.reading.hold()
        base.cache.mounted = True
        for task in (
            base.cache.run, base.disks.run, base.kept_lines.run, self.guard.watch,
            self.service.run, self.sockets.run,
        ):  # fmt: skip
            self.nursery.start_soon(task)
        # before the first request: that may start an agent, which has a socket
        self.runtime.supervisor.prepare_with(self.sockets.open)
        self.nursery.start_soon(self._answer_requests)
        # monitors are waited for by who leads their programs, and commands by their links
        waited_for = self.runtime.hierarchy.waits_for
        others = [pid for pid in children if not waited_for(cgroups.path_of(pid) or "")]
        self.nursery.start_soon(reap_children, others)
        self.nursery.start_soon(self._handle_signals)

    async def _answer_requests(self) -> None:
        """Until the connection to the kernel is gone; if nobody ended it, it is made anew.

        What was open is lost with it, as after a crash: so the daemon begins anew as well, in
        the same process, and takes over what lives.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.operations.scheduler.run)
            self.operations.scheduler.connect()
            await pyfuse3.main(1, WORKERS)
            nursery.cancel_scope.cancel()
        if self.stopping.is_set():
            return
        log.error("the connection to the kernel is gone: ctxd starts anew")
        await self.reexecution.begin_anew()

    async def come_up(self) -> None:
        """The first daemon of a process: agents are as a crash, or an end, has left them."""
        await self.runtime.links.clear()
        await _wait_answering(self.runtime, self.given.places.mount)
        await self._recover(await self.declaring.started_at_boot())
        await self._declare(booting=True)
        self._settle()

    async def take_over(self, before: dict[str, Any]) -> None:
        """Goes on with what the daemon before has left; callers wait meanwhile."""
        self.sockets.beginning.hold()
        self.reexecution.restore(before)
        crashpoints.reach("reexec.restored")
        # a socket that is bound anew is a request
        self.runtime.binder.asking = self.operations.scheduler.reading.let_go
        await self._recover()
        self._settle()
        self.reexecution.let_go()
        log.info("taken over: callers have waited %.2f s", time.monotonic() - before["since"])
        base = self.base
        self.nursery.start_soon(
            base.cache.distrust, lambda inode: not base.folders.owns(inode)
        )
        # who was stopped meanwhile is not started: this is no boot
        await self._declare(booting=False)

    async def _recover(self, declared: Collection[str] = ()) -> None:
        """Callers do not wait for the last agent longer than a while."""
        patience = trio.CancelScope()
        self.nursery.start_soon(self._let_go_late, patience)
        await self.sockets.open_daemon()
        self.operations.beginning = False
        await self.runtime.supervisor.recover(declared)
        self.runtime.guests.go_on()
        self.taken_over.set()
        patience.cancel()

    async def _let_go_late(self, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(_HELD_SECONDS)
            self.reexecution.let_go()

    def _settle(self) -> None:
        """All that there was at the start is known."""
        Collecting().begin()
        self.runtime.loop.reset()
        if self.runtime.state == "starting":
            self.runtime.state = "ready"

    def be_ready(self) -> None:
        self.nursery.start_soon(self.declaring.run)
        self.given.daemon_log.say("ready")
        self.service.ready()
        self.reexecution.ready()

    async def end(self) -> None:
        """Ends every agent, then what answers."""
        await self.declaring.closed()
        await self.runtime.supervisor.shut_down()
        self.base.cache.mounted = False
        pyfuse3.terminate()
        self.nursery.cancel_scope.cancel()

    # signals

    async def _handle_signals(self) -> None:
        for each in SIGNALS:  # one that comes after these does not cut the end short
            signal.signal(each, lambda number, _: self.given.early.append(number))
        with trio.open_signal_receiver(*SIGNALS) as received:
            for before in self.given.early:
                self._handle(before)
            async for number in received:
                self._handle(number)

    def _handle(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP:
            self.service.reloading()
            self.service.complain(self._reload())
            self.nursery.start_soon(self._read_declared)
        elif number == signal.SIGUSR1:
            self.reexecution.begin()
        elif number == signal.SIGALRM:
            pass  # it has ended a wait, if it is a timer's (linux.hurried)
        elif number in _REFUSED:
            log.warning("%s is refused: ctxd ignores it", name)
        elif self.runtime.state != "stopping":
            self.runtime.state = "stopping"
            log.info("%s: cancelling every agent", name)
            self.service.stopping()
            self.declaring.close()
            self.stopping.set()

    def _reload(self) -> str:
        """The mistakes in the settings, which are then those of before; empty if nothing is."""
        try:
            config = load_config(self.given.config_file, required=False)
            self.runtime.reconfigure(config)
            self.given.daemon_log.owner_rate = config.owner_log_lines
        except StartupError as error:
            complaint = f"{error}; the settings remain unchanged"
            log.error("%s", complaint)
            return complaint
        log.info("the settings were read again")
        return ""

    async def _read_declared(self) -> None:
        try:
            await self.taken_over.wait()
            with self.base.calls.one_more():
                await self._declare(booting=False)
        finally:
            self.service.reloaded()

    async def _declare(self, *, booting: bool) -> None:
        for mistake in unread(self.given.config_file):
            log.warning("%s", mistake)
        await self.declaring.read(booting=booting)

    async def _complaints(self) -> list[str]:
        """Sentences on what was not read, or is wrong, beside the settings."""
        await self.declaring.known.wait()
        return [*map(str, unread(self.given.config_file)), *self.declaring.complaints]


def _declared_in(config_file: Path) -> Path:
    """The directory of the files that declare agents."""
    return config_file.parent / "agents.d"


def _check_config(config_file: Path, *, required: bool) -> int:
    """Prints everything that is wrong with the settings and the declared agents, and doubts."""
    _, mistakes, doubts = read_config(config_file, required=required)
    declared = read_directory(_declared_in(config_file), trusted={0, os.geteuid()})
    mistakes += [*unread(config_file), *declared.mistakes]
    for line in (*(f"warning: {doubt}" for doubt in doubts), *mistakes):
        print(line, file=sys.stderr)
    return 1 if mistakes else 0


def check(config_file: Path, state: Path, *, required: bool) -> int:
    """Reads what a daemon would read, and changes nothing; ``StartupError``.

    Says what it takes over from another one.
    """
    load_config(config_file, required=required)
    check_state(state / "ctxfs.db")
    program()
    tools.check_schemas()
    return _tell(f"ctxd {VERSION}\n{checked()}")


def _tell(text: str) -> int:
    """Prints what was asked for; 1 if nobody takes it."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python tries again at its end
        if not isinstance(error, BrokenPipeError):
            print(f"ctxd: standard output: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    privilege = Privilege.of_this_process()
    defaults = Defaults.of(privilege, os.environ)
    arguments = parse_arguments(argv, defaults)
    if arguments.print_schema:
        return _tell(json.dumps(schema(), indent=2))
    # without standard error the next file that is opened would get its number
    fd = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()
    daemon_log = DaemonLog(
        fd, owner_rate=Config().owner_log_lines, journal=Journal.behind(fd, os.environ)
    )
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[daemon_log])
    try:
        if arguments.check_config:
            config_file = arguments.config or defaults.config
            return _check_config(config_file, required=arguments.config is not None)
        return _run(arguments, defaults, privilege, daemon_log)
    finally:
        daemon_log.close()


def _resolved(path: Path) -> Path:
    """Not through a link of another user at its end, which is refused later."""
    at = path.parent.resolve() / path.name
    with suppress(FileNotFoundError):
        if at.lstat().st_uid in (0, os.geteuid()):
            return at.resolve()
    return at


def _run(
    arguments: argparse.Namespace, defaults: Defaults, privilege: Privilege, daemon_log: DaemonLog
) -> int:
    # paths into trees are compared as text
    runtime = _resolved(arguments.runtime)
    places = Places(mount=arguments.mount, state=arguments.state, runtime=runtime)
    config_file = arguments.config or defaults.config
    failure: BaseException | None = None
    early: list[int] = []
    try:
        for name in ("mount", "state", "runtime"):
            if not getattr(places, name).is_absolute():
                raise StartupError(f"--{name}: {getattr(places, name)} is not an absolute path")
        crashpoints.arm()
        if arguments.check:
            return check(config_file, places.state, required=arguments.config is not None)
        before = handover.inherited()
        # those that are to end a daemon may do so before it has begun; if it was executed again,
        # all wait since before that
        again = signal.SIGTERM in signal.pthread_sigmask(signal.SIG_UNBLOCK, ())
        for number in SIGNALS if again else SIGNALS - _ENDING:
            signal.signal(number, lambda number, _: early.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if before is not None:
            crashpoints.reach("reexec.executed")
        config = load_config(config_file, required=arguments.config is not None)
        daemon_log.owner_rate = config.owner_log_lines
        check_device()
        check_user(privilege)
        if before is None:
            _check_places(places, privilege)
        _raise_file_limit()
        _take_precedence()
        # where it was, if systemd ends it because the loop does not turn (SIGABRT)
        faulthandler.enable(file=sys.stderr, all_threads=True)
        os.umask(0o022)
        given = Given(
            config=config,
            config_file=config_file,
            places=places,
            cgroup=arguments.cgroup,
            privilege=privilege,
            daemon_log=daemon_log,
            before=before,
            early=early,
        )
        try:
            trio.run(serve, given)
        finally:
            for number in SIGNALS:  # the interpreter would end by them while it ends
                signal.signal(number, signal.SIG_IGN)
    except* StartupError as errors:
        failure = _first(errors)
    if failure is not None:
        daemon_log.say(f"ctxd: {failure}", logging.ERROR)
        return 1
    return 0


def _check_places(places: Places, privilege: Privilege) -> None:
    try:
        check_own(places, privilege)
        check_point(places, privilege)
        clear_stale(places.fuse, privilege)
    except OSError as error:  # somebody changes them meanwhile
        raise StartupError(f"{error.filename}: {error.strerror}") from None


async def _wait_answering(runtime: Runtime, mount: Path) -> None:
    try:
        await runtime.binder.wait_answering(mount)
    except OSError as error:  # whoever may write there put something else in its place
        raise StartupError(f"{mount}: the filesystem is not there ({error.strerror})") from None


def _first(errors: BaseExceptionGroup[StartupError]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
