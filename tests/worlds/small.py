"""A daemon whose state is on a small disk of its own, and a file that fills it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from runtime.kernel import linux
from tests.worlds.daemon import REMOVALS, Daemon


def fill(daemon: Daemon) -> None:
    """Takes all that is free."""
    with suppress(OSError), open(daemon.state / "ballast", "ab", buffering=0) as ballast:
        while ballast.write(b"\0" * 4096):
            pass


def empty(daemon: Daemon) -> None:
    (daemon.state / "ballast").unlink()


@contextmanager
def on_small_disk(daemon: Daemon, size: str = "2m") -> Iterator[Daemon]:
    """Runs it; nothing of it may have failed in a way that nobody foresaw."""
    daemon.state.mkdir()
    linux.mount("none", daemon.state, "tmpfs", 0, f"size={size}")
    try:
        daemon.start()
        try:
            yield daemon
        finally:
            (daemon.state / "ballast").unlink(missing_ok=True)
            status = daemon.stop() if daemon.process else 0
        assert status == 0 and "Traceback" not in daemon.log.read_text()
    finally:
        linux.unmount(daemon.state, linux.MNT_DETACH)
        REMOVALS.begin(daemon.base)
