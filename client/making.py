"""The agent that a command line of spawn or run describes: by a program, or by a recipe."""

from __future__ import annotations

import errno
import os

from client.agents import Line, Value, assignments, check_paths, fill, parent_line
from client.arguments import CWD, ENV, PARENT, one_of
from client.declaring import Arguments, option
from client.exits import FAILED, USAGE, Failure
from client.files import value_of
from client.output import complain
from client.root import Root, agent, label, own_agent
from client.types import Callable, Iterator, Sequence
from client.words import AGENT_FILES, LIVES, MODES, MOUNT_MODES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from client.recipes import Recipe

Files = list[tuple[str, Value]]
#: a name, and the control files of an agent of that name
Making = tuple[str, Files]

#: files to which an option adds lines; others it replaces
ADDED = ("mount", "env", "limits")
#: names that are tried for an agent of a recipe
NAMES_MAX = 100


def mount_line(text: str) -> str:
    """Return the line of a `mount` file for SRC[:TARGET[:ro|rw|hide]], also SRC:ro|rw|hide.

    SRC may also be shared:SPACE or home:, and needs a TARGET then.
    """
    parts = text.split(":")
    mode = parts.pop() if len(parts) > 1 and parts[-1] in MOUNT_MODES else "ro"
    if any(char in text for char in "\t\n"):
        parts = []
    if len(parts) == 3 and ((parts[0] == "shared" and parts[1]) or parts[:2] == ["home", ""]):
        return "\t".join((":".join(parts[:2]), parts[2], mode, "-"))
    if not 0 < len(parts) <= 2 or not all(parts):
        raise Failure(f'"{text}" is not SRC[:TARGET[:ro|rw|hide]]', USAGE)
    source = os.path.abspath(parts[0])
    return "\t".join((source, parts[1] if len(parts) == 2 else source, mode, "-"))


def quoted(words: Sequence[str]) -> str:
    """Return words of a command as a part of an `exec` line."""
    import shlex

    line = shlex.join(words)
    if "\n" in line:
        raise Failure("an argument contains a newline, which an exec line cannot contain", USAGE)
    return line


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
    return {file: items for file, items in lines.items() if items}


def program_files(args: Arguments) -> Files:
    """Return the control files of an agent for the program after --."""
    if args.network is not None or args.name is not None:
        raise Failure("--name and --network need --agent", USAGE)
    if len(args.words) != 1:
        raise Failure("give the NAME of the agent, and its program after --", USAGE)
    if not args.program:
        raise Failure("no program: give one after --, or a recipe with --agent", USAGE)
    lines = option_lines(args)
    files: Files = [*parent_line(args.parent), *assignments(args.set)]
    files += [(file, value_of("\n".join(items))) for file, items in lines.items()]
    return [*files, ("exec", value_of(quoted(args.program)))]


def recipe_files(args: Arguments, recipe: Recipe, name: str, network: str) -> Files:
    """Return the control files of an agent of a recipe: its own, then as the options say."""
    from client.recipes import agent_lines

    settings = dict(assignments(args.set))
    subject = (settings.get("label") or b"").decode().strip()
    lines = agent_lines(recipe, name, network=network, label=subject)
    if not args.name:  # a home is of a name, and the next one of this name is another's
        lines.pop("homedir", None)
    for file, items in option_lines(args).items():
        more = [Line(item, f"the options for {file}") for item in items]
        lines[file] = [*lines.get(file, ()), *more] if file in ADDED else more
    if args.program:
        lines["exec"][-1].text += " " + quoted(args.program)
    order = sorted(lines.keys() - settings.keys(), key=AGENT_FILES.index)
    files: Files = [*parent_line(args.parent), *settings.items()]
    return files + [(file, lines[file]) for file in order]


def chosen_network(root: Root, args: Arguments, recipe: Recipe) -> str:
    """Return the network for an agent of a recipe; fail if this machine lacks what it needs."""
    from client import recipes

    missing = list(recipes.lacking_programs(recipe))
    network = recipes.network_for(root, recipe, args.network)
    if not network:
        names = " or ".join(recipe.networks) if args.network is None else f'"{args.network}"'
        missing.append(
            f"network: {names} is not configured; --network default gives the agent all of the "
            "host's, and --network none gives it none"
        )
    elif recipes.needs_keys(network):
        missing += recipes.lacking_keys(recipe, [line.partition("=")[0] for line in args.env])
    if missing:
        raise Failure(f"the recipe {recipe.name} lacks {'; '.join(missing)}", FAILED)
    return network


def check_directory(recipe: Recipe) -> None:
    """Fail if the recipe lets an agent write where its user's settings are."""
    from client.recipes import check_place

    if any("@cwd@" in line.text for lines in recipe.lines.values() for line in lines):
        remedy = "change to the directory of a project, or use --workspace"
        check_place(recipe, os.getcwd(), remedy)


def made_up_names(root: Root, recipe: Recipe) -> Iterator[str]:
    """Yield names for an agent; what an agent makes has a name that begins with its own."""
    own = own_agent(root)
    stem = f"{own}-{recipe.name}" if own else recipe.name
    for number in range(1, NAMES_MAX + 1):
        if not root.present(agent(f"{stem}-{number}")):
            yield f"{stem}-{number}"


def value(files: Files, file: str) -> str:
    """Return what a file of one line is to say, empty if it is not written."""
    for name, content in reversed(files):
        if name == file:
            text = content.decode() if isinstance(content, bytes) else content[-1].text
            return text.removesuffix("\n")
    return ""


def possible(root: Root, args: Arguments, fitted: Callable[[Files], Files]) -> Iterator[Making]:
    """Yield the name and the control files of the agent, as `fitted` makes them, for each name that
    it may get."""
    if not args.agent:
        files = fitted(program_files(args))
        yield args.words[0], files
        return
    from client.recipes import find

    recipe = find(args.agent)
    network = chosen_network(root, args, recipe)
    if not (args.cwd or args.workspace):
        check_directory(recipe)
    for name in [args.name] if args.name else made_up_names(root, recipe):
        yield name, fitted(recipe_files(args, recipe, name, network))


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


def make(root: Root, args: Arguments, makings: Iterator[Making], *last: tuple[str, Value]) -> str:
    """Create the agent under the first of its possible names that is free, and return its path.

    `last` is written after its files.
    """
    refused: Failure | None = None
    for name, files in makings:
        owner, written = agent(name), [*files, *last]
        check_paths(owner, written)
        try:
            root.call(owner, os.mkdir)
        except Failure as failure:
            # taken meanwhile, or with a history that is another user's
            if failure.number not in (errno.EEXIST, errno.EACCES):
                raise
            refused = failure
            continue
        fill(root, owner, written)
        if args.agent:
            warn_of_directory(root, owner)
        return owner
    raise refused or Failure(f"no name for an agent of the recipe {args.agent} is free")


MAKING_OPTIONS = (
    PARENT,
    option("--agent", "RECIPE", "make it by this recipe; see: ctx agents"),
    option("--name", "NAME", "of the agent of a recipe; default: RECIPE-1, -2, ..."),
    option(
        "--network",
        "NETWORK",
        "of the agent of a recipe: a configured one, default (all of the host's) or none",
    ),
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
