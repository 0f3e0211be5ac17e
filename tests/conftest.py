"""Fixtures, and the check that a run leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from runtime.kernel import linux
from runtime.records.spaces import Spaces
from tests.worlds.daemon import MARK, REMOVALS, Daemon, begun, running, sampled
from tests.worlds.membership import WATCH
from tests.worlds.preloaded import PRELOADED
from tests.worlds.records import World, store_in, world_in
from tests.worlds.seclusion import SecludedDaemon, own_mounts
from tests.worlds.tree import Mounted
from tests.worlds.whose import HIERARCHY, ROOTLESS, keep_capabilities

# A machine that does other things is no fault of what is tested, and each run tries the same:
# make fuzz tries others.
settings.register_profile("ctxfs", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ctxfs")

# A shell ignores it for what it runs in the background, and so would the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)

_kill = os.kill


def _kill_one(pid: int, number: int) -> None:
    """A process that is not known yet has the PID 0, which to kill(2) is the group of the run."""
    if pid <= 0:
        raise ValueError(f"{pid} is not the PID of one process")
    _kill(pid, number)


os.kill = _kill_one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The mount and system layers need root; without it they are skipped, aloud."""
    for item in items:
        # whose bystanders note how long they wait
        if "guard" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.alone)
        layer = item.path.relative_to(Path(__file__).parent).parts[0]
        if layer == "nodes":  # make test-nodes
            item.add_marker(pytest.mark.long)
            layer = "system"
        if layer not in ("mount", "system"):
            if item.get_closest_marker("alone"):
                raise pytest.UsageError(f"{item.nodeid} is marked alone: make test looks for such "
                                        "tests in tests/mount and tests/system only")
            continue
        item.add_marker(getattr(pytest.mark, layer))
        reason = ""
        if ROOTLESS:
            if (mark := item.get_closest_marker("needs_root")) is not None:
                reason = f"needs root: {mark.args[0]}"
        elif os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
            reason = "needs root and /dev/fuse: run the tests as root"
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


#: what the processes said that ran the tests for this one
_said: set[str] = set()


def _untold() -> str:
    """What the kernel could not tell of who was in daemons' cgroups."""
    if WATCH.why_not:
        return f"cgroups of daemons were sampled, not watched: {WATCH.why_not}"
    if not WATCH.lost:
        return ""
    return (f"events of processes were lost {WATCH.lost} times: the machine was too fast; cgroups "
            f"of daemons were sampled in {', '.join(sorted(sampled)) or 'no test'}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["untold"] = _untold()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _said.add(getattr(node, "workeroutput", {}).get("untold", ""))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """It is said aloud."""
    for line in sorted({_untold(), *_said} - {""}):
        terminalreporter.write_line(line)


def pytest_unconfigure() -> None:
    PRELOADED.stop()
    WATCH.stop()


@pytest.fixture(autouse=True)
def own_cgroups() -> Iterator[None]:
    """Fails the test in which anything else was where only a daemon and its house are."""
    yield
    for each in list(begun):
        each.check_own_cgroup()


# the worlds (tests/README.md)


def _settings(node: pytest.Item | pytest.Collector) -> dict[str, Any]:
    """What the nearest mark says, of the test, or of the module for what its tests share."""
    mark = node.get_closest_marker("settings")
    return dict(mark.kwargs) if mark is not None else {}


def _daemon(node: pytest.Item | pytest.Collector, cls: type[Daemon] = Daemon) -> Daemon:
    lines = (f"{name}: {value}\n" for name, value in _settings(node).items())
    return cls(config="".join(lines))


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """Records: agents over a store, without processes or a mount."""
    with world_in(tmp_path, **_settings(request.node)) as made:
        yield made


@pytest.fixture
def spaces(tmp_path: Path) -> Iterator[Spaces]:
    """The durable trees of a store that has nothing else."""
    with closing(store_in(tmp_path)) as store:
        yield Spaces(store)


@pytest.fixture
def mounted(world: World) -> Iterator[Mounted]:
    """The tree: the filesystem's operations over such records, without a kernel."""
    made = Mounted(world)
    yield made
    made.unmount()


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon that runs, with everything of its own."""
    with running(_daemon(request.node)) as made:
        yield made


@pytest.fixture
def secluded_daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """One whose mounts, and those that the test makes, nothing else on the machine sees."""
    with own_mounts(), running(_daemon(request.node, SecludedDaemon)) as made:
        yield made


@pytest.fixture(scope="module")
def shared_daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """One for the tests of a module that need none of their own: each names its own agents."""
    with running(_daemon(request.node)) as made:
        yield made


def _processes() -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"/tmp/{MARK}-" in command:
            found[int(entry.name)] = command
    return found


def _leftovers() -> list[str]:
    found = [f"process {pid}: {command}" for pid, command in _processes().items()]
    found += [f"mount {m.point}" for m in linux.read_mounts() if f"/{MARK}-" in m.point]
    if HIERARCHY is not None:
        found += [f"cgroup {p}" for p in HIERARCHY.glob(f"{MARK}-*")]
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails the run if a process, mount or cgroup of a test is left."""
    if ROOTLESS:
        keep_capabilities()
    before = set(_leftovers())
    yield
    REMOVALS.wait()
    left = sorted(set(_leftovers()) - before)
    assert not left, "left behind:\n" + "\n".join(left)
