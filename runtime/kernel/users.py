"""Users as passwd(5) has them. A look-up reads files, or asks a service, in the way of the loop:
so what was found is good for a second."""

from __future__ import annotations

import pwd
import time
from typing import Final

from runtime.kernel.recent import Recent

_SECONDS: Final = 1.0
#: users that are remembered
_MOST: Final = 1000

#: by name or uid: the entry, None if there is none, and until when it is good
_found: Final = Recent[str | int, tuple[pwd.struct_passwd | None, float]](_MOST)


def find_user(user: str | int) -> pwd.struct_passwd | None:
    """The entry of a name or a uid; None if there is none."""
    entry, until = _found.get(user) or (None, 0.0)
    now = time.monotonic()
    if now >= until:
        try:
            entry = pwd.getpwnam(user) if isinstance(user, str) else pwd.getpwuid(user)
        except KeyError:
            entry = None
        _found.put(user, (entry, now + _SECONDS))
    return entry
