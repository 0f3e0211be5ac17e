"""The agent that a command line of spawn or run describes: by a program, or by a recipe."""

from __future__ import annotations

import errno
import os

from client.agents import Value, assignments, begin, check_paths, fill, parent_line
from client.author import author_line
from client.declaring import CWD, ENV, PARENT, Arguments, flag, one_of, option
from client.exits import Failure, Misuse
from client.files import value_of
from client.output import complain
from client.root import Root, agent, label
from client.types import Iterator, Sequence
from client.words import LIVES, MODES, MOUNT_MODES

Files = list[tuple[str, Value]]
#: a name, and the control files of an agent of that name
Making = tuple[str, Files]


def mount_line(text: str) -> str:
    """Return the line of a `mount` file for SRC[:TARGET[:ro|rw|hide]], also SRC:ro|rw|hide.

    SRC may also be shared:SPACE, home: or node:DIRECTORY, and needs a TARGET then.
    """
    parts = text.split(":")
    mode = parts.pop() if len(parts) > 1 and parts[-1] in MOUNT_MODES else "ro"
    if any(char in text for char in "\t\n"):
        parts = []
    places = parts[:1] in (["shared"], ["node"]) and parts[1:2] != [""]
    if len(parts) == 3 and (places or parts[:2] == ["home", ""]):
        return "\t".join((":".join(parts[:2]), parts[2], mode, "-"))
    if not 0 < len(parts) <= 2 or not all(parts):
        raise Misuse(f'"{text}" is not SRC[:TARGET[:ro|rw|hide]]')
    source = os.path.abspath(parts[0])
    return "\t".join((source, parts[1] if len(parts) == 2 else source, mode, "-"))


def command_of(words: Sequence[str]) -> str:
    """Return words of a command as a part of an `exec` line."""
    return " ".join(map(quoted, words))


def quoted(word: str) -> str:
    """Return a word as in sh(1), or as $'...' if only that can hold it on a line of text."""

    def special(char: str) -> bool:
        return char < " " or "\udc80" <= char <= "\udcff"  # a byte that is not UTF-8

    if not any(map(special, word)):
        plain = word.isascii() and all(char.isalnum() or char in "-@%_+=:,./" for char in word)
        return word if word and plain else "'" + word.replace("'", "'\"'\"'") + "'"
    shown = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    shown = "".join(f"\\x{ord(char) & 255:02x}" if special(char) else char for char in shown)
    return f"$'{shown}'"


def option_lines(args: Arguments) -> dict[str, list[str]]:
    """Return the lines that options give, by control file."""
    lines = {
        "mount": [mount_line(text) for text in args.mount],
        "env": args.env,
        "cwd": [os.path.abspath(args.cwd)] if args.cwd else [],
        "limits": args.limit + ([f"timeout={args.timeout}"] if args.timeout else []),
    }
    for file in ("life", "restart", "mode", "context", "workspace", "model"):
        lines[file] = list(filter(None, [getattr(args, file)]))
    for file, items in lines.items():
        for item in items:
            if "\n" in item:
                raise Misuse(f"{item!a} has a newline, which a line of {file} cannot have")
    return {file: items for file, items in lines.items() if items}


def place_line(args: Arguments) -> Files:
    """Return what --node says: before the files of which it decides what they can be."""
    return [("placement", value_of(f"node={args.node}"))] if args.node else []


def by_program(args: Arguments) -> Making:
    """Return the agent for the program after --."""
    if args.network is not None:
        network = f"allow NAME_t network:{args.network} connect"
        raise Misuse(f"--network needs --agent; without a recipe, say --set 'policy={network}'")
    if args.name is not None:
        raise Misuse("--name needs --agent; without a recipe, the first word is the name")
    if len(args.words) != 1:
        raise Misuse("give the NAME of the agent, and its program after --")
    if not args.program:
        raise Misuse("no program: give one after --, or a recipe with --agent")
    lines = option_lines(args)
    files: Files = [*parent_line(args.parent), *place_line(args), *assignments(args.set)]
    files += [(file, value_of("\n".join(items))) for file, items in lines.items()]
    return args.words[0], [*files, ("exec", value_of(command_of(args.program)))]


