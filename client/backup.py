"""The commands backup and restore: a copy of the daemon's state, while it runs.

The daemon has no part in a backup: it is read beside it, by the user whose the state is. The
database is copied first, by SQLite, as it is at one moment. Everything else is copied after that,
and may be newer: a restore cuts histories off where the database ends.
"""

from __future__ import annotations

import os

from client.arguments import Command, arg
from client.exits import FAILED, OK, USAGE, Failure
from client.output import STDERR, STDOUT, decode
from client.words import SCHEMA, VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from client.arguments import Arguments
    from client.root import Root

#: of the archive
FORMAT = 1
MANIFEST = "ctxfs-backup.json"
DATABASE = "ctxfs.db"
#: below the state, what is not made anew
TREES = ("agent", "home", "shared")
#: what an empty state may have
ALWAYS = ("lock", "reserve", "lost+found")
RESTORING = "restoring"
#: what users own themselves
FILES = ("home/*/data", "home/*/agent/*/.home", "shared/*")
#: all that tar knows of a file; numbers, because other machines have other users
KEPT = ("--acls", "--xattrs", "--xattrs-include=user.*", "--numeric-owner")
#: files change, and go, while they are read; sockets mean nothing in a copy
QUIET = ("no-file-changed", "no-file-removed", "no-file-ignored", "no-file-shrank")
BLOCK = 1 << 20
LINES_SHOWN = 10


def default_state() -> str:
    """Return where a ctxd of this user keeps its state if no option says so."""
    if os.getuid() == 0:
        return "/var/lib/ctxfs"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(home, "ctxfs")


def run_tar(words: Sequence[str], directory: str) -> list[str]:
    """Run tar(1) and return its complaints; a `Failure` if it cannot be run."""
    import shutil
    import subprocess

    program = shutil.which("tar") or "/bin/tar"
    environment = {**os.environ, "LC_ALL": "C"}
    environment.pop("TAR_OPTIONS", None)
    try:
        done = subprocess.run(
            [program, *words],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
    except OSError as error:
        raise Failure(f"{program}: {error.strerror}; apt-get install tar") from None
    lines = decode(done.stderr).splitlines()
    if done.returncode not in (0, 1) and not lines:
        lines = [f"tar: ended with status {done.returncode}"]
    return lines


def show_complaints(lines: Sequence[str]) -> None:
    """Show the first of what tar said; the names in it are agents' own."""
    STDERR.lines(lines[:LINES_SHOWN])
    if len(lines) > LINES_SHOWN:
        STDERR.lines([f"... {len(lines) - LINES_SHOWN} more"])


def copy_database(state: str, to: str) -> tuple[int, int]:
    """Copy the database as it is now, and return its schema and the number of agents.

    The daemon goes on: in WAL mode, a reader holds up no writer.
    """
    import sqlite3
    from contextlib import closing
    from urllib.parse import quote

    path = os.path.join(state, DATABASE)
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        remedy = "name the state directory with --state, and run this as the user of ctxd"
        raise Failure(f"{path}: {error.strerror}; {remedy}") from None
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(to)) as target,
        ):
            source.backup(target)
            # the copy has no log beside it
            target.execute("PRAGMA journal_mode=DELETE")
            return schema_of(target), count_agents(target)
    except sqlite3.Error as error:
        raise Failure(f"{path}: {error}") from None


