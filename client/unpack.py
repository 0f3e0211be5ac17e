"""Loads the modules of this package from the one file that ctxfs makes (ctxfs/program.py).

The file begins with this source. Its end has a comment for each module: the name, byte code for
the Python version that made the file, which saves compiling, and source for every other version.
"""

from __future__ import annotations

# importlib.util has these too, but its import would load more modules
import _frozen_importlib
import _frozen_importlib_external
import binascii
import marshal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Packed:
    """Finds and loads the modules of a file, whose byte code and source are base64."""

    def __init__(self, magic: bytes, file: bytes, home: str) -> None:
        self.usable = magic == _frozen_importlib_external.MAGIC_NUMBER
        self.file = file
        self.home = home
        #: where their lines begin, which are split when they are needed
        self.places: dict[str, int] = {}
        at = file.find(b"\n#client")
        while at >= 0:
            self.places[file[at + 2 : file.index(b" ", at)].decode()] = at
            at = file.find(b"\n#client", at + 1)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.places:
            return None
        # a Loader by its methods; the class is in importlib.abc, which is slow to import
        return _frozen_importlib.ModuleSpec(name, self, is_package="." not in name)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # the default module

    def exec_module(self, module: ModuleType) -> None:
        at = self.places[module.__name__]
        _, code, source = self.file[at : self.file.index(b"\n", at + 1)].split(b" ")
        module.__file__ = f"{self.home}/{module.__name__.rpartition('.')[2]}.py"
        if self.usable:
            text = marshal.loads(binascii.a2b_base64(code))
        else:
            read = binascii.a2b_base64(source)
            text = compile(read, f"{module.__name__}.py", "exec", dont_inherit=True)
        exec(text, module.__dict__)


def install(magic: bytes, file: bytes, home: str) -> None:
    """Import the modules of this file, before any others of the same names.

    `home` is where they were on the machine that made the file.
    """
    sys.meta_path.insert(0, Packed(magic, file, home))
