"""The daemon executes itself again: same process, same mount, another program (ctxd(8)).

First the program is run with ``--check``, by a process beside: if it fails, nothing happens.
Then no request is read any more, and those at hand are answered. What the daemon knows and no
disk has is saved by a table of parts. The program that is executed restores it by the same table,
takes over the agents as after a crash, and reads on. Callers wait in the kernel meanwhile.

What is acknowledged is committed before. So a daemon that dies in between is one that crashed.

The moment is when the binder is idle, no request is read, none is at hand, no call of a tool
changes anything, no thread tells the kernel anything, and the launcher is idle. Then everything is
saved and the program executed in one step of the loop. A thread that has the kernel drop pages may
wait for a read that nobody reads any more: so after a while, reading goes on for a moment before
the next attempt.

- Operations that stay (``wait``, ``resume``, ``send``, blocking calls) are begun again with the
  ``progress`` that their handlers note before they say something. A frame counts as said once it
  is among what is ``unsent``, which passes too.
- Signals are blocked until the next program can handle them.
- Reading begins when agents are taken over, so that nobody meets an agent that is not; or before,
  if a socket has to be bound.
- The kernel is told to forget attributes and pages of computed inodes: another program may show
  other things. Names stay, as numbers do.
- Clients wait on FIFOs, which the kernel implements, with poll(2), and on sockets; so nothing of
  theirs is lost.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import trio

from ctxfs.files.folders import ROWS
from ctxfs.handshake import Handshake
from ctxfs.mount import MountGuard
from ctxfs.operations import Operations
from ctxfs.tree.base import Base
from ctxfs.tree.folders import saved_before
from runtime import crashpoints
from runtime.errors import AgainError, CtxError, NoSpaceError, UnsupportedError, WrongStateError
from runtime.kernel import handover
from runtime.kernel.handover import Descriptors, Part
from runtime.kernel.linux import descriptors
from runtime.sockets.server import Sockets

log = logging.getLogger("ctxd.reexec")

#: all that the daemon handles; they wait from before the program is executed until it can
SIGNALS: Final = frozenset(
    {
        *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM),
    }
)
#: an argument of ctxd
CHECK: Final = "--check"
_CHECK_SECONDS: Final = 60.0
_KILL_SECONDS: Final = 1.0
#: for so long requests at hand may hold up all others; then others are read for a moment
_HOLD_SECONDS: Final = 1.0
_LET_GO_SECONDS: Final = 0.05
#: the kernel needs no longer to drop pages that nobody reads just then, on a machine with time;
#: at each attempt it gets twice as long
_PAGES_SECONDS: Final = 0.1
#: after which it is given up
_PATIENCE_SECONDS: Final = 25.0
_COMPLAINT_MAX: Final = 800
#: free ones: a program that lacks them while it starts cannot go back
_DESCRIPTORS_MIN: Final = 64
#: of the environment: not for a program that is only checked
_NOT_CHECKED: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "CTXD_CRASH_AT")


class _Outcome:
    """The outcome of one attempt, for all who asked for it meanwhile."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.error: CtxError = UnsupportedError("ctxd was not executed again, see its log")


