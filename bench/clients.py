"""What a user waits for who types `ctx`, and each session of a program that has `ctx mcp`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.agents import fresh_name, running_agent, whole_life
from bench.measure import Side, Sides
from bench.reference.commands import finish, spawn
from bench.reference.supervisors import podman
from bench.setting import Setting, another_daemon

#: agents that are listed
FEW: Final = 10
#: what a client of the protocol says first
_HELLO: Final = json.dumps({
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {},
               "clientInfo": {"name": "bench", "version": "1"}},
}).encode() + b"\n"  # fmt: skip


def _command(setting: Setting, *words: str) -> list[str]:
    """The client that everybody finds on this machine, and sandboxes have."""
    return [str(setting.ctx / "bin" / "ctx"), "--root", str(setting.ctx), *words]


def _python(program: str) -> list[str]:
    """What runs the file of the client too."""
    return [shutil.which("python3", path=os.defpath) or "python3", "-I", "-S", "-c", program]


def spawn_sides(setting: Setting, stack: ExitStack) -> Sides:
    def call() -> None:
        words = ["spawn", "--wait", "--rm", fresh_name(), "--", "true"]
        finish(spawn(_command(setting, *words), quiet=True))

    references = [Side(name="files", call=lambda: whole_life(setting))]
    contained = podman(setting.base / "podman", ["true"], stack)
    if contained:
        references.append(Side(name="podman", call=lambda: finish(contained())))
    return Side(name="ctx spawn", call=call), references


def ps_sides(setting: Setting, stack: ExitStack) -> Sides:
    calm = stack.enter_context(another_daemon(setting))
    for _ in range(FEW):
        os.mkdir(f"{calm.ctx}/agent/{fresh_name()}.d")
    reference = Side(name="python", call=lambda: finish(spawn(_python("pass"))))
    return Side(name="ctx ps", call=lambda: finish(spawn(_command(calm, "ps")))), [reference]


def mcp_sides(setting: Setting, stack: ExitStack) -> Sides:
    directory, _ = stack.enter_context(running_agent(setting))
    name = Path(directory).name.removesuffix(".d")

    def call() -> None:
        words = _command(setting, "mcp", "--agent", name)
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": os.defpath}
        ) as process:
            assert process.stdin and process.stdout
            process.stdin.write(_HELLO)
            process.stdin.flush()
            if json.loads(process.stdout.readline())["id"] != 1:
                raise RuntimeError("ctx mcp says something else")
            process.kill()

    def start() -> None:
        with subprocess.Popen(
            _python("print()"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout
            process.stdout.readline()

    return Side(name="ctx mcp", call=call), [Side(name="python", call=start)]
