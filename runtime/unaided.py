"""Imported before trio, so that the import of that starts no process.

To name its threads trio asks where their library is. The standard library answers by
running ldconfig, and a compiler and a linker where that does not know: in the daemon's
own cgroup, where nothing else is to be. The library has this one name.
"""

from __future__ import annotations

import ctypes.util


def _find_library(name: str) -> str:
    return f"lib{name}.so.0"


ctypes.util.find_library = _find_library
