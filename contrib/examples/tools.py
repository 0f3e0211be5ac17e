"""Calls of tools by a program that goes on while ctxd restarts.

A tool is called over the socket of the agent that the program runs in: one line of JSON there, one
back (SOCKETS in ctxfs-tools(5)). `ctx tool call NAME JSON` does the same from a shell.
"""

import json
import os
import socket
import time
from typing import Any

_SOCKET = f"{os.environ['CTX_ROOT']}/agent/{os.environ['CTX_AGENT']}.sock"


class Refused(Exception):
    """ctxd refused a call; the message says why, and `code` is the error, such as EBUSY."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def call(name: str, /, **given: Any) -> dict[str, Any]:
    """What a tool answers; `Refused`. It tries again until a daemon answers.

    A daemon may die after it did what was asked and before it answers, so a call may be done twice.
    Messages and reports need an `id` for that: with the same one, they are sent once.
    """
    while True:
        try:
            answer = _ask({"op": "tool", "name": name, "input": given})
        except OSError:  # no daemon: agents live on meanwhile, and wait
            answer = {"code": "EAGAIN"}
        if answer.get("type") == "tool":
            output: dict[str, Any] = answer["output"]
            return output
        if answer["code"] != "EAGAIN":
            raise Refused(answer["code"], answer["message"])
        time.sleep(0.05)


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_SOCKET)
        connection.sendall(json.dumps(request).encode() + b"\n")
        line = connection.makefile("rb").readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the daemon died before it had answered")
    answer: dict[str, Any] = json.loads(line)
    return answer
