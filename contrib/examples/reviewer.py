"""The reviewers of story.sh, one of each mode: `reviewer.py long|longest|marks DIRECTORY`.

Each looks at the files of a directory, and reports to its supervisor while it works.
"""

import json
import os
import sys
from pathlib import Path

from tools import call

DIRECTORY = Path(sys.argv[2])
LONG = 100
#: what someone wanted to do later
MARKS = ("TODO", "FIXME")


def read_all() -> dict[Path, list[str]]:
    """The lines of each file. Exits with 3 if one cannot be read.

    It reports that, too: the end of a run of mode turn is not the end of the agent, and no notice
    tells of it.
    """
    try:
        paths = [p for p in sorted(DIRECTORY.iterdir()) if not (p.name[0] == "." or p.is_dir())]
        return {path: path.read_text(errors="replace").splitlines() for path in paths}
    except OSError as error:
        report(f"failed: {error}")
        sys.exit(3)


def report(text: str) -> None:
    """To the supervisor, at once. With its id it is one report, however often it is sent; ids are
    the supervisor's, so this one has the name of who reports in it."""
    call("Report", text=text, id=f"{os.environ['CTX_AGENT']}-{os.environ['CTX_RUN']}")


def long() -> None:
    """Mode once: the task is on standard input, and what is printed is the result."""
    files = read_all()
    report(f"reading {len(files)} files")
    for path, lines in files.items():
        for number, line in enumerate(lines, 1):
            if len(line) > LONG:
                print(f"{path.name}:{number}: {len(line)} characters")


def longest() -> None:
    """Mode turn: one run for each message. HOME stays, so it knows what it found before."""
    noted = Path.home() / "longest"
    if os.environ["CTX_PROVENANCE"] == "delegation":  # the task
        files = read_all()
        path = max(files, key=lambda path: len(files[path]))
        noted.write_text(str(path))
        report(f"{path.name} is the longest")
        print(f"{path.name} has {len(files[path])} lines")
    else:  # a question about it
        path = Path(noted.read_text())
        with path.open(errors="replace") as file:
            print(f"{path.name} begins with: {file.readline().rstrip()}")


def marks() -> None:
    """Mode resident: the same process reads all messages, as lines of JSON, and answers them."""
    for line in sys.stdin:
        message = json.loads(line)
        found = [
            f"{path.name}:{number}: {line.strip()}"
            for path, lines in read_all().items()
            for number, line in enumerate(lines, 1)
            if any(mark in line for mark in MARKS)
        ]
        # first: once it has reported, its supervisor may stop it
        call("ResultWrite", text="\n".join(found) or "nothing is left to do")
        report(f"marks found: {len(found)}; I can look again")
        print(json.dumps({"type": "message", "id": message["id"], "text": "done"}), flush=True)


REVIEWS = {"long": long, "longest": longest, "marks": marks}
REVIEWS[sys.argv[1]]()