def schema_of(db: sqlite3.Connection) -> int:
    """Return the number of a database's format."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def count_agents(db: sqlite3.Connection) -> int:
    """Return the number of agents that have not been removed."""
    return int(db.execute("SELECT COUNT(*) FROM agents WHERE removed=0").fetchone()[0])


def do_backup(root: Root, args: Arguments) -> int:
    """Write a copy of the state to a file that appears when it is whole."""
    import json
    import tempfile
    import time

    state = os.path.abspath(args.state or default_state())
    file = os.path.abspath(args.file)
    directory, name = os.path.split(file)
    if os.path.commonpath((os.path.realpath(directory), os.path.realpath(state))) == (
        os.path.realpath(state)
    ):
        raise Failure(f"{file} is below the state: choose a file elsewhere", USAGE)
    try:
        stage = tempfile.TemporaryDirectory(prefix=f".{name}.", dir=directory)
    except OSError as error:
        raise Failure(f"{directory}: {error.strerror}") from None
    with stage as staged:
        schema, agents = copy_database(state, os.path.join(staged, DATABASE))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "schema": schema,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "agents": agents,
            "files": not args.records,
        }
        with open(os.path.join(staged, MANIFEST), "w", encoding="utf-8") as written:
            json.dump(manifest, written)
        # named as the file, so that tar compresses by the name
        made = os.path.join(staged, name)
        # made before tar, which would make it readable for others
        os.close(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        trees = [tree for tree in TREES if os.path.isdir(os.path.join(state, tree))]
        left_out = [f"--exclude=./{pattern}" for pattern in FILES] if args.records else []
        complaints = run_tar(
            [
                *("--create", "--auto-compress", f"--file={made}", "--format=pax", "--sparse"),
                *("--one-file-system", "--ignore-failed-read", *KEPT),
                *(f"--warning={word}" for word in QUIET),
                *("--anchored", "--no-wildcards-match-slash", *left_out),
                *(f"--directory={staged}", MANIFEST),
                *(f"--directory={state}", *(f"./{tree}" for tree in trees)),
                # last: an archive without it is not whole
                *(f"--directory={staged}", DATABASE),
            ],
            directory,
        )
        if missing := missing_of(made):
            show_complaints(complaints)
            raise Failure(f"{file}: not written: {missing}")
        with open(made, "rb") as whole:
            os.fsync(whole.fileno())
            size = os.fstat(whole.fileno()).st_size
        os.replace(made, file)
    show_complaints(complaints)
    STDOUT.lines([f"{args.file}: {agents} agents, {size} bytes"])
    return FAILED if complaints else OK


def missing_of(archive: str) -> str:
    """Return what an archive lacks to be whole, or an empty text."""
    import subprocess

    listed = subprocess.run(
        ["tar", "--list", f"--file={archive}", MANIFEST, DATABASE],
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    names = listed.stdout.decode(errors="replace").split()
    if listed.returncode == 0 and names == [MANIFEST, DATABASE]:
        return ""
    said = decode(listed.stderr).splitlines()
    return said[0] if said else "it is not a whole backup"


def read_manifest(file: str) -> dict[str, Any]:
    """Return what a backup says of itself; a `Failure` if it is none, or too new."""
    import json
    import subprocess

    try:
        os.close(os.open(file, os.O_RDONLY))
    except OSError as error:
        raise Failure(f"{file}: {error.strerror}") from None
    read = subprocess.run(
        ["tar", "--extract", "--to-stdout", "--occurrence=1", f"--file={file}", MANIFEST],
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    try:
        manifest = json.loads(read.stdout)
        version = str(manifest["version"])
        form, schema = int(manifest["format"]), int(manifest["schema"])
    except (ValueError, TypeError, KeyError):
        raise Failure(f"{file} is not a backup of ctxfs") from None
    if form > FORMAT or schema > SCHEMA:
        what = f"{file} was made by ctxfs {version}, which is newer than this one ({VERSION})"
        raise Failure(f"{what}; install that version, or a newer one")
    found: dict[str, Any] = manifest
    return found


def lock_state(state: str) -> int:
    """Return a descriptor that keeps every ctxd from a state, which must be empty."""
    import fcntl

    try:
        os.makedirs(state, 0o700, exist_ok=True)
        fd = os.open(os.path.join(state, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Failure(f"{state}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Failure(f"{state}: a ctxd uses this state; stop it: systemctl stop ctxd") from None
    found = sorted(set(os.listdir(state)) - {*ALWAYS, RESTORING})
    if found:
        os.close(fd)
        what = f"{state} is not empty: it has {found[0]}"
        raise Failure(f"{what}; keep the old state aside: mv {state} {state}.old")
    return fd


def do_restore(root: Root, args: Arguments) -> int:
    """Put a backup into an empty state of which no daemon runs."""
    state = os.path.abspath(args.state or default_state())
    file = os.path.abspath(args.file)
    manifest = read_manifest(file)
    lock = lock_state(state)
    staged = os.path.join(state, RESTORING)
    try:
        remove_tree(staged)  # of one that was killed
        os.mkdir(staged, 0o700)
        complaints = run_tar(
            [
                *("--extract", f"--file={file}", "--preserve-permissions", "--same-owner"),
                *("--delay-directory-restore", *KEPT),
            ],
            staged,
        )
        if not os.path.exists(os.path.join(staged, DATABASE)):
            show_complaints(complaints)
            raise Failure(f"the backup is not whole: nothing was restored ({DATABASE} is missing)")
        agents = fit_histories(staged)
        os.unlink(os.path.join(staged, MANIFEST))
        os.sync()
        # the database last: a state without it is empty
        for name in (*TREES, DATABASE):
            if os.path.exists(os.path.join(staged, name)):
                os.rename(os.path.join(staged, name), os.path.join(state, name))
        os.chmod(state, 0o700)
        os.sync()
    finally:
        remove_tree(staged)
        os.close(lock)
    show_complaints(complaints)
    made = manifest.get("made")
    STDOUT.lines([f"{state}: {agents} agents as of {made}; start the daemon: systemctl start ctxd"])
    return FAILED if complaints else OK


def remove_tree(path: str) -> None:
    """Remove a tree, which may be deeper than a path is long."""
    import subprocess

    if os.path.lexists(path):
        subprocess.run(["rm", "-rf", "--", path], stdin=subprocess.DEVNULL, check=False)


def fit_histories(state: str) -> int:
    """Make the histories end where the database does, and return the number of agents."""
    import json
    import sqlite3
    from contextlib import closing

    kept: dict[tuple[str, str, str], dict[str, Any]] = {}
    try:
        with closing(sqlite3.connect(os.path.join(state, DATABASE))) as db:
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            for owner, agent, name, data in db.execute(
                "SELECT owner, agent, name, data FROM sessions"
            ):
                kept[str(owner), agent, name] = json.loads(data)
            agents = count_agents(db)
    except sqlite3.Error as error:
        raise Failure(f"the backup is not whole: nothing was restored ({error})") from None
    for key, path in session_directories(state):
        session = kept.get(key)
        if session is None:  # begun after the copy of the database
            remove_tree(path)
            continue
        for file, letter, last in (
            ("events.jsonl", b"e", session.get("events", 0)),
            ("messages.jsonl", b"m", session.get("messages", 0)),
        ):
            cut_history(os.path.join(path, file), letter, last)
        if session.get("held") is not None:  # the database has them
            for file in ("events.jsonl", "messages.jsonl"):
                if os.path.lexists(os.path.join(path, file)):
                    os.unlink(os.path.join(path, file))
    return agents


def session_directories(state: str) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield owner, agent and session of each directory of a session, and its path."""
    for owner in entries(os.path.join(state, "home")):
        agents = os.path.join(state, "home", owner, "agent")
        for agent in entries(agents):
            for name in entries(os.path.join(agents, agent)):
                if name != ".home":
                    yield (owner, agent, name), os.path.join(agents, agent, name)


