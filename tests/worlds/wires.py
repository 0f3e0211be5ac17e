"""A wire between two machines, that can be held, slow, cut: ``Wire``, and the program that it is.

    wires.py SOCKET COMMAND...    leads each connection of the socket to a command of its own
    wires.py SOCKET               becomes such a connection, by its standard input and output

The first reads words, a line each, and answers each with what has passed:

    hold up|down    passes nothing on, towards the command or from it
    delay SECONDS   passes all on so much later
    go              neither
    close           ends all connections
    count

To stop its process is to cut the wire without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

_PIECE = 1 << 16
_DIRECTIONS = ("up", "down")


class _Served:
    """The process of a wire."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._held: set[str] = set()
        self._delay = 0.0
        self._changed = threading.Condition()
        self._open: set[_Connection] = set()
        self._counts = {"opened": 0, "up": 0, "down": 0}

    def serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            ours, theirs = socket.socketpair()
            process = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=theirs.fileno())
            theirs.close()
            made = _Connection(connection, ours)
            with self._changed:
                self._open.add(made)
                self._counts["opened"] += 1
            threading.Thread(target=self._lead, args=(made, process), daemon=True).start()

    def _lead(self, made: _Connection, process: subprocess.Popen[bytes]) -> None:
        threads = []
        for name, ends in zip(_DIRECTIONS, (made.ends, made.ends[::-1]), strict=True):
            later: queue.Queue[tuple[float, bytes]] = queue.Queue(1000)
            for does in (self._take, self._give):
                threads.append(threading.Thread(target=does, args=(name, later, made, *ends)))
                threads[-1].start()
        for thread in threads:
            thread.join()
        for end in made.ends:
            end.close()
        process.wait()
        with self._changed:
            self._open.remove(made)

    def _take(self, name: str, later: Any, made: _Connection, source: Any, _: Any) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                with self._changed:
                    self._counts[name] += len(data)
                later.put((time.monotonic() + self._delay, data))
        later.put((0.0, b""))

    def _give(self, name: str, later: Any, made: _Connection, _: Any, target: Any) -> None:
        with contextlib.suppress(OSError):
            while (item := later.get())[1]:
                time.sleep(max(0.0, item[0] - time.monotonic()))
                with self._changed:
                    self._changed.wait_for(lambda: name not in self._held or made.is_over)
                target.sendall(item[1])
        self._end(made)

    def _end(self, made: _Connection) -> None:
        with self._changed:
            made.is_over = True
            self._changed.notify_all()
        for end in made.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def hear(self, word: str, *more: str) -> dict[str, int]:
        with self._changed:
            if word == "hold":
                self._held.add(more[0])
            elif word == "delay":
                self._delay = float(more[0])
            elif word == "go":
                self._held.clear()
                self._delay = 0.0
            self._changed.notify_all()
            open_now = list(self._open)
        if word == "close":
            for each in open_now:
                self._end(each)
        with self._changed:
            return {**self._counts, "open": len(self._open)}


class _Connection:
    def __init__(self, *ends: socket.socket) -> None:
        self.ends = ends
        self.is_over = False


def _serve(path: str, command: Sequence[str]) -> None:
    served = _Served(command)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen()
    threading.Thread(target=served.serve, args=(listener,), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(served.hear(*line.split())), flush=True)
    os._exit(0)


def _join(path: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)

    def give() -> None:
        with contextlib.suppress(OSError):  # cut while something is on its way
            while data := os.read(0, _PIECE):
                connection.sendall(data)
        os._exit(0)

    threading.Thread(target=give, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := connection.recv(_PIECE):
            os.write(1, data)
    os._exit(0)


class Wire:
    """To a command, such as ``ctx peer``, from whatever executes ``command``."""

    def __init__(self, path: str, leads_to: Sequence[str]) -> None:
        program = [sys.executable, "-IS", __file__, path]
        self.command = program
        self._process = subprocess.Popen(
            [*program, *leads_to], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def say(self, word: str) -> dict[str, int]:
        """What has passed: bytes ``up`` and ``down``; connections ``opened`` and ``open``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        assert isinstance(found, dict)
        return found

    def stop(self) -> None:
        """Nothing is passed on, nor said, until ``go_on``."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def ends(self) -> list[int]:
        """The pids of commands at its other end."""
        pid, found = self._process.pid, list[int]()
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(FileNotFoundError),
                open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as children,
            ):
                found += map(int, children.read().split())
        return found

    def close(self) -> None:
        self.go_on()
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def wire(path: str, leads_to: Sequence[str]) -> Iterator[Wire]:
    made = Wire(path, leads_to)
    try:
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    (_serve if len(sys.argv) > 2 else lambda path, _: _join(path))(sys.argv[1], sys.argv[2:])
