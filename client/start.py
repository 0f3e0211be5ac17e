"""Where the installed command `ctx` begins.

Until everything is loaded, Ctrl-C ends the process, as it does with programs that are not written
in Python: nothing could handle an exception yet.
"""

from __future__ import annotations

import _signal


def main() -> None:
    """Run the command line of this process."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # it is not ignored
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    from client.main import program

    program()
