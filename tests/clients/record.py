"""Stands between a client of the Model Context Protocol and ``ctx mcp``, inside a cell.

    python3 record.py LOG CHANGE...

LOG gets each line that passes, after "> " those of the client, after "< " those of the server.
What a client makes of a line is seen by what a change of it does:

    text     the text of each result that has structured content is only "text"
    hints    no tool is annotated as one that only reads
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any


def changed(message: dict[str, Any], changes: list[str]) -> None:
    """Makes the changes in a message of the server."""
    result = message.get("result", {})
    if "text" in changes and "structuredContent" in result:
        result["content"] = [{"type": "text", "text": "text"}]
    if "hints" in changes:
        for tool in result.get("tools", []):
            tool["annotations"]["readOnlyHint"] = False


def main() -> None:
    pipe = subprocess.PIPE
    server = subprocess.Popen(["ctx", "mcp"], stdin=pipe, stdout=pipe)
    asks, answers = server.stdin, server.stdout
    assert asks is not None and answers is not None

    def note(line: str) -> None:
        with open(sys.argv[1], "a") as log:
            log.write(line)

    def pass_on() -> None:
        for line in answers:
            message = json.loads(line)
            changed(message, sys.argv[2:])
            passed = json.dumps(message)
            note(f"< {passed}\n")
            print(passed, flush=True)

    thread = threading.Thread(target=pass_on)
    thread.start()
    for line in sys.stdin.buffer:
        note(f"> {line.decode()}")
        asks.write(line)
        asks.flush()
    asks.close()
    thread.join()


if __name__ == "__main__":
    main()
