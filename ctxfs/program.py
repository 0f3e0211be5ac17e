"""The client as one file: what `bin/ctx` is, and every handle of an agent or a tool.

The file is a Python program of its own, since a sandbox has no more of ctxfs than that: the source
of ``client.unpack``, then every module of the package ``client``, as source and as byte code.
It is one file that is read once, rather than a zip archive, because a module that is imported
later would not be found any more when the daemon died or was replaced meanwhile.

The first line opens the file and exits with 69 if it cannot, since then the daemon has died after
exec(2). Python itself would exit with 2, which tells a caller that the input is wrong.
"""

from __future__ import annotations

import binascii
import marshal
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Final

import client
from client.exits import NOT_RUNNING

#: Python, with the escapes of env(1); the kernel reads 255 bytes of the line that it is in
_OPEN: Final = r"\n".join((
    "import sys",
    "try:c=open(sys.argv[1],'rb').read()",
    f"except OSError as e:print('ctx:',e,file=sys.stderr);sys.exit({NOT_RUNNING})",
    "del sys.argv[0];exec(c)",
))
_HEAD: Final = f"""\
#!/usr/bin/env -S python3 -ISc "{_OPEN}"
# The ctx command, see ctx(1): made by ctxd of the modules that follow.
"""
#: as in client/start.py, which a file of one module does not begin with
_FIRST: Final = """
import _signal

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

MODULES = {}
"""
_TAIL: Final = """
if __name__ == "__main__":
    install({magic!r}, MODULES, {home!r})
    from client.main import program

    program()
"""


def pack(modules: dict[str, str], unpack: str, home: str = "") -> bytes:
    """The program of some modules, given as sources by name, and of the module that finds them.

    ``home`` is the directory that they come from.
    """
    parts = [_HEAD, unpack, _FIRST]
    for name, source in modules.items():
        if "'''" in source:
            raise ValueError(f"{name} has three single quotes, which would end it here")
        code = compile(source, f"{name}.py", "exec", dont_inherit=True, optimize=1)
        text = binascii.b2a_base64(marshal.dumps(code), newline=False)
        parts.append(f"\nMODULES[{name!r}] = r'''{source}''', {text!r}\n")
    parts.append(_TAIL.format(magic=MAGIC_NUMBER, home=home))
    return "".join(parts).encode()


@cache
def program() -> bytes:
    """The client as it is installed here."""
    home = Path(client.__file__).resolve().parent
    sources = sorted(home.glob("*.py"))
    modules = {
        f"client.{path.stem}".removesuffix(".__init__"): path.read_text("utf-8") for path in sources
    }
    return pack(modules, unpack=modules.pop("client.unpack"), home=str(home))
