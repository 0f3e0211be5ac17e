"""How the filesystems that serve as references are run: a process of its own for each."""

from __future__ import annotations

import signal
import sys

import pyfuse3
import trio


async def _until_told() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            print("ready", file=sys.stderr, flush=True)
            async for _ in received:
                pyfuse3.terminate()
                nursery.cancel_scope.cancel()
                return


def serve(operations: pyfuse3.Operations, point: str, name: str) -> None:
    """Mounts, says ``ready`` on standard error, and serves until SIGTERM or SIGINT."""
    options = set(pyfuse3.default_options) | {f"fsname={name}", f"subtype={name}"}
    pyfuse3.init(operations, point, options)
    try:
        trio.run(_until_told)
    finally:
        pyfuse3.close(unmount=True)