def entries(directory: str) -> Iterable[str]:
    """Return the names of the directories in a directory, none if it is missing."""
    try:
        with os.scandir(directory) as found:
            return sorted(each.name for each in found if each.is_dir(follow_symlinks=False))
    except OSError:
        return ()


def cut_history(path: str, letter: bytes, last: int) -> None:
    """Cut off a file of lines after the one that has this number in its id, such as `e17`.

    What the database has and the file has not, the daemon adds at its start. So a line that is
    not whole is cut off as well.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with open(fd, "r+b") as file:
        position, text = file.seek(0, os.SEEK_END), b""
        end = position
        while position:
            size = min(BLOCK, position)
            position -= size
            file.seek(position)
            text = file.read(size) + text
            begin = 0 if not position else text.find(b"\n") + 1
            if not begin and position:
                continue  # a line longer than a block
            if (kept := end_of_kept(text[begin:], letter, last)) is not None:
                end = position + begin + kept
                break
            text = text[:begin]
            end = position + begin
        file.truncate(end)


def end_of_kept(text: bytes, letter: bytes, last: int) -> int | None:
    """Return where the last whole line ends that has this number or a smaller one, None if none."""
    end = len(text)
    while end:
        begin = text.rfind(b"\n", 0, end - 1) + 1
        line = text[begin:end]
        mark, _, rest = line.partition(b'"id":"' + letter)
        number = rest.partition(b'"')[0]
        if line.endswith(b"\n") and mark == b"{" and number.isdigit() and int(number) <= last:
            return end
        end = begin
    return None


STATE = arg("--state", metavar="DIR", help="the state directory of ctxd, if not the default")

COMMANDS = (
    Command(
        "backup",
        "copy the state of ctxd to a file, while it runs",
        (
            arg("file", metavar="FILE", help="a tar archive; .gz or .zst compresses it"),
            STATE,
            arg(
                "--records",
                action="store_true",
                help="leave out the files of users: durable homes, home/UID/data, shared spaces",
            ),
        ),
        do_backup,
        "Run it as root, or as the user of ctxd. Agents, histories and results are as they were at"
        " one moment.",
    ),
    Command(
        "restore",
        "put a backup into an empty state",
        (arg("file", metavar="FILE", help="an archive of ctx backup"), STATE),
        do_restore,
        "Stop ctxd first. Agents that lived when the backup was made are then dead, with the"
        " outcome interrupted.",
    ),
)
