"""Recipes: directories with the files that an agent is made of, and what they need here."""

from __future__ import annotations

import os

from client.agents import Line, assignments, parent_line
from client.commands import meant
from client.declaring import LISTING, Arguments, command
from client.exits import Failure, Misuse
from client.files import find_program, pairs, read_limited
from client.making import Files, Making, command_of, option_lines, place_line
from client.output import headed, show_rows
from client.root import Root, agent, own_agent
from client.shipped import find_shipped
from client.types import Any, Callable, Iterator, Sequence
from client.words import AGENT_FILES

#: what a recipe has besides files of an agent
EXTRAS = ("README.md", "needs", "files")
#: options, and the directories of a recipe whose files replace its own with them
VARIANTS = ("ask", "tty")
#: the directories that every sandbox shows, where a program needs no line of `mount`
SHOWN = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/")
MODULES = "/node_modules/"
#: bytes of a file of a recipe
FILE_MAX = 1 << 20
#: files to which an option adds lines; others it replaces
ADDED = ("mount", "env", "limits")
#: names that are tried for an agent of a recipe
NAMES_MAX = 100
NO_NETWORK = "none"
OTHER_NETWORKS = (
    "; --network default gives the agent all of the host's, and --network none gives it none"
)
DEFAULT_NETWORK = "default"  # all of the host's


class Recipe:
    """A recipe, as its directory has it."""

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.name = os.path.basename(self.directory)
        #: of each file of an agent that it has
        self.lines: dict[str, list[Line]] = {}
        #: with the oldest major version that will do, 0 for any
        self.programs: dict[str, int] = {}
        #: of each group, one variable is needed
        self.keys: list[list[str]] = []
        #: the first one that is configured is used
        self.networks: list[str] = []
        #: the variants that it has
        self.variants: list[str] = []

    @property
    def summary(self) -> str:
        """The title of its README."""
        try:
            text = read_limited(f"{self.directory}/README.md", FILE_MAX).decode()
        except (OSError, UnicodeDecodeError):
            return ""
        return text.partition("\n")[0].lstrip("# ")


# finding and reading them


def directories() -> list[str]:
    """Return the directories of recipes: the user's, the machine's, and what came with ctxfs."""
    own, shipped = own_directory(), find_shipped("contrib/agents", "ctxfs/agents")
    return [
        *([own] if is_own(own) else []), "/etc/ctxfs/agents", *([shipped] if shipped else [])
    ]  # fmt: skip


def own_directory() -> str:
    """Return the directory of the user's recipes."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(config, "ctxfs", "agents")


def is_own(directory: str) -> bool:
    """Return whether nobody else may change a directory: the caller may have another user's
    environment, and a link of that user's may lead to a directory of everybody's."""
    try:
        st = os.stat(directory)
    except OSError:
        return True
    return st.st_uid == os.getuid() and not st.st_mode & 0o002


def places() -> dict[str, str]:
    """Return the directory of each recipe by name; the first one of a name counts."""
    found: dict[str, str] = {}
    for directory in directories():
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in names:
            path = os.path.join(directory, name)
            if name.startswith(".") or not os.path.isdir(path):
                continue
            if directory != own_directory() or is_own(path):
                found.setdefault(name, path)
    return found


def find(name: str, variants: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a name, or of a directory if it has a slash, in its variants."""
    directory = name if "/" in name else places().get(name)
    if directory is None or not os.path.isdir(directory):
        looked = "" if "/" in name else f" in {', '.join(directories())}"
        like = meant(name, places())
        raise Misuse(f'no recipe "{name}"{looked}{like or "; see: ctx agents"}')
    return read(directory, variants)