@dataclass(eq=False)
class Reexecution:
    """One at a time; whoever asks meanwhile gets what comes of it."""

    base: Base
    operations: Operations
    guard: MountGuard
    nursery: trio.Nursery
    _outcome: _Outcome | None = None
    #: whether it is to be executed once it is ready
    _wanted: bool = False
    #: since when callers wait
    _since: float = 0.0

    def __post_init__(self) -> None:
        self.runtime = self.base.runtime

    def passes(self, handshake: Handshake, sockets: Sockets) -> None:
        """Says what passes, once all of it is there."""
        base, opened, self._sockets = self.base, self.operations.opened, sockets
        windows = self.runtime.supervisor.windows
        #: in the order in which they are restored
        self._parts = (
            Part(name="runtime", save=self.runtime.save, restore=self.runtime.restore),
            Part(name="base", save=base.save, restore=base.restore),
            Part(name="cache", save=base.cache.save, restore=base.cache.restore),
            Part(name="reasons", save=base.reasons.save, restore=base.reasons.restore),
            Part(name="folders", save=base.folders.save,
                restore=lambda saved: base.folders.restore(saved, ROWS)),
            Part(name="windows", save=windows.save, restore=windows.take_over),
            Part(name="viewers", save=windows.save_viewers, restore=windows.take_over_viewers),
            Part(name="open", save=opened.save, restore=opened.restore),
            Part(name="links", save=self.runtime.links.save,
                restore=self.runtime.links.take_over),
            Part(name="hosting", save=lambda _: self.runtime.hosting.note(),
                restore=lambda saved: None),  # what it notes is of connections of sockets
            Part(name="sockets", save=sockets.save, restore=sockets.take_over),
            # before all others: the mount
            Part(name="kernel", save=handshake.save, restore=lambda saved: None),
            Part(name="since", save=lambda _: self._since, restore=lambda saved: None),
        )  # fmt: skip

    def restore(self, values: dict[str, Any]) -> None:
        if "folders" not in values:
            values["folders"] = saved_before(values["durable"])
        for fd in values.get("waits", ()):  # of version 0.2, which opened FIFOs itself
            os.close(fd)
        for part in self._parts:
            if part.name in values:  # not all are in that of an earlier version
                part.restore(values[part.name])

    def _seal(self) -> int:
        descriptors = Descriptors()
        values = {part.name: part.save(descriptors) for part in self._parts}
        return handover.seal(values, descriptors)

    def begin(self) -> None:
        """For who does not wait: the log tells why, if it is not executed. A daemon that is not
        ready yet does so when it is: it may have been executed before the program was changed."""
        if self.runtime.state == "starting":
            self._wanted = True
        elif self._outcome is None:
            self._outcome = _Outcome()
            self.nursery.start_soon(self._try, self._outcome)

    def ready(self) -> None:
        """The daemon is."""
        if self._wanted:
            self._wanted = False
            self.begin()

    async def ask(self) -> None:
        """Returns by an error only: the daemon that is executed answers. ``CtxError``."""
        self.begin()
        outcome = self._outcome
        if outcome is None:
            raise WrongStateError("ctxd is starting: try again")
        await outcome.over.wait()
        raise type(outcome.error)(outcome.error.sentence)

    async def _try(self, outcome: _Outcome) -> None:
        try:
            self._check_state()
            await self._check_program()
            await self._replace()
        except CtxError as error:
            outcome.error = error
            log.error("ctxd is not executed again: %s", error.sentence)
        except Exception:
            log.exception("ctxd is not executed again")
        finally:
            self._outcome = None
            outcome.over.set()

    def _check_state(self) -> None:
        if self.runtime.state != "ready":
            raise WrongStateError(f"ctxd is {self.runtime.state}")
        if self.runtime.agents.journal.is_late:
            raise NoSpaceError("the disk under the daemon's state is full: changes wait for room")
        held, most = descriptors()
        if most - held < _DESCRIPTORS_MIN:
            raise AgainError(
                f"ctxd holds {held} of {most} descriptors, and its program needs "
                f"{_DESCRIPTORS_MIN} to start: close open files (ctx quota says whose they are)"
            )

    # the program

    async def _check_program(self) -> None:
        """``UnsupportedError`` with what it says, if it does not do."""
        runtime = self.runtime
        environment = {key: os.environ[key] for key in os.environ if key not in _NOT_CHECKED}
        said = os.memfd_create("said", os.MFD_CLOEXEC)
        try:
            try:
                process = await runtime.spawner.start(
                    runtime.hierarchy.helpers,
                    [*_command(), CHECK],
                    owner=os.getuid(),
                    env=environment,
                    fds=[None, said, said],
                )
            except OSError as error:
                raise UnsupportedError(f"cannot run {sys.executable}: {error.strerror}") from None
            # or agents that keep the machine busy would put it off
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0))
            status: int | None = None
            try:
                with trio.move_on_after(_CHECK_SECONDS):
                    status = await process.wait()
            finally:
                if status is None:  # or ctxd is stopping
                    process.kill()
                    process.wait_now(_KILL_SECONDS)
            if status is None:
                raise UnsupportedError(f"{CHECK} took longer than {_CHECK_SECONDS:g} s")
            lines = os.pread(said, os.fstat(said).st_size, 0).decode(errors="replace").split("\n")
        finally:
            os.close(said)
        if status != 0:
            raise UnsupportedError(f"{CHECK} fails: {_complaint(lines)}")
        if checked() not in lines:
            taken = " ".join(line for line in lines if line.startswith("handover"))
            raise UnsupportedError(
                f"the program takes another handover ({taken or 'none'}; this ctxd gives "
                f"{checked()}): restart ctxd instead"
            )

    # the moment

    async def _replace(self) -> None:
        """``AgainError`` if it does not become quiet, ``WrongStateError`` if ctxd is stopping."""
        runtime = self.runtime
        deadline = trio.current_time() + _PATIENCE_SECONDS
        # what is being bound is a request, which has to be read
        pages_seconds = _PAGES_SECONDS
        async with runtime.binder.held():
            while True:
                with trio.move_on_after(_HOLD_SECONDS):
                    await self.base.cache.idle()
                try:
                    self._hold()
                    with trio.move_on_after(_HOLD_SECONDS):
                        await self._quiet(pages_seconds)
                        # only now: a request at hand may need a helper
                        async with runtime.spawner.held():
                            await self._execute_if_quiet()
                finally:
                    self.let_go()
                if trio.current_time() > deadline:
                    waiting = "; ".join(self.operations.at_hand()[:3]) or "calls of tools"
                    raise AgainError(
                        f"requests are not answered within {_PATIENCE_SECONDS:g} s ({waiting}): "
                        "try again"
                    )
                await trio.sleep(_LET_GO_SECONDS)
                pages_seconds = min(2 * pages_seconds, _HOLD_SECONDS)

    def _hold(self) -> None:
        self._since = time.monotonic()
        self._sockets.beginning.hold()
        self.operations.scheduler.reading.hold()

    def let_go(self) -> None:
        self.operations.scheduler.reading.let_go()
        self._sockets.beginning.let_go()

    async def _quiet(self, pages_seconds: float) -> None:
        """Returns after so long if the kernel drops pages still: for which it may wait for a
        read that nobody reads now."""
        while not self._is_quiet():
            await self.operations.idle().wait()
            await self.base.calls.none()
            with trio.move_on_after(pages_seconds) as patience:
                await self.base.cache.idle()
            if patience.cancelled_caught:
                return

    def _is_quiet(self) -> bool:
        base = self.base
        return self.operations.is_idle and not base.calls and base.cache.is_idle

    async def _execute_if_quiet(self) -> None:
        await self._hold_signals()
        try:
            self._check_state()
            if self._is_quiet():
                self._execute(passing=True)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    async def begin_anew(self) -> None:
        """Executes the program with nothing of what this one knows, as after a crash."""
        await self._hold_signals()
        self._execute(passing=False)

    async def _hold_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for _ in range(3):  # of signals that came before, those who handle them know
            await trio.lowlevel.checkpoint()

    def _execute(self, *, passing: bool) -> None:
        """In one step of the loop: nothing changes any more."""
        # a thread for which they are not blocked takes them, and they are handled here
        late: list[int] = []
        before = {n: signal.signal(n, lambda number, _: late.append(number)) for n in SIGNALS}
        try:
            self._prepare_and_execute(late, passing)
        finally:
            for handled, handler in before.items():
                signal.signal(handled, handler)
            for number in late:
                os.kill(os.getpid(), number)

    def _prepare_and_execute(self, late: list[int], passing: bool) -> NoReturn:
        if passing:
            crashpoints.reach("reexec.held")
            os.environ[handover.VARIABLE] = str(self._seal())
            crashpoints.reach("reexec.saved")
        log.info("executing %s again", sys.executable)
        try:
            self.guard.end()
            self.runtime.binder.close()
            self.runtime.spawner.close()
            logging.shutdown()
            for number in late:  # they wait, as those that come now
                signal.pthread_kill(threading.get_ident(), number)
            os.execv(sys.executable, _command())
        except BaseException as error:
            # there is no way back
            os.write(2, f"ctxd: cannot execute {sys.executable}: {error}\n".encode())
            os._exit(1)


def _command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def checked() -> str:
    """The line by which a program that is checked says what it takes."""
    return f"handover {handover.FORMAT}"


def _complaint(lines: Sequence[str]) -> str:
    """The last words of a program, as one sentence; for an error in Python also where that is."""
    said = [line.strip() for line in lines if line.strip()]
    where = [line for line in said if line.startswith('File "')][-1:] if len(said) > 1 else []
    return " ".join((*where, *said[-1:]))[:_COMPLAINT_MAX] or "it says nothing"
