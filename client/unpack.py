"""The modules of this package out of the one file that ctxfs makes of it (ctxfs/program.py).

The file begins with this source. Each module is in it twice: as byte code for the Python that made
the file, so that nothing has to be compiled, and as source for every other Python.
"""

from __future__ import annotations

# what importlib.util has of them, without the modules that this would load
import _frozen_importlib
import _frozen_importlib_external
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Packed:
    """Finds and loads modules: by name, the source, and the byte code as base64."""

    def __init__(self, magic: bytes, modules: dict[str, tuple[str, bytes]]) -> None:
        self.usable = magic == _frozen_importlib_external.MAGIC_NUMBER
        self.modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        # a Loader in all but name, which importlib.abc has
        return _frozen_importlib.ModuleSpec(name, self, is_package="." not in name)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        source, code = self.modules[module.__name__]
        if self.usable:
            import binascii
            import marshal

            exec(marshal.loads(binascii.a2b_base64(code)), module.__dict__)
        else:
            text = compile(source, f"{module.__name__}.py", "exec", dont_inherit=True)
            exec(text, module.__dict__)


def install(magic: bytes, modules: dict[str, tuple[str, bytes]]) -> None:
    """Have these modules imported from here, whatever else is of their name."""
    sys.meta_path.insert(0, Packed(magic, modules))
