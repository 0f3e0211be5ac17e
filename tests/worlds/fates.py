"""A daemon that is to die, its operator, and who looks at what comes of it."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from runtime.kernel import linux
from tests.worlds.daemon import TIMEOUT, Daemon, wait_status, wait_until
from tests.worlds.invariants import Crashed, Invariants, Operator
from tests.worlds.nodes import CTX, node, through

CRASH_AT: Final = "CTXD_CRASH_AT"
SLEEP: Final = "sleep 1000"
#: of the network `api`
PORT: Final = 8081
T = TypeVar("T")


class Scene:
    """A daemon that is to die, its operator, and who looks at what comes of it."""

    def __init__(self, crash_at: str = "") -> None:
        self.daemon = Daemon(config="restart_max: 3\ngrace: 200ms\n")
        with open(self.daemon.base / "config.yaml", "a") as config:
            socket = self.daemon.base / "api.sock"
            config.write(f"networks: {{api: {{socket: {socket}, port: {PORT}}}}}\n")
            # where the one is that a stage has beside this one
            where = f"{self.daemon.base}/other"
            command = through([str(CTX)], f'exec "$1" --root "$(cat {where})" peer')
            config.write(f"nodes: {json.dumps({'other': node(command, lease='1m')})}\n")
        self.operator = Operator(self.daemon)
        self.invariants = Invariants(self.daemon)
        #: what a stage has beside it
        self.beside = ExitStack()
        #: what a stage wants to hold in the end, however far it got
        self.after: list[Callable[[], None]] = []
        self.crash_at = crash_at
        #: of the daemon, at or near the place
        self.deaths = 1
        self.arm(crash_at)

    def arm(self, crash_at: str) -> None:
        """For the next start."""
        if crash_at:
            self.daemon.env[CRASH_AT] = crash_at
        else:
            self.daemon.env.pop(CRASH_AT, None)

    def new(self, name: str, command: str, **files: str) -> Path:
        directory = self.operator.make(name)
        for file, text in {**files, "exec": command}.items():
            self.operator.write(name, file.replace("meta_json", "meta.json"), text)
        return directory

    def run(self, name: str, command: str, **files: str) -> Path:
        directory = self.new(name, command, **files)
        self.operator.verb(name, "start")
        return directory

    def wait(self, name: str, *statuses: str) -> str:
        """The status, once it is one of these; ``Crashed`` if the daemon dies before."""
        return self.do(lambda: wait_status(self.daemon.agent_dir(name), *statuses))

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        def happened() -> bool:
            if self.do(condition):
                return True
            if self.daemon.has_ended(0):  # what is on the disk does not say so
                raise Crashed
            return False

        wait_until(happened, what)

    def do(self, operation: Callable[[], T]) -> T:
        """What the operator need not know; ``Crashed`` if the daemon dies meanwhile."""
        try:
            return operation()
        except OSError as error:
            if self.daemon.has_ended(TIMEOUT):
                raise Crashed from error
            raise

    def hold(self, *names: str) -> None:
        for name in names:
            self.do(lambda n=name: self.invariants.hold(n))  # type: ignore[misc]

    def promise(self, name: str, outcome: str, reason: str) -> None:
        """How the agent will have ended, whenever it has."""
        self.operator.entries[name].end = (outcome, reason)


@contextmanager
def scene_of(crash_at: str = "") -> Iterator[Scene]:
    scene = Scene(crash_at)
    try:
        yield scene
    except BaseException:
        # it may be about to die: a new one takes everything away
        if scene.daemon.process is not None:
            scene.daemon.kill()
        raise
    finally:
        scene.invariants.close()
        scene.arm("")
        with scene.beside:
            scene.daemon.close()


def inside(*lines: str) -> str:
    return "sh -c " + shlex.quote("cd $CTX_ROOT/agent || exit 9; " + "; ".join(lines))


def child(name: str, command: str, **files: str) -> list[str]:
    """Lines of a parent's program that make and start a child, and say so."""
    lines = [f"mkdir {name}.d && echo made {name}"]
    for file, text in {**files, "exec": command}.items():
        lines.append(f"printf '%s\\n' {shlex.quote(text)} > {name}.d/{file}")
    return [*lines, f"echo start > {name}.d/ctl"]


def reboot(scene: Scene) -> None:
    scene.invariants.close()
    lose_machine(scene.daemon)


def lose_machine(daemon: Daemon) -> None:
    """What a reboot leaves of a dead daemon's things: the state, under another boot id."""
    daemon.cgroup.kill()
    wait_until(lambda: not daemon.cgroup.populated(), "the cgroups are empty")
    daemon.cgroup.remove()
    for path in (
        *(daemon.root, daemon.runtime / "root" / "ctx", daemon.runtime / "root"),
        daemon.runtime / "tree",
    ):
        while linux.mount_at(path) is not None:
            linux.unmount(path, linux.MNT_DETACH)
    shutil.rmtree(daemon.runtime)
    database = sqlite3.connect(daemon.state / "ctxfs.db")
    earlier = "an earlier one"
    # as an older version has it, and as this one
    database.execute(
        "UPDATE agents SET data=json_set(data, '$.boot', ?, '$.cell.boot', ?)", (earlier, earlier)
    )
    database.commit()
    database.close()
