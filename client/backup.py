"""The commands backup and restore: a copy of the daemon's state, while it runs.

The daemon has no part in a backup: it is read beside it, by the user whose the state is. The
database is copied first, by SQLite, as it is at one moment. Everything else is copied after that,
and may be newer: a restore cuts histories off where the database ends.
"""

from __future__ import annotations

import os
import time

from client.declaring import Arguments, command, flag, operand, option
from client.exits import FAILED, OK, Failure, Misuse
from client.files import find_program, first_line
from client.output import STDERR, STDOUT, decode
from client.root import Root
from client.types import Any, Database, Iterable, Iterator, Sequence
from client.words import SCHEMA, VERSION

#: of the archive
FORMAT = 1
MANIFEST = "ctxfs-backup.json"
DATABASE = "ctxfs.db"
#: agents that have not been removed
AGENTS = "SELECT COUNT(*) FROM agents WHERE removed=0"
#: the number of the last event
LAST = "SELECT COALESCE(MAX(seq), 0) FROM outbox"
HELD = "SELECT lines FROM held"
#: below the state, what is not made anew
TREES = ("agent", "events", "home", "tree")
#: the same of an archive that an older version made; the daemon moves what is there
OLDER = (*TREES, "shared")
#: what an empty state may have
ALWAYS = ("lock", "reserve", "lost+found")
RESTORING = "restoring"
#: what users own themselves
FILES = ("tree/*/*",)
#: all that tar knows of a file; numbers, because other machines have other users
KEPT = ("--acls", "--xattrs", "--xattrs-include=user.*", "--numeric-owner")
#: files change, and go, while they are read; sockets mean nothing in a copy
QUIET = ("no-file-changed", "no-file-removed", "no-file-ignored", "no-file-shrank")
#: by the end of a name, as tar itself would choose it
COMPRESSED = {
    ".gz": "--gzip", ".tgz": "--gzip", ".zst": "--zstd", ".tzst": "--zstd", ".xz": "--xz",
    ".txz": "--xz", ".bz2": "--bzip2", ".tbz2": "--bzip2", ".lz": "--lzip", ".lzma": "--lzma",
}  # fmt: skip
#: bytes of a path that no call takes: nothing could be restored there, and a tree that is much
#: deeper ends tar, which calls itself for each directory
TOO_LONG = 4096
DEEPER = "?" * TOO_LONG + "*"
#: where the copy of the database waits, which may be large: nobody else can replace it there
STAGE = "/var/tmp"
#: an agent may hold a directory of a tree for as long as it likes: then the tree is left out
HELD_SECONDS = 60.0
#: between two lines of progress
PROGRESS_SECONDS = 10
LINES_SHOWN = 10

STATE = option("--state", "DIR", "the state directory of ctxd, if not the default")


def default_state() -> str:
    """Return where a ctxd of this user keeps its state if no option says so."""
    if os.getuid() == 0:
        return "/var/lib/ctxfs"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(home, "ctxfs")


class HeldError(Exception):
    """A program waits for something in a tree, which is `tree` from the state."""

    def __init__(self, tree: str) -> None:
        super().__init__(tree)
        self.tree = tree


def tree_read(pid: int, state: str) -> str:
    """Return which durable tree of a state a process has open; a `Failure` if it has none."""
    from contextlib import suppress

    above = os.path.join(os.path.realpath(state), "tree", "")
    for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int, reverse=True):
        path = ""
        with suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{name}")
        kind, *parts = path.removeprefix(above).split("/")
        if path.startswith(above) and len(parts) >= (count := 2 if kind == "agent" else 1):
            return "/".join(("tree", kind, *parts[:count]))
    raise Failure(f"{state}: cannot be read any further")