def read(directory: str, variants: Sequence[str] = ()) -> Recipe:
    """Return what the files in a directory say; fail with the file and line of a mistake."""
    recipe = Recipe(directory)
    names = names_in(recipe.directory)
    recipe.variants = [name for name in VARIANTS if os.path.isdir(f"{recipe.directory}/{name}")]
    add_files(recipe, recipe.directory, names, EXTRAS)
    for variant in recipe.variants:
        if variant in variants:
            place = f"{recipe.directory}/{variant}"
            add_files(recipe, place, names_in(place))
    if not recipe.lines.get("exec"):
        raise Misuse(f"{recipe.directory}/exec: missing or empty: it names the program")
    for line in (line for lines in recipe.lines.values() for line in lines):
        check_words(recipe, line)
    return recipe


def add_files(
    recipe: Recipe, place: str, names: Sequence[str], others: Sequence[str] = ()
) -> None:
    """Take the files of a recipe, or of a variant, which replace those that are there."""
    for name in names:
        path = f"{place}/{name}"
        if name == "needs":
            for line in lines_of(path):
                add_need(recipe, line)
        elif name in AGENT_FILES and not (name in recipe.variants and place == recipe.directory):
            recipe.lines[name] = list(lines_of(path))
        elif name not in (*others, *recipe.variants) and not name.startswith("."):
            raise no_file(path, others)


def names_in(directory: str) -> list[str]:
    """Return the names of the files of a recipe."""
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        raise Misuse(f"{directory}: {error.strerror}") from None


def no_file(path: str, others: Sequence[str] = ()) -> Misuse:
    """Return the failure of a file that does not belong in a recipe."""
    also = f", nor {', '.join(others)}" if others else ""
    return Misuse(f"{path}: not a file that sets an agent up{also}: put other files into files/")


