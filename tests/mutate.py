"""What the tests are worth: small faults put into the source, one at a time, and who sees each.

    python -m tests.mutate [--number N] [--seed S] [--module PATH]... [TEST]...

The faults follow from the seed and the source alone, so that two sets of tests can be compared
by the same ones. Each is made in a copy of the checkout, in which the tests of its module run and
then the given ones (unit and adapter, if none are given), until one fails. Whatever no test sees
is listed with its place: it is equivalent, or a test is missing. It takes minutes, and is no part
of ``make test``.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from queue import SimpleQueue
from typing import Final

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = ("tests/unit", "tests/adapter")
#: where most of the rules are
MODULES: Final = (
    *("runtime/agents/messages.py", "runtime/agents/tasks.py", "runtime/agents/work.py"),
    *("runtime/agents/waiting.py", "runtime/agents/births.py", "runtime/agents/removals.py"),
    *("runtime/agents/asks.py", "runtime/agents/moments.py"),
    *("runtime/records/items.py", "runtime/records/journal.py"),
    *("ctxfs/tree/openfiles.py", "ctxfs/tree/rows.py"),
)
#: seconds of one fault; what hangs is seen, too
PATIENCE: Final = 600
_COMPARED: Final = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ADDED: Final = {ast.Add: "-", ast.Sub: "+"}


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """``old`` at this place becomes ``new``; lines count from 1, columns from 0 in bytes."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    new: str

    def put(self, source: bytes) -> bytes:
        lines = source.splitlines(keepends=True)
        before, after = lines[self.line - 1], lines[self.end_line - 1]
        lines[self.line - 1:self.end_line] = [
            before[:self.column] + self.new.encode() + after[self.end_column:]
        ]
        return b"".join(lines)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {' '.join(self.new.split())}"


def faults(path: str, source: str) -> Iterator[Fault]:
    """All that there are in a file."""
    tree = ast.parse(source)

    def text(node: ast.AST) -> str:
        return ast.get_source_segment(source, node) or ""

    def at(node: ast.expr | ast.stmt, new: str) -> Fault:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return Fault(path, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, new)

    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                yield at(node, f"({text(left)} {_COMPARED[type(op)]} {text(right)})")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ADDED:
                yield at(node, f"({text(left)} {_ADDED[type(op)]} {text(right)})")
            case ast.BoolOp(op=op, values=values):
                other = " or " if isinstance(op, ast.And) else " and "
                yield at(node, f"({other.join(f'({text(value)})' for value in values)})")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield at(node, f"({text(operand)})")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield at(test, f"(not ({text(test)}))")
            case ast.Constant(value=bool() as value):
                yield at(node, str(not value))
            case ast.Constant(value=int() as value):
                yield at(node, str(value + 1))
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield at(node, "pass")
            case ast.Raise():
                yield at(node, "pass")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield at(value, "None")


def chosen(modules: Sequence[str], number: int, seed: int) -> list[Fault]:
    """So many, the same for the same source; each compiles, or it would tell nothing."""
    everything = [
        fault for path in modules for fault in faults(path, (ROOT / path).read_text())
    ]
    random.Random(seed).shuffle(everything)
    found: list[Fault] = []
    for fault in everything:
        if len(found) == number:
            break
        try:
            compile(fault.put((ROOT / fault.path).read_bytes()), fault.path, "exec")
        except (SyntaxError, ValueError):
            continue
        found.append(fault)
    return sorted(found)


def seen_by(copy: Path, fault: Fault, tests: Sequence[str]) -> str:
    """Who sees it, in a copy of the checkout; empty if nobody does."""
    source = (ROOT / fault.path).read_bytes()
    (copy / fault.path).write_bytes(fault.put(source))
    path = PurePath(fault.path)
    likely = f"tests/unit/{path.parent}/test_{path.name}"
    first = [likely] if (copy / likely).exists() else []
    try:
        return first_failure(copy, first) or first_failure(copy, tests)
    finally:
        (copy / fault.path).write_bytes(source)


def first_failure(copy: Path, tests: Sequence[str]) -> str:
    """The test that fails; empty if none does, or there are no tests."""
    if not tests:
        return ""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", "--tb=no",
               "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False,
                              timeout=PATIENCE, env={**os.environ, "PYTHONPATH": str(copy)})
    except subprocess.TimeoutExpired:
        return "what hangs"
    if done.returncode == 0:
        return ""
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split()[1]
    return f"pytest, which ended with {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate")
    parser.add_argument("--number", type=int, default=60, help="of faults (60)")
    parser.add_argument("--seed", type=int, default=1, help="of their choice (1)")
    parser.add_argument("--module", action="append", help="a file that has them")
    parser.add_argument("tests", nargs="*", help="files and directories, as for pytest")
    arguments = parser.parse_args()
    tests = arguments.tests or TESTS
    found = chosen(arguments.module or MODULES, arguments.number, arguments.seed)
    workers = os.cpu_count() or 1
    copies: SimpleQueue[Path] = SimpleQueue()

    def tried(fault: Fault) -> str:
        copy = copies.get()
        try:
            return seen_by(copy, fault, tests)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory(prefix="ctxmutate-") as scratch:
        for number in range(workers):
            copy = Path(scratch, str(number))
            shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(
                ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info"))
            copies.put(copy)
        if failed := first_failure(copy, tests):
            print(f"without any fault {failed} fails already: mend that first", file=sys.stderr)
            return 1
        with ThreadPoolExecutor(workers) as threads:
            results = []
            for fault, who in zip(found, threads.map(tried, found), strict=True):
                print(f"{'seen  ' if who else 'UNSEEN'} {fault}  {who}", flush=True)
                results.append(who)
    by_file = Counter(who.partition("::")[0] for who in results if who)
    print(f"\n{sum(by_file.values())} of {len(found)} faults were seen")
    for file, count in by_file.most_common():
        print(f"{count:5} {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
