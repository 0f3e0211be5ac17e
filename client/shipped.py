"""Where the files are that came with ctxfs, beside its Python modules."""

from __future__ import annotations

import os
import sys

from client.types import Iterator


def shipped(checkout: str, installed: str) -> Iterator[str]:
    """Yield the paths that a file or directory may have, the likeliest first.

    `checkout` is what it is called in a checkout, and `installed` below the directory `share` of
    where ctxfs is installed.
    """
    up = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    yield os.path.join(up, checkout)
    while up != os.path.dirname(up):  # from PREFIX/lib/.../site-packages
        up = os.path.dirname(up)
        yield os.path.join(up, "share", installed)
    for prefix in (sys.prefix, "/usr/local", "/usr"):
        yield os.path.join(prefix, "share", installed)


def find_shipped(checkout: str, installed: str, ends: tuple[str, ...] = ("",)) -> str:
    """Return the path without links of what came with ctxfs, whose name may have one of these
    ends; empty if it is not on this machine."""
    for path in shipped(checkout, installed):
        for end in ends:
            if os.path.exists(path + end):
                # the environment of contrib/install.py has a link to what is in its prefix
                return os.path.realpath(path + end)
    return ""
