"""Who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]
#: the side of the filesystem that speaks FUSE; the rest knows neither requests nor inodes' caches
ADAPTER = {f"ctxfs/{name}.py" for name in ("operations", "scheduler", "caching", "mount", "daemon")}


def modules(package: str) -> list[Path]:
    return sorted((HOUSE / package).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Every module named by an import statement, those of functions and type checks too."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found.add(node.module)
    return frozenset(found)


def packages(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def name_of(path: Path) -> str:
    return str(path.relative_to(HOUSE))


def others(paths: Iterable[Path], allowed: Iterable[str]) -> dict[str, set[str]]:
    """What these import besides, by module."""
    found = {name_of(path): packages(path) - set(allowed) for path in paths}
    return {name: names for name, names in found.items() if names}


def importers(paths: Iterable[Path], of: Callable[[str], bool]) -> set[str]:
    return {name_of(path) for path in paths if any(map(of, imported(path)))}


RUNTIME = modules("runtime")
CTXFS = modules("ctxfs")
#: what the installed client alone can do
INSTALLED = modules("client/installed")
CLIENT = [path for path in modules("client") if path not in INSTALLED]
REFERENCES = modules("bench/reference")


def test_all_packages_have_modules() -> None:
    assert len(CLIENT) > 10
    assert len(INSTALLED) > 3
    assert len(RUNTIME) > 15
    assert len(CTXFS) > 10
    assert len(REFERENCES) > 3


def test_what_the_bench_compares_with_does_not_change_with_the_product() -> None:
    assert not importers(REFERENCES, lambda name: bool(
        re.match(r"(client|ctxfs|runtime|bench(?!\.reference))\b", name)))


def test_runtime_imports_neither_the_filesystem_nor_fuse_nor_the_client() -> None:
    assert not importers(RUNTIME, lambda name: bool(re.match(r"(client|ctxfs|pyfuse3)\b", name)))


def test_every_import_is_ours_the_standard_librarys_or_a_dependency() -> None:
    ours = {"client", "ctxfs", "runtime"}
    theirs = {"pyfuse3", "trio", "yaml", "jsonschema", "psutil", "h11", "msgspec"}
    assert others(RUNTIME + CTXFS, ours | theirs | sys.stdlib_module_names) == {}


def test_the_client_imports_only_itself_and_the_standard_library() -> None:
    assert others(CLIENT, {"client", *sys.stdlib_module_names}) == {}


def test_one_library_draws_the_screen() -> None:
    """rich is a part of textual's interface: what it draws is made of rich's segments."""
    drawing = {path for path in INSTALLED if path.stem in ("app", "asks", "table")}
    assert others(drawing, {"client", "textual", "rich", *sys.stdlib_module_names}) == {}
    assert others(set(INSTALLED) - drawing, {"client", *sys.stdlib_module_names}) == {}


def test_two_commands_need_the_installed_client() -> None:
    found = importers(CLIENT, lambda name: name.startswith("client.installed"))
    assert found <= {"client/drawn.py"}


def test_the_client_is_no_library() -> None:
    found = importers(CTXFS, lambda name: name.partition(".")[0] == "client")
    assert found <= {"ctxfs/program.py"}


def test_pyfuse3_is_imported_by_the_adapter_only() -> None:
    assert importers(CTXFS, lambda name: name.partition(".")[0] == "pyfuse3") <= ADAPTER


def test_only_the_composition_imports_the_pyfuse3_operations() -> None:
    found = importers(CTXFS, lambda name: name == "ctxfs.operations")
    assert found <= {f"ctxfs/{name}.py" for name in ("mount", "daemon", "reexec")}


def test_runtime_raises_no_errno_of_its_own() -> None:
    """Errors are classes; only what the kernel said is compared with errno."""
    for path in RUNTIME:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                assert "errno." not in ast.unparse(node.exc), path


def graph(paths: list[Path]) -> dict[str, set[str]]:
    """Which module of these names which, inside functions and for type checks too."""
    names = {".".join(path.relative_to(HOUSE).with_suffix("").parts): path for path in paths}
    found = {}
    for name, path in names.items():
        below = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                below |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of = [f"{node.module}.{alias.name}" for alias in node.names]
                below |= {each if each in names else str(node.module) for each in of}
        found[name] = (below & names.keys()) - {name}
    return found


def circle(found: dict[str, set[str]]) -> set[str]:
    """What is left when those that name nobody who is left are taken away, again and again."""
    left = {name: set(below) for name, below in found.items()}
    while gone := {name for name, below in left.items() if not below & left.keys()}:
        for name in gone:
            del left[name]
    return set(left)


def test_a_circle_of_imports_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == set()


@pytest.mark.parametrize(
    "paths", [RUNTIME, CTXFS, CLIENT + INSTALLED], ids=["runtime", "ctxfs", "client"]
)
def test_no_modules_import_each_other_in_a_circle(paths: list[Path]) -> None:
    assert circle(graph(paths)) == set()


#: from the ground up; a module names those of its own floor and of those below
FLOORS = (
    *("ground", "texts", "kernel", "records", "metering", "authority", "agents", "cell"),
    *("life", "peers", "sockets", "roof"),
)
#: modules of the runtime that are in no folder
GROUND = {
    *("runtime.unaided", "runtime.errors", "runtime.caller", "runtime.crashpoints"),
    "runtime.ids",
}
ROOF = {"runtime.runtime"}


def floor_of(name: str) -> int:
    if name in GROUND:
        return FLOORS.index("ground")
    if name in ROOF:
        return FLOORS.index("roof")
    return FLOORS.index(name.split(".")[1])


def test_arrows_between_the_floors_of_the_runtime_point_down() -> None:
    found = graph([path for path in RUNTIME if path.name != "__init__.py"])
    up = [f"{name} -> {below}" for name in sorted(found) for below in sorted(found[name])
          if floor_of(below) > floor_of(name)]  # fmt: skip
    assert up == []


def test_life_knows_no_cgroups() -> None:
    """It asks the port (``runtime.cell.port``), so that programs may run elsewhere one day."""
    for path in modules("runtime/life"):
        names = re.findall(r"^(?:from|import) .*\bcgroups\b.*", path.read_text(), re.M)
        assert names == [], path


#: of the filesystem, in the same way
CTXFS_FLOORS = ("ground", "tree", "tools", "files", "roof")
CTXFS_GROUND = {
    f"ctxfs.{name}"
    for name in (
        *("caching", "disks", "errnos", "keptlines", "program", "reasons"),
        *("recipes", "trusted"),
    )
}


def ctxfs_floor_of(name: str) -> int:
    _, _, below = name.partition(".")
    folder, found, _ = below.partition(".")
    if found:
        return CTXFS_FLOORS.index(folder)
    return CTXFS_FLOORS.index("ground" if name in CTXFS_GROUND else "roof")


def test_arrows_between_the_floors_of_the_filesystem_point_down() -> None:
    found = graph([path for path in CTXFS if path.name != "__init__.py"])
    assert found.keys() >= CTXFS_GROUND
    up = [f"{name} -> {below}" for name in sorted(found) for below in sorted(found[name])
          if ctxfs_floor_of(below) > ctxfs_floor_of(name)]  # fmt: skip
    assert up == []


def test_only_libraries_are_imported_for_type_checks_or_in_functions() -> None:
    """So nothing is hidden that the order of the modules would forbid."""
    for path in CTXFS:
        module = parsed(path)
        for node in set(ast.walk(module)) - set(module.body):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            hidden = {name.partition(".")[0] for name in names} & {"client", "ctxfs", "runtime"}
            assert not hidden, path


@pytest.mark.parametrize("floor", ["texts", "kernel"])
def test_what_is_below_the_records_knows_no_agent(floor: str) -> None:
    paths = sorted((HOUSE / "runtime" / floor).glob("*.py"))
    assert paths
    for path in paths:
        assert "Agent" not in {
            node.id for node in ast.walk(parsed(path)) if isinstance(node, ast.Name)
        }


PURE = (
    *("errors", "records/lifecycle", "records/moves", "records/modes"),
    *("texts/names", "texts/policy", "texts/mounts"),
)


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_touch_neither_files_nor_processes(name: str) -> None:
    forbidden = {"os", "pathlib", "subprocess", "socket", "trio", "sqlite3", "signal"}
    assert not packages(HOUSE / "runtime" / f"{name}.py") & forbidden


OURS = RUNTIME + CTXFS + CLIENT + INSTALLED


def test_init_files_hold_no_logic() -> None:
    for path in OURS:
        if path.name == "__init__.py":
            body = parsed(path).body
            docstring = [node for node in body if isinstance(node, ast.Expr)
                         and isinstance(node.value, ast.Constant)]
            assert body == docstring, path


#: what starts processes, and may be named by the module that does
STARTING = {"subprocess", "multiprocessing", "pty"}
CALLS = (
    r"os\.(fork|forkpty|system|popen|posix_spawnp?|spawn[lv]p?e?)\b"
    r"|\b(run_process|open_process|create_subprocess_exec|create_subprocess_shell)\b"
)


#: of the daemon; of the meter, where one reads long bodies; and of the client: inside agents, where
#: it asks programs for their versions, and tar for a copy of the state, and where it tries
#: namespaces, which it then is in; and what asks other programs for their settings
STARTERS = (
    *("runtime/kernel/spawn.py", "runtime/metering/apart.py", "client/author.py"),
    *("client/backup.py", "client/bridge.py", "client/doctor.py"),
    *("client/installed/weblist.py", "client/nodes.py", "client/recipes.py"),
)


def test_one_module_starts_processes() -> None:
    for path in OURS:
        if name_of(path) in STARTERS:
            continue
        assert not packages(path) & STARTING, path
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Attribute | ast.Name):
                assert re.search(CALLS, ast.unparse(node)) is None, ast.unparse(node)
            elif isinstance(node, ast.ImportFrom):
                names = {alias.name for alias in node.names}
                assert not names & {"run_process", "open_process"}, path


def test_the_folders_of_the_unit_tests_are_those_of_the_packages() -> None:
    here = Path(__file__).parent
    for path in here.rglob("test_*.py"):
        if path.parent != here:
            assert (HOUSE / path.parent.relative_to(here)).is_dir(), path
