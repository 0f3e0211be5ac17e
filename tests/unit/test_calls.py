"""Each system call that ctxd makes has a row that says whose object it is (calls.txt).

ctxd makes none on an object that an agent can open, lock, fill or grow by another way: whoever
holds such an object can hold a page of the mount, too, and wait for ctxd while ctxd waits for him.
What is called is read from the source, by name; tests/system/test_hostile_calls.py looks at what a
daemon really does.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

HOUSE: Final = Path(__file__).parents[2]
TABLE: Final = Path(__file__).parent / "calls.txt"
_MODULES: Final = {"fcntl", "grp", "linux", "mmap", "os", "pwd", "resource", "select", "shutil",
                   "signal", "socket", "sqlite3", "subprocess", "tempfile"}  # fmt: skip
#: of pathlib
_OF_PATHS: Final = {
    "chmod", "exists", "glob", "is_dir", "is_fifo", "is_file", "is_mount", "is_socket",
    "is_symlink", "iterdir", "lchmod", "lstat", "mkdir", "open", "read_bytes", "read_text",
    "readlink", "rename", "resolve", "rglob", "rmdir", "samefile", "stat", "symlink_to", "touch",
    "unlink", "write_bytes", "write_text",
}  # fmt: skip
#: these look at nothing, or only at a descriptor's place in the table of its process
_HARMLESS: Final = {
    "os": {"WEXITSTATUS", "_exit", "close", "dup", "dup2", "fdopen", "fsdecode", "fsencode",
           "getegid", "geteuid", "getgroups", "getpid", "getsid", "getuid", "memfd_create",
           "pipe", "pipe2", "sched_param", "set_inheritable", "strerror", "sysconf", "umask",
           "urandom", "waitstatus_to_exitcode"},
    "signal": {"Signals", "pthread_sigmask", "signal"},
    "socket": {"CMSG_SPACE", "socketpair"},
    "linux": {"parse_inotify"},
}  # fmt: skip


def _called(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name("open"):
                yield "open"
            case ast.Attribute(ast.Name(of), name) if of in _MODULES:
                if name not in _HARMLESS.get(of, ()):
                    yield f"{of}.{name}"
            case ast.Attribute(_, name) if name in _OF_PATHS:
                yield f".{name}"


def _rows() -> dict[str, Counter[str]]:
    """What the table has, of all objects, by module."""
    found: dict[str, Counter[str]] = {}
    for line in TABLE.read_text().splitlines():
        if line and line[0] not in "#[":
            module, _, calls = line.partition(": ")
            for call in calls.split(", "):
                name, _, times = call.partition(" ")
                found.setdefault(module, Counter())[name] += int(times or 1)
    return found


ROWS: Final = _rows()
#: of ctxd; the meter is another process, with an unprivileged user
MODULES: Final = sorted(str(path.relative_to(HOUSE)) for package in ("ctxfs", "runtime")
                        for path in (HOUSE / package).rglob("*.py")
                        if path.parent.name != "metering")  # fmt: skip


def test_every_call_has_a_row_that_says_whose_object_it_is() -> None:
    differing = []
    for module in MODULES:
        called, rows = Counter(_called(HOUSE / module)), ROWS.get(module, Counter())
        differing += [
            f"{module}, {name}: {called[name]} in the source, {rows[name]} in {TABLE.name}"
            for name in sorted(called | rows) if called[name] != rows[name]
        ]
    assert not differing


def test_no_row_is_of_a_module_that_is_gone() -> None:
    assert set(ROWS) <= set(MODULES)


def test_calls_are_found(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("os.open(a, b)\nos.close(c)\n(d / e).read_text()\nwith open(f): pass\n")
    assert sorted(_called(source)) == [".read_text", "open", "os.open"]


def test_no_fifo_is_opened_for_writing() -> None:
    """Others may have it open: programs of ours write to it, and let go of its readers."""
    for module in MODULES:
        for node in ast.walk(ast.parse((HOUSE / module).read_text())):
            if isinstance(node, ast.BinOp):
                flags = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
                assert "O_NONBLOCK" not in flags or not flags & {"O_WRONLY", "O_RDWR"}, module