def lines_of(path: str) -> Iterator[Line]:
    """Yield the lines of a file, without blank ones and comments."""
    try:
        text = read_limited(path, FILE_MAX).decode()
    except OSError as error:
        raise Misuse(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Misuse(f"{path}: not UTF-8") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield Line(line, f"{path}:{number}")


def add_need(recipe: Recipe, line: Line) -> None:
    """Take a line of `needs`."""
    kind, *words = line.text.split()
    version = words.pop() if kind == "program" and len(words) == 2 else "0"
    if kind == "program" and len(words) == 1 and version.isascii() and version.isdigit():
        recipe.programs[words[0]] = int(version)
    elif kind == "key" and words:
        recipe.keys.append(words)
    elif kind == "network" and words:
        recipe.networks += words
    else:
        raise Misuse(
            f'{line.where}: "{line.text}" is not: program NAME [MAJOR_VERSION], '
            "key VARIABLE..., or network NAME..."
        )


# what stands for a part of a line


def each_word(text: str, replace: Callable[[str], str]) -> str:
    """Return a text with each @WORD@ replaced."""
    import re

    return re.sub(r"@([a-z]+(?::[^@\s]+)?)@", lambda match: replace(match[1]), text)


def one_field(text: str, what: str) -> str:
    """Return a text that becomes a part of a line; fail if it would begin another line or field.

    Names of directories and programs may have both, and whoever made them is not the user.
    """
    if "\n" in text or "\t" in text:
        raise Misuse(f"{what}: {text!a} has a newline or a TAB: use another path")
    return text


WORDS = ("name", "label", "cwd", "files", "network")


def check_words(recipe: Recipe, line: Line) -> None:
    """Fail if a line has an unknown word, or a program that `needs` does not have."""

    def check(word: str) -> str:
        kind, colon, name = word.partition(":")
        if kind == "program" and colon and name not in recipe.programs:
            message = f'{line.where}: @{word}@: add "program {name}" to needs'
            raise Misuse(message)
        if word not in WORDS and not (kind == "program" and colon):
            known = ", ".join(f"@{word}@" for word in (*WORDS, "program:NAME"))
            raise Misuse(f"{line.where}: @{word}@ is not one of {known}")
        return ""

    each_word(line.text, check)


def check_place(recipe: Recipe, directory: str, remedy: str) -> None:
    """Fail if an agent that may write a directory could change what its user runs next."""
    here, home = os.path.realpath(directory), os.path.realpath(os.path.expanduser("~"))
    if (home + "/").startswith(here.rstrip("/") + "/"):
        raise Misuse(
            f"the recipe {recipe.name} gives the agent the current directory, and {here} has your "
            f"settings: {remedy}"
        )


def program_words(name: str) -> list[str]:
    """Return the words that execute an installed program wherever `PATH` does not lead to it.

    These are its file, and before it the interpreter that its first line has env(1) look for.
    """
    path = os.path.realpath(find_program(name))
    with open(path, "rb") as file:
        first = file.readline(256)
    words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []
    if len(words) > 1 and os.path.basename(words[0]) == "env":
        options = ("-S", "--split-string", "-i")
        sought = words[2:] if words[1] in options else words[1:]
        interpreter = find_program(sought[0])
        if interpreter:
            return [os.path.realpath(interpreter), *sought[1:], path]
    return [path]


def program_mounts(name: str) -> list[str]:
    """Return the lines of `mount` that show a program in a sandbox where it is here.

    A program of npm comes with all modules that it was installed with.
    """
    sources = []
    for word in program_words(name):
        if word.startswith("/") and not word.startswith(SHOWN):
            source = word.partition(MODULES)[0] + MODULES[:-1] if MODULES in word else word
            sources.append(one_field(source, f"@program:{name}@"))
    return [f"{source}\t{source}\tro\t-" for source in dict.fromkeys(sources)]


# what it needs


def major_version(path: str) -> int:
    """Return the first number that a program says of its version, 0 if it says none."""
    import re
    import subprocess

    try:
        said = subprocess.run(
            [path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(rb"[0-9]+", said.stdout)
    return int(found[0]) if found else 0


def lacking_programs(recipe: Recipe) -> Iterator[str]:
    """Yield which programs are missing or too old."""
    for name, least in recipe.programs.items():
        path = find_program(name)
        if not path:
            yield f"program {name}: not found in PATH"
        elif least and (found := major_version(path)) < least:
            yield f"program {name}: {path} has version {found}, older than {least}"


def lacking_keys(recipe: Recipe, given: Sequence[str] = ()) -> Iterator[str]:
    """Yield of which groups of variables none is set, here or by the recipe or an option."""
    own = [line.text.partition("=")[0] for line in recipe.lines.get("env", ()) if "=" in line.text]
    for names in recipe.keys:
        if not any(os.environ.get(name) or name in (*own, *given) for name in names):
            yield f"key: {' or '.join(names)} is not set"


def network_for(root: Root, recipe: Recipe, wanted: str | None = None) -> str:
    """Return the network that an agent gets, empty if none that it could use is configured."""
    if wanted is None and not recipe.networks:
        return NO_NETWORK
    facts = pairs(root.value("status"))
    there = [key.removeprefix("network.") for key in facts if key.startswith("network.")]
    if wanted is None:
        return next((name for name in recipe.networks if name in there), "")
    return wanted if wanted in (*there, DEFAULT_NETWORK, NO_NETWORK) else ""


def needs_keys(network: str) -> bool:
    """Return whether an agent has to have the keys itself: what answers in a network of a name of
    its own adds them."""
    return network in ("", DEFAULT_NETWORK, NO_NETWORK)


def lacks(
    root: Root,
    recipe: Recipe,
    wanted: str | None = None,
    given: Sequence[str] = (),
    remedy: str = " (or use: --network default)",
) -> tuple[str, list[str]]:
    """Return the network for an agent of a recipe, and what the recipe lacks on this machine.

    `wanted` is the network and `given` the variables that a user has chosen.
    """
    network, missing = network_for(root, recipe, wanted), list(lacking_programs(recipe))
    if not network:
        names = " or ".join(recipe.networks) if wanted is None else f'"{wanted}"'
        missing.append(f"network: {names} is not configured{remedy}")
    if needs_keys(network):
        missing += lacking_keys(recipe, given)
    return network, missing


def check_lacks(recipe: Recipe, missing: Sequence[str]) -> None:
    """Fail if a recipe lacks something."""
    if missing:
        raise Failure(f"the recipe {recipe.name} lacks {'; '.join(missing)}")


# the files of an agent


def agent_lines(
    recipe: Recipe,
    name: str,
    *,
    network: str = NO_NETWORK,
    cwd: str = "",
    label: str = "",
    node: str = "",
) -> dict[str, list[Line]]:
    """Return the lines of an agent's files, as this machine and this agent have them.

    `network` is what `network_for` found, `cwd` the directory that the agent is to work in, by
    default the current one, and `label` the agent's if that is not the default. At a `node`,
    programs are found by their names, and the recipe's files are those that came with ctxfs there.
    """
    words = {
        "name": name, "label": label or f"{name}_t", "cwd": os.path.realpath(cwd or os.getcwd()),
        "files": f"{recipe.directory}/files", "network": network,
    }  # fmt: skip
    if node:
        words["files"] = f"node:recipes/{recipe.name}/files"

    def replaced(text: str, quoted: bool = False) -> str:
        def value(word: str) -> str:
            program = word.partition(":")[2]
            if program:
                found = command_of([program] if node else program_words(program))
            else:
                found = command_of([words[word]]) if quoted else words[word]
            return one_field(found, f"@{word}@")

        return each_word(text, value)

    found: dict[str, list[Line]] = {}
    for file, lines in recipe.lines.items():
        made = found.setdefault(file, [])
        for line in lines:
            if file == "mount" and node and line.text.startswith("@program:"):
                texts = []
            elif file == "mount":
                texts = mount_lines(line.text, replaced)
            elif file == "env":
                texts = env_lines(line.text, replaced)
            elif "@network@" in line.text and network == NO_NETWORK:
                texts = []
            else:
                texts = [replaced(line.text, quoted=file == "exec")]
            # programs that come with one another share a directory
            shares = file == "mount" and line.text.startswith("@program:")
            known = {each.text for each in made} if shares else ()
            made += (Line(text, line.where) for text in texts if text not in known)
        # what all lines were left out of is empty, and has not its default
        made += [] if made else [Line("", f"{recipe.directory}/{file}:1")]
    if node and any("@cwd@" in line.text for line in recipe.lines.get("workspace", ())):
        del found["workspace"]  # no directory of this machine is there
    if needs_keys(network):
        names = [name for group in recipe.keys for name in group]
        where = f"{recipe.directory}/needs"
        keys = [Line(text, where) for name in names for text in env_lines(name, str)]
        if keys:
            found["env"] = [*found.get("env", ()), *keys]
    return found


def mount_lines(text: str, replaced: Callable[[str], str]) -> list[str]:
    """Return a line of `mount`, or those of a program: paths may have blanks."""
    word = text.strip().strip("@")
    if text.strip() == f"@{word}@" and word.startswith("program:"):
        return program_mounts(word.partition(":")[2])
    words = text.split("\t") if "\t" in text else text.split()
    return ["\t".join(map(replaced, words))]


def env_lines(text: str, replaced: Callable[[str], str]) -> list[str]:
    """Return a line of `env`; of a variable without a value, as it is here, if it is set."""
    name, equals, value = text.partition("=")
    if equals:
        return [f"{name}={replaced(value)}"]
    here = os.environ.get(name)
    if here is not None and "\n" in here:
        raise Misuse(f"{name} has a newline, which a line of env cannot have")
    return [] if here is None else [f"{name}={here}"]


# the agents of the commands spawn and run


def recipe_files(args: Arguments, recipe: Recipe, name: str, network: str) -> Files:
    """Return the control files of an agent of a recipe: its own, then as the options say."""
    settings = dict(assignments(args.set))
    subject = (settings.get("label") or b"").decode().strip()
    lines = agent_lines(recipe, name, network=network, label=subject, node=args.node or "")
    if not args.name:  # a home is of a name, and the next one of this name is another's
        lines.pop("homedir", None)
    for file, items in option_lines(args).items():
        more = [Line(item, f"the options for {file}") for item in items]
        lines[file] = [*lines.get(file, ()), *more] if file in ADDED else more
    if args.program:
        lines["exec"][-1].text += " " + command_of(args.program)
    order = sorted(lines.keys() - settings.keys(), key=AGENT_FILES.index)
    files: Files = [*parent_line(args.parent), *place_line(args), *settings.items()]
    return files + [(file, lines[file]) for file in order]


def made_up_names(root: Root, recipe: Recipe) -> Iterator[str]:
    """Yield names for an agent; what an agent makes has a name that begins with its own."""
    own = own_agent(root)
    stem = f"{own}-{recipe.name}" if own else recipe.name
    for number in range(1, NAMES_MAX + 1):
        if not root.present(agent(f"{stem}-{number}")):
            yield f"{stem}-{number}"


def variants_of(args: Arguments) -> list[str]:
    """Return the variants that a command line wants."""
    return ["ask"] * bool(args.ask) + ["tty"] * (args.tty not in (None, False))


def by_recipe(root: Root, args: Arguments) -> Iterator[Making]:
    """Yield the agent of the recipe that a command line names, for each name that it may get."""
    recipe = find(args.agent, variants_of(args))
    if args.ask and "ask" not in recipe.variants:
        raise Misuse(f"{recipe.directory}: it has no directory ask: its program asks nobody")
    given = [line.partition("=")[0] for line in args.env]
    if args.node:  # programs and networks are those of the node
        network = args.network or next(iter(recipe.networks), NO_NETWORK)
        missing = list(lacking_keys(recipe, given)) if needs_keys(network) else []
    else:
        network, missing = lacks(root, recipe, args.network, given, OTHER_NETWORKS)
    check_lacks(recipe, missing)
    gives_cwd = any("@cwd@" in line.text for lines in recipe.lines.values() for line in lines)
    if gives_cwd and not (args.cwd or args.workspace or args.node):
        remedy = "change to the directory of a project, or use --workspace"
        check_place(recipe, os.getcwd(), remedy)
    for name in [args.name] if args.name else made_up_names(root, recipe):
        yield name, recipe_files(args, recipe, name, network)


# the list of them


@command("agents", *LISTING)
def do_agents(root: Root, args: Arguments) -> None:
    """List the recipes of agents, which options each is also for, and what it lacks here.

    A recipe is a directory with files of an agent, for --agent of spawn and run. Recipes are in
    ~/.config/ctxfs/agents, /etc/ctxfs/agents and where ctxfs was installed; the first one of a
    name counts.
    """

    def cell(row: dict[str, Any], column: str) -> str:
        if column == "also":
            return " ".join(f"--{name}" for name in VARIANTS if row[name])
        return "; ".join(row[column]) if column == "lacks" else str(row[column])

    rows: list[dict[str, Any]] = []
    for name, directory in sorted(places().items()):
        row: dict[str, Any] = {"name": name, "directory": directory, "summary": ""}
        row |= dict.fromkeys(VARIANTS, False)
        try:
            for variant in VARIANTS:
                read(directory, [variant])
            recipe = read(directory)
            _, missing = lacks(root, recipe)
            row |= {"summary": recipe.summary, "lacks": missing}
            row |= dict.fromkeys(recipe.variants, True)
        except Failure as failure:
            row["lacks"] = [str(failure)]
        rows.append(row)
    columns = {"AGENT": "name", **headed("directory", "also", "lacks")}
    show_rows(rows, columns, cell, args.json)
