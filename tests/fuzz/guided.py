"""One target below atheris, in a process of its own: libFuzzer's arguments follow its name."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["client", "ctxfs", "runtime"]):
    from tests.fuzz.targets import run


def main() -> None:
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, lambda data: run(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
