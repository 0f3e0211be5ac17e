"""How much of the daemon's memory each caller holds: one bound for all that it may pile up."""

from __future__ import annotations

from runtime.errors import QuotaError


class Budget:
    """Bytes that are written and not yet committed, answered or closed, by caller."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def charge(self, key: str, before: int, after: int, limit: int) -> None:
        """Changes what one open file or connection holds.

        ``QuotaError`` if the caller (``Caller.key``) would hold more than ``limit``.
        """
        total = self._bytes.get(key, 0) - before + after
        if after > before and total > limit:
            raise QuotaError(f"{limit} bytes are held for this caller already (staged_max)")
        if total:
            self._bytes[key] = total
        else:
            self._bytes.pop(key, None)
