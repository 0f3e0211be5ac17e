"""The exit statuses of ctx(1), and the exception that carries one."""

from __future__ import annotations

OK, FAILED, USAGE, DENIED, NOT_RUNNING = 0, 1, 2, 13, 69
TIMED_OUT, CANNOT_START, INTERRUPTED, OUT_OF_MEMORY, PIPE_CLOSED = 124, 126, 130, 137, 141


class Failure(Exception):
    """An error message for the user, with the exit status."""

    def __init__(self, message: str, status: int = FAILED, number: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.number = number


class Misuse(Failure):
    """A command line, or a file that it names, with which nothing can be done."""

    def __init__(self, message: str) -> None:
        super().__init__(message, USAGE)