def value(files: Files, file: str) -> str:
    """Return what a file of one line is to say, empty if it is not written."""
    for name, content in reversed(files):
        if name == file:
            text = content.decode() if isinstance(content, bytes) else content[-1].text
            return text.removesuffix("\n")
    return ""


def warn_of_directory(root: Root, owner: str) -> None:
    """Say so if an agent that is to work in the current directory cannot change anything there."""
    uid, gid = root.value(f"{owner}/uid"), root.value(f"{owner}/gid")
    workspace = root.value(f"{owner}/workspace")
    here = os.path.realpath(os.getcwd())
    if not (uid.isdigit() and gid.isdigit()) or workspace != f"explicit_root:{here}":
        return
    st = os.stat(here)
    bits = 0o200 if st.st_uid == int(uid) else 0o020 if st.st_gid == int(gid) else 0o002
    if not st.st_mode & bits:
        complain(
            f"{label(owner)} has uid {uid}, which cannot change {here}; to let it, give it the "
            "directory (chown), or another uid (--set uid=N --set gid=N)"
        )


def make(
    root: Root,
    args: Arguments,
    makings: Iterator[Making],
    *last: tuple[str, Value],
    own: bool = False,
) -> str:
    """Create the agent under the first of its possible names that is free, and return its path.

    `last` is written after its files. One's `own` goes with this process.
    """
    refused: Failure | None = None
    for name, files in makings:
        owner, written = agent(name), [*files, *author_line(files), *last]
        check_paths(owner, written)
        try:
            made = begin(root, owner)
        except Failure as failure:
            # taken meanwhile, or with a history that is another user's
            if failure.number not in (errno.EEXIST, errno.EACCES):
                raise
            refused = failure
            continue
        with made:
            root.hold(owner)
            if own:
                from client.sockets import open_window

                root.window = open_window(root, owner)
            fill(root, owner, written)
        if args.agent:
            warn_of_directory(root, owner)
        return owner
    raise refused or Failure(f"no name for an agent of the recipe {args.agent} is free")


MAKING_OPTIONS = (
    PARENT,
    option("--agent", "RECIPE", "make it by this recipe; see: ctx agents"),
    option("--node", "NODE", "the machine at which it runs, or PREFIX*; see: ctx nodes list"),
    option("--name", "NAME", "of the agent of a recipe; default: RECIPE-1, -2, ..."),
    option(
        "--network",
        "NETWORK",
        "of the agent of a recipe: a configured one, default (all of the host's) or none",
    ),
    flag("--ask", "of the agent of a recipe: it asks what it may not do by itself; see: ctx asks"),
    option(
        "--mount",
        "SRC:TARGET:MODE...",
        f"mount a path, shared:SPACE or home: in its sandbox; MODE is {one_of(MOUNT_MODES)}",
    ),
    ENV,
    CWD,
    option("--set", "FILE=VALUE...", "write a control file"),
    option("--timeout", "DURATION", "end it after this time"),
    option("--limit", "K=V...", "limit it, such as memory.max=1G"),
    option("--restart", "WHEN", "when to start it again: on-failure or always; not for a child"),
    option("--life", "LIFE", f"of a child: {one_of(LIVES)}", words=LIVES),
    option("--mode", "MODE", f"how it runs: {one_of(MODES)}", words=MODES),
    option(
        "--context",
        "CONTEXT",
        "what a child knows at first: fresh or fork",
        words=("fresh", "fork"),
    ),
    option(
        "--workspace",
        "WORKSPACE",
        "where it works: inherit, worktree or explicit_root:/DIR",
        words=("inherit", "worktree"),
    ),
    option("--model", "MODEL", "the model that it uses"),
)
