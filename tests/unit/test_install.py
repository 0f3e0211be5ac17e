"""contrib/install.py: what make install puts where, and that make uninstall takes it away."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

CHECKOUT: Final = Path(__file__).resolve().parents[2]
INTERPRETER: Final = os.path.realpath(sys.executable)
PACKAGES: Final = "lib/python{}.{}/site-packages".format(*sys.version_info[:2])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """What make build makes, with two packages that tell where they are."""
    site = tmp_path / "site"
    for module in ("ctxfs/daemon.py", "client/start.py", "runtime/metering/main.py",
                   "client/installed/weblist.py"):
        (path := site / module).parent.mkdir(parents=True)
        path.write_text("def main():\n    print(__file__, main.__code__.co_filename)\n")
    (site / "bin").mkdir()
    (site / "bin/ctxd").write_text("of another directory")
    return site


def run(verb: str, *options: str, status: int = 0) -> str:
    script = str(CHECKOUT / "contrib/install.py")
    done = subprocess.run([sys.executable, script, verb, *options], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def install(site: Path, *options: str) -> str:
    return run("install", "--site", str(site), "--interpreter", INTERPRETER, *options)


def below(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def test_what_is_installed_runs_from_where_it_is(site: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "opt"
    install(site, "--prefix", str(prefix))
    for name, module in (("ctxd", "ctxfs/daemon.py"), ("ctx", "client/start.py"),
                         ("ctxfs-meter", "runtime/metering/main.py"),
                         ("ctxfs-web-list", "client/installed/weblist.py")):
        said = subprocess.run([prefix / "bin" / name], capture_output=True, text=True, check=True)
        at = str(prefix / "lib/ctxfs" / PACKAGES / module)
        assert said.stdout.split() == [at, at], "its byte code says so too"
    assert not (prefix / "lib/ctxfs" / PACKAGES / "bin").exists()
    unit = (prefix / "lib/systemd/system/ctxd.service").read_text()
    assert f"ExecStart={prefix}/bin/ctxd " in unit
    assert "/usr/local" not in unit
    meter = (prefix / "lib/systemd/system/ctxfs-meter.service").read_text()
    assert f"ExecStart={prefix}/bin/ctxfs-meter\n" in meter and "\nUser=ctxfs-meter\n" in meter
    assert (prefix / "share/man/man8/ctxfs-meter.8").exists()
    recipes = (prefix / "lib/ctxfs/share/ctxfs/agents").resolve()
    assert recipes == prefix / "share/ctxfs/agents"
    assert (recipes / "claude/files/run").stat().st_mode & 0o777 == 0o644
    assert (prefix / "share/man/man8/ctxd.8").exists()
    readme = prefix / "share/doc/ctxfs/README.md"
    links = re.findall(r"\]\(([^)]+)\)", readme.read_text())
    assert len(links) > 4
    assert not [link for link in links if not (readme.parent / link).exists()]
    assert (prefix / "share/ctxfs/ctxfs-agent.schema.json").exists()


def test_a_wheel_has_all_pages() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["data-files"]
    for page in (CHECKOUT / "man").glob("*.[1-8]"):
        assert f"man/*{page.suffix}" in data[f"share/man/man{page.suffix[1:]}"], page.name


def test_nothing_installed_names_the_directory_that_it_was_packed_in(
    site: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    install(site, "--destdir", str(packed), "--prefix", "/usr", "--units", "/lib/systemd/system")
    assert {path.name for path in packed.iterdir()} == {"usr", "lib"}
    for name, content in below(packed).items():
        assert content is None or bytes(tmp_path) not in content, name
    script = (packed / "usr/bin/ctxd").read_text()
    assert script.startswith("#!/usr/lib/ctxfs/bin/python3 -I\n")
    assert "u ctxfs " in (packed / "usr/lib/sysusers.d/ctxfs.conf").read_text()
    assert "/var/lib/ctxfs" in (packed / "usr/lib/tmpfiles.d/ctxfs.conf").read_text()
    assert (packed / "usr/lib/ctxfs/bin/python3").readlink() == Path(INTERPRETER)


def test_uninstall_takes_away_what_install_made_and_nothing_else(
    site: Path, tmp_path: Path
) -> None:
    prefix = tmp_path / "usr"
    (prefix / "share/man/man1").mkdir(parents=True)
    (prefix / "share/man/man1/other.1").write_text("another's")
    before = below(prefix)
    install(site, "--prefix", str(prefix))
    made_later = prefix / "share/doc/notes"
    made_later.write_text("put there since")
    # a newer version, which has lost a module and a page
    (site / "ctxfs/gone.py").write_text("")
    install(site, "--prefix", str(prefix))
    (site / "ctxfs/gone.py").unlink()
    manifest = prefix / "lib/ctxfs/manifest"
    (prefix / "share/man/man1/gone.1").write_text("of an older version")
    manifest.write_text(manifest.read_text() + f"{prefix}/share/man/man1/gone.1\n")
    install(site, "--prefix", str(prefix))
    assert not list(prefix.rglob("gone*"))
    assert "/var/lib/ctxfs" in run("uninstall", "--prefix", str(prefix))
    made_later.unlink()
    (prefix / "share/doc").rmdir()
    assert below(prefix) == before
    assert "nothing is installed" in run("uninstall", "--prefix", str(prefix), status=1)


class Killed(BaseException):
    pass


#: by which files come, go and change
STEPS: Final = ((Path, ("mkdir", "rename", "unlink", "rmdir", "write_text", "write_bytes")),
                (shutil, ("rmtree",)))  # fmt: skip
LAST: Final = 1000


def killed_before(step: int, script: ModuleType, words: list[str]) -> bool:
    """Runs the script up to one step; False if it has no such step."""
    left = step

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in STEPS:
            for name in names:
                patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(sys, "argv", ["install.py", *words])
        try:
            script.main()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_whatever_interrupts_it_uninstall_takes_away_all(
    verb: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first installation, one over an older version, and the removal."""
    spec = importlib.util.spec_from_file_location("install", CHECKOUT / "contrib/install.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "install", script)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "_ask", lambda interpreter, expression: "3 11")
    monkeypatch.setattr(script, "_runs", lambda: False)
    prefix = tmp_path / "usr"
    prefix.mkdir()
    at = ["--prefix", str(prefix)]
    how = [*at, "--site", str(site), "--interpreter", INTERPRETER, "--no-bytecode"]

    def put(*names: str) -> None:
        """With a version that has these files."""
        monkeypatch.setattr(script, "files", lambda places: [
            script.File(prefix / name, name.encode()) for name in names])  # fmt: skip

    for older in (False, True):
        step = 0
        while True:
            if older or verb == "uninstall":
                put("bin/ctx", "share/gone/page")
                assert not killed_before(LAST, script, ["install", *how])
            put("bin/ctx", "share/man/page")
            if not killed_before(step, script, [verb, *(how if verb == "install" else at)]):
                break
            left = below(prefix)
            killed_before(LAST, script, ["uninstall", *at])
            if "nothing is installed" in capsys.readouterr().err:
                assert left.keys() <= {"lib", "lib/ctxfs", "lib/ctxfs/.manifest.new"}
                shutil.rmtree(prefix / "lib", ignore_errors=True)
            assert below(prefix) == {}, (step, left)
            step += 1
        assert step > 10
        if verb == "install":
            assert (prefix / "share/man/page").exists() and not (prefix / "share/gone").exists()
            assert not killed_before(LAST, script, ["uninstall", *at])
        assert below(prefix) == {}


@pytest.mark.parametrize("prefix", ["opt", "/opt/../usr", "/opt/my programs"])
def test_a_prefix_that_no_script_could_name_is_refused(site: Path, prefix: str) -> None:
    said = run("install", "--site", str(site), "--interpreter", INTERPRETER, "--prefix", prefix,
               status=1)
    assert "not an absolute path without spaces" in said


def test_a_wheel_has_what_the_installed_client_looks_for(site: Path, tmp_path: Path) -> None:
    """The manual pages, the recipes and the schema, where make install has them too."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    packed = {
        f"{directory}/{path.name}"
        for directory, patterns in project["tool"]["setuptools"]["data-files"].items()
        for pattern in patterns
        for path in CHECKOUT.glob(pattern)
        if path.is_file()
    }
    prefix = tmp_path / "usr"
    install(site, "--prefix", str(prefix))
    wanted = {name for name in below(prefix) if name.startswith(("share/man/", "share/ctxfs/"))}
    others = {"share/ctxfs/agents/README.md"}  # about the recipes
    assert {name for name in wanted if (prefix / name).is_file()} - others == packed
