"""Loads the modules of this package from the one file that ctxfs makes (ctxfs/program.py).

The file begins with this source. It contains each module twice: as byte code for the Python
version that made the file, which saves compiling, and as source for every other version.
"""

from __future__ import annotations

# importlib.util has these too, but its import would load more modules
import _frozen_importlib
import _frozen_importlib_external
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Packed:
    """Finds and loads modules; `modules` has source and base64 byte code by name."""

    def __init__(self, magic: bytes, modules: dict[str, tuple[str, bytes]], home: str) -> None:
        self.usable = magic == _frozen_importlib_external.MAGIC_NUMBER
        self.modules = modules
        self.home = home

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        # a Loader by its methods; the class is in importlib.abc, which is slow to import
        return _frozen_importlib.ModuleSpec(name, self, is_package="." not in name)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # the default module

    def exec_module(self, module: ModuleType) -> None:
        source, code = self.modules[module.__name__]
        module.__file__ = f"{self.home}/{module.__name__.rpartition('.')[2]}.py"
        if self.usable:
            import binascii
            import marshal

            exec(marshal.loads(binascii.a2b_base64(code)), module.__dict__)
        else:
            text = compile(source, f"{module.__name__}.py", "exec", dont_inherit=True)
            exec(text, module.__dict__)


def install(magic: bytes, modules: dict[str, tuple[str, bytes]], home: str) -> None:
    """Import these modules from here, before any others of the same names.

    `home` is where their files are on the machine that made the file.
    """
    sys.meta_path.insert(0, Packed(magic, modules, home))
