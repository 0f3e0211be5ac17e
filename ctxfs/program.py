"""The client as one file: what `bin/ctx` is, and every handle of an agent or a tool.

The file is a Python program of its own, since a sandbox has no more of ctxfs than that: the source
of ``client.unpack``, then every module of the package ``client``, as byte code and as source.
It is one file that is read once, rather than a zip archive, because a module that is imported
later would not be found any more when the daemon died or was replaced meanwhile. The modules are
comments, since Python would need longer to parse them all than to run the few that are used.

The first line opens the file and exits with 69 if it cannot, since then the daemon has died after
exec(2). Python itself would exit with 2, which tells a caller that the input is wrong. It executes
what is before the modules, which finds the whole file in ``c``.
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
    r"del sys.argv[0];exec(c.split(b'\\n#client',1)[0])",
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

if __name__ == "__main__":
    if "c" not in globals():  # not by the first line
        c = open(sys.argv[0], "rb").read()
    install({magic!r}, c, {home!r})
    from client.main import program

    program()
"""


def pack(modules: dict[str, str], unpack: str, home: str = "") -> bytes:
    """The program of some modules, given as sources by name, and of the module that finds them.

    ``home`` is the directory that they come from.
    """
    parts = [_HEAD, unpack, _FIRST.format(magic=MAGIC_NUMBER, home=home)]
    for name, source in modules.items():
        source += "\n"  # or there would be no word for an empty one
        code = marshal.dumps(compile(source, f"{name}.py", "exec", dont_inherit=True, optimize=1))
        words = [binascii.b2a_base64(data, newline=False) for data in (code, source.encode())]
        parts.append(f"#{name} {b' '.join(words).decode()}\n")
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