class Archive:
    """An open archive, and the programs that read and write it: tar(1), and find(1) before it.

    `state` is what it is made of, if it is not there yet.
    """

    def __init__(self, fd: int, state: str = "") -> None:
        self.fd = fd
        self.state = state
        self.told = time.monotonic()

    def run(self, name: str, words: Sequence[str], directory: str) -> tuple[bytes, list[str]]:
        """Run a program, and return what it prints, and its complaints; `HeldError` if it does not
        get any further in the state."""
        import subprocess

        environment = {**os.environ, "LC_ALL": "C"}
        environment.pop("TAR_OPTIONS", None)
        try:
            process = subprocess.Popen(
                [find_program(name) or f"/bin/{name}", *words],
                cwd=directory,
                env=environment,
                pass_fds=(self.fd,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise Failure(f"{name}: {error.strerror}; apt-get install tar findutils") from None
        before, since = "", time.monotonic()
        try:
            while process.returncode is None:
                try:
                    output, errors = process.communicate(timeout=1 if self.state else None)
                except subprocess.TimeoutExpired:
                    reached = self.progress(process.pid)
                    if reached != before:
                        before, since = reached, time.monotonic()
                    elif time.monotonic() - since > HELD_SECONDS:
                        raise HeldError(tree_read(process.pid, self.state)) from None
        except BaseException:
            process.kill()
            raise
        lines = decode(errors).splitlines()
        if process.returncode not in (0, 1) and not lines:
            lines = [f"{name}: ended with status {process.returncode}"]
        return output, lines

    def progress(self, pid: int) -> str:
        """Return how far a program is, and tell it now and then."""
        size = os.fstat(self.fd).st_size
        if time.monotonic() - self.told > PROGRESS_SECONDS and os.isatty(2):
            self.told = time.monotonic()
            STDERR.lines([f"{size} bytes so far"])
        # what it has used of the processor, see proc(5)
        return f"{size} {first_line(f'/proc/{pid}/stat').rpartition(')')[2].split()[11:13]}"

    def tar(self, words: Sequence[str], directory: str = "/") -> tuple[bytes, list[str]]:
        """Run tar(1) on the archive."""
        return self.run("tar", [f"--file=/dev/fd/{self.fd}", *words], directory)

    def write(self, staged: str, compression: Sequence[str], left_out: Sequence[str]) -> list[str]:
        """Write the state but what is left out, and return the complaints; `HeldError`."""
        trees = [f"./{name}" for name in TREES if os.path.isdir(os.path.join(self.state, name))]
        skipped = [word for path in left_out for word in ("-path", f"./{path}", "-prune", "-o")]
        sought = (*skipped, "-path", DEEPER, "-prune", "-print0", "-quit")
        deep, _ = self.run("find", [*trees, *sought], self.state)
        shown = f"left out: files whose paths are too long, such as {decode(deep[:100])}..."
        _, complaints = self.tar(
            [
                *("--create", *compression, "--format=pax", "--sparse"),
                *("--one-file-system", "--ignore-failed-read", *KEPT),
                *(f"--warning={word}" for word in QUIET),
                *("--anchored", "--wildcards-match-slash", f"--exclude={DEEPER}"),
                *("--no-wildcards-match-slash", *(f"--exclude=./{path}" for path in left_out)),
                *(f"--directory={staged}", MANIFEST),
                *(f"--directory={self.state}", *trees),
                # last: an archive without it is not whole
                *(f"--directory={staged}", DATABASE),
            ],
            staged,
        )
        return [shown, *complaints] if deep else complaints

    def lacks(self) -> str:
        """Return what it lacks to be whole, or an empty text."""
        listed, complaints = self.tar(("--list", MANIFEST, DATABASE))
        if listed.split() == [MANIFEST.encode(), DATABASE.encode()] and not complaints:
            return ""
        return complaints[0] if complaints else "it is not a whole backup"

    def manifest(self, file: str) -> dict[str, Any]:
        """Return what it says of itself; a `Failure` if it is no backup, or too new."""
        import json

        said, _ = self.tar(("--extract", "--to-stdout", "--occurrence=1", MANIFEST))
        try:
            manifest: dict[str, Any] = json.loads(said)
            version = str(manifest["version"])
            form, schema = int(manifest["format"]), int(manifest["schema"])
        except (ValueError, TypeError, KeyError):
            raise Failure(f"{file} is not a backup of ctxfs") from None
        if form > FORMAT or schema > SCHEMA:
            what = f"{file} was made by ctxfs {version}, which is newer than this one ({VERSION})"
            raise Failure(f"{what}; install that version, or a newer one")
        return manifest


def show_complaints(lines: Sequence[str]) -> None:
    """Show the first of what tar said; the names in it are agents' own."""
    STDERR.lines(lines[:LINES_SHOWN])
    if len(lines) > LINES_SHOWN:
        STDERR.lines([f"... {len(lines) - LINES_SHOWN} more"])


def check_own(state: str) -> None:
    """Fail if a state is another user's, who could change it under the hands of this one."""
    try:
        owner = os.stat(state).st_uid
    except OSError:
        return  # told by who needs it
    if owner != os.geteuid():
        raise Failure(f"{state} belongs to uid {owner}: run this as that user")


def copy_database(state: str, to: str) -> tuple[int, int]:
    """Copy the database as it is now, and return its schema and the number of agents.

    The daemon goes on: in WAL mode, a reader holds up no writer. But its log grows until this has
    been read, so the disk is not waited for.
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
            target.execute("PRAGMA synchronous=OFF")
            target.execute("PRAGMA journal_mode=OFF")
            source.backup(target)
            # the copy has no log beside it
            target.execute("PRAGMA journal_mode=DELETE")
            return number(target, "PRAGMA user_version"), number(target, AGENTS)
    except sqlite3.Error as error:
        raise Failure(f"{path}: {error}") from None


def number(db: Database, query: str) -> int:
    """Return the only number that a query gives."""
    return int(db.execute(query).fetchone()[0])


@command(
    "backup",
    operand("file", "FILE", "a tar archive; .gz or .zst compresses it"),
    STATE,
    flag("--records", "leave out the files of users: durable homes, home/UID/data, shared spaces"),
)
def do_backup(root: Root, args: Arguments) -> int:
    """Copy the state of ctxd to a file, while it runs.

    Run it as root, or as the user of ctxd. Agents, histories and messages are as they were at
    one moment; documents, such as results, and output may be as they were later.
    """
    import tempfile
    from contextlib import suppress

    state = os.path.abspath(args.state or default_state())
    file = os.path.abspath(args.file)
    directory, name = os.path.split(file)
    if os.path.commonpath((os.path.realpath(directory), os.path.realpath(state))) == (
        os.path.realpath(state)
    ):
        raise Misuse(f"{file} is below the state: choose a file elsewhere")
    check_own(state)
    try:
        # only by its descriptor from here on: somebody else may own the directory
        fd, made = tempfile.mkstemp(prefix=f".{name}.", dir=directory)
    except OSError as error:
        raise Failure(f"{directory}: {error.strerror}") from None
    archive = Archive(fd, state)
    try:
        stage = STAGE if os.path.isdir(STAGE) else None
        with tempfile.TemporaryDirectory(prefix="ctx-backup.", dir=stage) as staged:
            agents, complaints = write_archive(archive, staged, name, args.records)
        if missing := Archive(fd).lacks():
            show_complaints(complaints)
            raise Failure(f"{file}: not written: {missing}")
        os.fsync(fd)
        size = os.fstat(fd).st_size
        os.replace(made, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(made)
        raise
    finally:
        os.close(fd)
    show_complaints(complaints)
    STDOUT.lines([f"{args.file}: {agents} agents, {size} bytes"])
    return FAILED if complaints else OK


def write_archive(archive: Archive, staged: str, name: str, records: bool) -> tuple[int, list[str]]:
    """Write a copy of a state, compressed as the name of the archive says; with `records`, without
    files of users. Return the number of agents and what there is to complain about.
    """
    import json

    schema, agents = copy_database(archive.state, os.path.join(staged, DATABASE))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "schema": schema,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "agents": agents,
        "files": not records,
    }
    with open(os.path.join(staged, MANIFEST), "w", encoding="utf-8") as written:
        json.dump(manifest, written)
    compression = COMPRESSED.get(os.path.splitext(name)[1], "")
    users, held = (FILES if records else ()), list[str]()
    while True:
        try:
            complaints = archive.write(staged, compression.split(), [*users, *held])
            break
        except HeldError as error:
            held.append(error.tree)
    text = "something holds it; stop the agents that have it, and make another backup"
    return agents, [*complaints, *(f"left out: {tree}: {text}" for tree in held)]


def open_archive(file: str) -> int:
    """Return a descriptor of a backup; a `Failure` if others could have written it.

    What is in it decides as whom agents run.
    """
    import stat

    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    remedy = "if you trust it, restore a copy of your own"
    if not stat.S_ISREG(found.st_mode):
        raise Failure(f"{file} is not a regular file")
    if found.st_uid not in (0, os.geteuid()):
        raise Failure(f"{file} belongs to uid {found.st_uid}: {remedy}")
    if found.st_mode & 0o022:
        raise Failure(f"{file} can be written by others: {remedy}")
    return fd


def lock_state(state: str) -> int:
    """Return a descriptor that keeps every ctxd from a state, which must be empty."""
    import fcntl

    os.makedirs(state, 0o700, exist_ok=True)
    check_own(state)
    fd = os.open(os.path.join(state, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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


@command("restore", operand("file", "FILE", "an archive of ctx backup"), STATE)
def do_restore(root: Root, args: Arguments) -> int:
    """Put a backup into an empty state.

    Stop ctxd first. Agents that lived when the backup was made are then dead, with the outcome
    interrupted.
    """
    state = os.path.abspath(args.state or default_state())
    file = os.path.abspath(args.file)
    fd = open_archive(file)
    archive = Archive(fd)
    manifest = archive.manifest(file)
    lock = lock_state(state)
    staged = os.path.join(state, RESTORING)
    try:
        remove_tree(staged)  # of one that was killed
        os.mkdir(staged, 0o700)
        options = ("--preserve-permissions", "--same-owner", "--delay-directory-restore", *KEPT)
        _, complaints = archive.tar(("--extract", *options), staged)
        if not os.path.exists(os.path.join(staged, DATABASE)):
            show_complaints(complaints)
            raise Failure(f"the backup is not whole: nothing was restored ({DATABASE} is missing)")
        check_trees(staged)
        agents = fit_histories(staged)
        os.unlink(os.path.join(staged, MANIFEST))
        os.chmod(state, 0o700)  # before anybody finds something in it
        os.sync()
        # the database last: a state without it is empty
        for name in (*OLDER, DATABASE):
            if os.path.exists(os.path.join(staged, name)):
                os.rename(os.path.join(staged, name), os.path.join(state, name))
        os.sync()
    finally:
        remove_tree(staged)
        os.close(lock)
        os.close(fd)
    show_complaints(complaints)
    made = manifest.get("made")
    STDOUT.lines([f"{state}: {agents} agents as of {made}; start the daemon: systemctl start ctxd"])
    return FAILED if complaints else OK


def check_trees(staged: str) -> None:
    """Fail if an archive has a link where there has to be a directory: it leads elsewhere."""
    home = os.path.join(staged, "home")
    owners = os.listdir(home) if os.path.isdir(home) and not os.path.islink(home) else []
    below = [f"home/{owner}{part}" for owner in owners for part in ("", "/agent")]
    logs = os.path.join(staged, "events")
    below += [f"events/{owner}" for owner in (os.listdir(logs) if os.path.isdir(logs) else ())]
    for name in (*OLDER, DATABASE, MANIFEST, *below):
        if os.path.islink(os.path.join(staged, name)):
            raise Failure(f"this is no backup of ctxfs: {name} is a link; nothing was restored")


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
            agents = number(db, AGENTS)
            last = number(db, LAST)
            for (lines,) in db.execute(HELD):
                last = max(last, json.loads(lines.splitlines()[-1]).get("seq", 0))
    except sqlite3.Error as error:
        raise Failure(f"the backup is not whole: nothing was restored ({error})") from None
    for key, path in session_directories(state):
        session = kept.get(key)
        if session is None:  # begun after the copy of the database
            remove_tree(path)
            continue
        for kind in ("events", "messages"):
            history = os.path.join(path, f"{kind}.jsonl")
            if session.get("held") is None:
                cut_history(history, b'{"id":"' + kind[:1].encode(), session.get(kind, 0))
            elif os.path.lexists(history):  # the database has it
                os.unlink(history)
    logs = os.path.join(state, "events")
    for owner in entries(logs):
        for file in os.listdir(os.path.join(logs, owner)):
            cut_history(os.path.join(logs, owner, file), b'{"seq":', last)
    return agents


def session_directories(state: str) -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield owner, agent and session of each directory of a session, and its path."""
    for owner in entries(os.path.join(state, "home")):
        agents = os.path.join(state, "home", owner, "agent")
        for agent in entries(agents):
            for name in entries(os.path.join(agents, agent)):
                if name != ".home":  # of an older version, the durable homes
                    yield (owner, agent, name), os.path.join(agents, agent, name)


def entries(directory: str) -> Iterable[str]:
    """Return the names of the directories in a directory, none if it is missing."""
    try:
        with os.scandir(directory) as found:
            return sorted(each.name for each in found if each.is_dir(follow_symlinks=False))
    except OSError:
        return ()


def cut_history(path: str, front: bytes, last: int) -> None:
    """Cut off a file of lines after the one that has this number behind the front of each line.

    What the database has and the file has not, the daemon adds at its start. So a line that is
    not whole is cut off as well.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with open(fd, "r+b") as file:
        position = end = 0
        for line in file:
            position += len(line)
            mark, _, rest = line.partition(front)
            digits = rest[: len(rest) - len(rest.lstrip(b"0123456789"))]
            if line.endswith(b"\n") and not mark and digits and int(digits) <= last:
                end = position
        file.truncate(end)
