"""make install and make uninstall: what make build made, and the files of this checkout, in place.

    install.py install --site build/site --interpreter /usr/bin/python3 [--prefix DIR] [...]
    install.py uninstall [--prefix DIR] [...]

Below PREFIX/lib/ctxfs is a virtual environment of ctxfs alone; it is replaced as a whole. A
manifest in it lists all other files, so that uninstall removes what was installed, whatever the
checkout has become. It is written before they are, and goes after them: either verb can be
interrupted, and given again. With --destdir, everything is put below that directory, for who packs
it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parents[1]
CONTRIB: Final = CHECKOUT / "contrib"
#: the path of programs in units, which some leave to systemd
UNITS_SAY: Final = re.compile("^(Exec[A-Za-z]+=)(/usr/local/bin/)?(?=ctx)", re.MULTILINE)
#: a unit of ctxfs's own beside examples of units for other programs
METER: Final = "proxy/ctxfs-meter.service"
#: what is not for an installed system, or is installed elsewhere
NOT_EXAMPLES: Final = ("agents", "completion", "demo", "generate", "systemd")
MANIFEST: Final = "manifest"
PROGRAMS: Final = {
    "ctxd": "ctxfs.daemon",
    "ctx": "client.start",
    "ctxfs-meter": "runtime.metering.main",
    "ctxfs-web-list": "client.installed.weblist",
}
#: where each shell looks for the completion of ctx, by the name of the file in contrib/completion
COMPLETIONS: Final = {
    "ctx.bash": "share/bash-completion/completions/ctx",
    "_ctx": "share/zsh/site-functions/_ctx",
    "ctx.fish": "share/fish/vendor_completions.d/ctx.fish",
}
PROGRAM: Final = """\
#!{python} -I
from sys import exit

from {module} import main

