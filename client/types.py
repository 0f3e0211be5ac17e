"""Names of types for annotations. `typing` and `collections.abc` are slow to import."""

from __future__ import annotations

from _collections_abc import Callable as Callable
from _collections_abc import Iterable as Iterable
from _collections_abc import Iterator as Iterator
from _collections_abc import Sequence as Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any as Any
    from typing import NoReturn as NoReturn
    from typing import TypeGuard as TypeGuard
    from typing import TypeVar

    Item = TypeVar("Item")
    Result = TypeVar("Result")
else:
    Any = NoReturn = TypeGuard = Item = Result = object
