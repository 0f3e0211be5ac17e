"""The program ``ctxfs-meter``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import trio

from runtime.errors import StartupError
from runtime.kernel.systemd import notify
from runtime.kernel.unixsockets import listen
from runtime.metering.passing import Meter
from runtime.metering.settings import Settings, load

log = logging.getLogger("ctxfs-meter")

_CONFIG: Final = "/etc/ctxfs/meter.yaml"
#: for requests in flight when it is to end
_ENDING_SECONDS: Final = 30.0
_BACKLOG: Final = 1024


class _Server:
    """The sockets of the networks, and what is read again with SIGHUP."""

    def __init__(self, file: Path, settings: Settings) -> None:
        self._file = file
        self._meter = Meter(settings)
        #: by its path
        self._listening: dict[str, trio.CancelScope] = {}

    async def run(self) -> None:
        """``StartupError`` if it cannot listen."""
        with trio.open_signal_receiver(signal.SIGHUP, signal.SIGTERM, signal.SIGINT) as signals:
            bound = self._bind(self._meter.settings)
            async with trio.open_nursery() as self._connections:
                self._use(self._meter.settings, bound)
                print("ready", file=sys.stderr, flush=True)
                notify("READY=1")
                async for number in signals:
                    if number != signal.SIGHUP:
                        break
                    try:
                        settings = load(self._file)
                        self._use(settings, self._bind(settings))
                    except StartupError as error:
                        log.error("%s; the settings of before hold", error)
                notify("STOPPING=1")
                for scope in self._listening.values():
                    scope.cancel()
                self._meter.end()
                self._connections.cancel_scope.deadline = trio.current_time() + _ENDING_SECONDS

    def _bind(self, settings: Settings) -> dict[str, socket.socket]:
        """Its sockets at which nobody listens yet; ``StartupError``: none of them."""
        bound = {}
        with contextlib.ExitStack() as made:
            for path in settings.networks.keys() - self._listening.keys():
                try:
                    bound[path] = made.enter_context(listen(Path(path), backlog=_BACKLOG))
                    os.chmod(path, 0o666)  # who may reach it is said by the directory
                except OSError as error:
                    raise StartupError(f"{path}: {error.strerror}") from None
            made.pop_all()
        return bound

    def _use(self, settings: Settings, bound: dict[str, socket.socket]) -> None:
        self._meter.settings = settings
        for path in self._listening.keys() - settings.networks.keys():
            self._listening.pop(path).cancel()
        for path, each in bound.items():
            scope = self._listening[path] = trio.CancelScope()
            self._connections.start_soon(self._accept, scope, path, each)

    async def _accept(self, scope: trio.CancelScope, path: str, bound: socket.socket) -> None:
        serve = partial(self._meter.serve, path)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        with scope:
            await trio.serve_listeners(serve, [listener], handler_nursery=self._connections)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ctxfs-meter", allow_abbrev=False,
        description="Count what agents use of models, and refuse what is above their limits.",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, default=Path(_CONFIG), metavar="FILE",
                        help=f"its networks and rates; default: {_CONFIG}")
    parser.add_argument("--check-config", action="store_true",
                        help="read the configuration, say what is wrong, and exit")
    parser.add_argument("--version", action="version", version=f"ctxfs-meter {version('ctxfs')}")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    try:
        settings = load(arguments.config)
        if not arguments.check_config:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for its children
            trio.run(_Server(arguments.config, settings).run)
    except StartupError as error:
        print(f"ctxfs-meter: {error}", file=sys.stderr)
        return 1
    return 0