exit(main())
"""


#: what systemd makes of a file, and how it is told to now
MADE: Final = {
    "sysusers": ("systemd-sysusers",),
    "tmpfiles": ("systemd-tmpfiles", "--create"),
}
#: where it looks for such files (systemd's CONF_PATHS)
SYSTEMS: Final = (Path("/usr"), Path("/usr/local"))


class InstallError(Exception):
    """One sentence."""


@dataclass(frozen=True, slots=True)
class Places:
    """All as they will be, without --destdir; `real` adds it."""

    destdir: str
    prefix: Path
    units: Path
    user_units: Path

    @classmethod
    def of(cls, options: argparse.Namespace) -> Places:
        prefix = Path(options.prefix)
        units = options.units or prefix / "lib/systemd/system"
        user_units = options.user_units or prefix / "lib/systemd/user"
        places = cls(options.destdir, prefix, Path(units), Path(user_units))
        for path in (prefix, places.units, places.user_units):
            # the first line of a script takes neither, and ".." would lead out of DESTDIR
            if not path.is_absolute() or ".." in path.parts or " " in str(path):
                raise InstallError(f"not an absolute path without spaces: {path}")
        return places

    @property
    def home(self) -> Path:
        return self.prefix / "lib/ctxfs"

    def real(self, path: Path) -> Path:
        return Path(self.destdir + str(path)) if self.destdir else path

    @property
    def homes(self) -> tuple[Path, Path, Path]:
        """As they are on the disk: the home; what replaces it, and what was replaced, for a
        moment."""
        home = self.real(self.home)
        return home, home.with_name("ctxfs.new"), home.with_name("ctxfs.old")


@dataclass(frozen=True, slots=True)
class File:
    """A file to install: of some text, or of the bytes of another file."""

    path: Path
    content: bytes
    mode: int = 0o644

    @classmethod
    def copy(cls, source: Path, path: Path) -> File:
        executable = os.access(source, os.X_OK)
        return cls(path, source.read_bytes(), 0o755 if executable else 0o644)


def files(places: Places) -> Iterator[File]:
    """All but those of the virtual environment."""
    share = places.prefix / "share"
    for name, module in PROGRAMS.items():
        text = PROGRAM.format(python=places.home / "bin/python3", module=module)
        yield File(places.prefix / "bin" / name, text.encode(), 0o755)
    units = {"systemd/*.service": places.units, METER: places.units,
             "systemd/user/*.service": places.user_units}
    for kind, to in units.items():
        for unit in sorted(CONTRIB.glob(kind)):
            text = UNITS_SAY.sub(rf"\g<1>{places.prefix}/bin/", unit.read_text())
            yield File(to / unit.name, text.encode())
    for kind in MADE:
        to = places.prefix / f"lib/{kind}.d/ctxfs.conf"
        yield File.copy(CONTRIB / f"systemd/{kind}.conf", to)
    for page in sorted((CHECKOUT / "man").glob("*.[1-8]")):
        yield File.copy(page, share / f"man/man{page.suffix[1:]}" / page.name)
    for name, to in COMPLETIONS.items():
        if (CONTRIB / "completion" / name).exists():
            yield File.copy(CONTRIB / "completion" / name, places.prefix / to)
    yield from _below(CONTRIB / "agents", share / "ctxfs/agents")
    schema = CONTRIB / "ctxfs-agent.schema.json"
    yield File.copy(schema, share / "ctxfs" / schema.name)
    text = (CHECKOUT / "README.md").read_text()
    # its links, to where this puts what they lead to
    text = text.replace("](contrib/agents/", "](../../ctxfs/agents/").replace("](contrib/", "](")
    yield File(share / "doc/ctxfs/README.md", text.encode())
    for licence in sorted(CHECKOUT.glob("LICENSE*")):
        yield File.copy(licence, share / "doc/ctxfs" / licence.name)
    for part in sorted(CONTRIB.iterdir()):
        if part.is_dir() and part.name not in NOT_EXAMPLES:
            yield from _below(part, share / "doc/ctxfs" / part.name)


def _below(source: Path, to: Path) -> Iterator[File]:
    for path in sorted(source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield File.copy(path, to / path.relative_to(source))


def make_home(
    places: Places, site: Path, interpreter: str, listed: list[str], *, bytecode: bool
) -> None:
    """The virtual environment (PEP 405), beside the one that it then replaces."""
    version = "{}.{}".format(*_ask(interpreter, "*sys.version_info[:2]").split())
    home, new, old = places.homes
    shutil.rmtree(new, ignore_errors=True)
    packages = new / f"lib/python{version}/site-packages"
    shutil.copytree(
        site, packages,
        # what the packages bring beside their modules: commands, and our own man pages
        ignore=lambda where, _: ["bin", "share"] if Path(where) == site else [],
    )
    (new / "bin").mkdir()
    (new / "bin/python3").symlink_to(interpreter)
    says = {
        "home": str(Path(interpreter).parent),
        "include-system-site-packages": "false",
        "version": _ask(interpreter, "platform.python_version()"),
    }
    (new / "pyvenv.cfg").write_text("".join(f"{key} = {value}\n" for key, value in says.items()))
    # where the client looks for what came with it
    (new / "share").mkdir()
    (new / "share/ctxfs").symlink_to(os.path.relpath(places.prefix / "share/ctxfs",
                                                     places.home / "share"))
    for path in (new, *new.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    if bytecode:
        final = places.home / packages.relative_to(new)
        compiling = ("-m", "compileall", "-q", "-s", str(packages), "-p", str(final))
        subprocess.run([interpreter, "-I", *compiling, str(packages)], check=True)
    write_manifest(new, listed)
    shutil.rmtree(old, ignore_errors=True)
    home.rename(old)
    new.rename(home)
    shutil.rmtree(old)


def _ask(interpreter: str, expression: str) -> str:
    code = f"import platform, sys; print({expression})"
    return subprocess.run(
        [interpreter, "-I", "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def install(places: Places, options: argparse.Namespace) -> None:
    Path(places.destdir or "/").mkdir(parents=True, exist_ok=True)
    old = read_manifest(places)
    new = list(files(places))
    installed = [str(file.path) for file in new]
    above = {f"{each}/" for path in (places.home, *installed) for each in Path(path).parents}
    missing = sorted(each for each in above if not places.real(Path(each)).is_dir())
    # uninstall removes directories that were not there before
    listed = [*installed, *sorted({*missing, *above.intersection(old)})]
    gone = sorted({*old}.difference(listed))
    home = places.real(places.home)
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_manifest(home, [*listed, *gone])
    for path in missing:
        places.real(Path(path)).mkdir(mode=0o755, exist_ok=True)
    for file in new:
        real = places.real(file.path)
        part = part_of(real)
        part.write_bytes(file.content)
        part.chmod(file.mode)
        part.rename(real)
    remove(places, gone)
    make_home(places, Path(options.site), options.interpreter, listed, bytecode=options.bytecode)
    print(f"installed: {places.prefix}/bin/ctxd, {places.prefix}/bin/ctx")
    if not places.destdir:
        _warn_of_closed_directories(options.interpreter)
        for kind, command in MADE.items():
            told = [*command, str(places.prefix / f"lib/{kind}.d/ctxfs.conf")]
            if places.prefix not in SYSTEMS or shutil.which(told[0]) is None:
                print(f"users and directories of ctxfs are made by: {' '.join(told)}")
            else:
                subprocess.run(told, check=True)
        if old:
            print("a ctxd that runs already goes on as it was, until: ctx reexec; and a meter, "
                  "until: systemctl restart ctxfs-meter")


def _warn_of_closed_directories(interpreter: str) -> None:
    for directory in Path(interpreter).resolve().parents:
        if not directory.stat().st_mode & 0o001:
            print(f"warning: not everybody may search {directory}, where the Python is: others "
                  "cannot run ctx. make install INTERPRETER=/usr/bin/python3 takes another Python",
                  file=sys.stderr)


def read_manifest(places: Places) -> list[str]:
    """What is installed, files and directories; nothing if nothing is."""
    for home in places.homes:
        with suppress(FileNotFoundError):
            return (home / MANIFEST).read_text().splitlines()
    return []


def part_of(path: Path) -> Path:
    """What is written before it gets the name."""
    return path.with_name(f".{path.name}.new")


def write_manifest(home: Path, listed: list[str]) -> None:
    part = part_of(home / MANIFEST)
    part.write_text("".join(f"{path}\n" for path in listed))
    part.rename(home / MANIFEST)


def remove(places: Places, paths: list[str]) -> None:
    """Files, and directories if they are empty: others may have put files there."""
    for path in sorted(paths, reverse=True):
        real = places.real(Path(path))
        if not path.endswith("/"):
            real.unlink(missing_ok=True)
            part_of(real).unlink(missing_ok=True)
        elif real.is_dir() and not any(real.iterdir()):
            real.rmdir()


def uninstall(places: Places) -> None:
    installed = read_manifest(places)
    if not installed:
        there = places.real(places.home) / MANIFEST
        raise InstallError(f"nothing is installed: there is no {there}")
    if not places.destdir and _runs():
        raise InstallError("ctxd runs; end it and its agents first: "
                           "systemctl disable --now ctxd ctxd-agents")
    remove(places, installed)
    for home in filter(Path.exists, places.homes):
        for part in home.iterdir():
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            elif part.name != MANIFEST:
                part.unlink()
        (home / MANIFEST).unlink(missing_ok=True)
        home.rmdir()
    remove(places, installed)  # the directories above
    print("uninstalled. What agents wrote stays in /var/lib/ctxfs (and in ~/.local/state/ctxfs of "
          "users), and settings stay in /etc/ctxfs")


def _runs() -> bool:
    """Whether systemd runs one of the units."""
    if not Path("/run/systemd/system").is_dir():
        return False
    active = ("systemctl", "--quiet", "is-active", "ctxd.service", "ctxd-agents.service")
    return subprocess.run(active, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="install.py", allow_abbrev=False)
    parser.add_argument("verb", choices=("install", "uninstall"))
    parser.add_argument("--destdir", default="")
    parser.add_argument("--prefix", default="/usr/local")
    parser.add_argument("--units", help="of the system (default: PREFIX/lib/systemd/system)")
    parser.add_argument("--user-units", help="of users (default: PREFIX/lib/systemd/user)")
    parser.add_argument("--site", help="what make build made")
    parser.add_argument("--interpreter", help="the Python that will run ctxfs")
    parser.add_argument("--no-bytecode", dest="bytecode", action="store_false")
    options = parser.parse_args()
    os.umask(0o022)
    try:
        places = Places.of(options)
        if options.verb == "install":
            install(places, options)
        else:
            uninstall(places)
    except (InstallError, OSError, subprocess.SubprocessError) as error:
        print(f"make {options.verb}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
