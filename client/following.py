"""Waiting for the end of agents and tasks, and copying their output meanwhile."""

from __future__ import annotations

import errno
import os
import time

from client.exits import Failure
from client.files import BLOCK, close, read_all
from client.loop import LONGEST, POLLPRI, Lines, Loop
from client.output import Output, shown_line
from client.root import Root, label
from client.types import Callable, Iterable, Iterator, Sequence

TICK = 0.1  # seconds between two looks at growing files
RETRY = 0.5  # and between two attempts to find a ctxd that went away


class Tail:
    """A file that is copied to an output as it grows."""

    def __init__(self, root: Root, relative: str, output: Output, lines: int | None = None) -> None:
        self.root = root
        self.relative = relative
        self.name = relative.rpartition("/")[2]
        self.output = output
        self.fd = root.open(relative)
        self.size = os.fstat(self.fd).st_size
        self.offset = 0 if lines is None else self.start_of_last(lines)
        self.splitter = Lines(self.fd)

    def start_of_last(self, lines: int) -> int:
        """Return the offset at which the last `lines` lines begin."""
        end = self.size
        if lines == 0 or end == 0:
            return end
        if self.read(1, end - 1) == b"\n":
            end -= 1  # it ends the last line and begins no new one
        while end > 0:  # backwards, keeping no data: one line may fill the file
            step = min(BLOCK, end)
            data = self.read(step, end - step)
            at = len(data)
            while (at := data.rfind(b"\n", 0, at)) >= 0:
                lines -= 1
                if lines == 0:
                    return end - step + at + 1
            end -= step
        return 0

    def reopen(self) -> None:
        """Find the file again, at a ctxd that was started anew."""
        fd = self.root.open(self.relative)
        os.dup2(fd, self.fd, inheritable=False)
        close(fd)

    def read(self, size: int, offset: int) -> bytes:
        """Return some bytes of the file."""
        return self.root.call(self.relative, lambda _: os.pread(self.fd, size, offset))

    def chunks(self) -> Iterator[bytes]:
        """Yield the data added since the last call."""
        while chunk := self.read(BLOCK, self.offset):
            self.offset += len(chunk)
            yield chunk

    def batches(self) -> Iterator[list[bytes]]:
        """Yield the whole lines added since the last call, some at a time."""
        return map(self.splitter.add, self.chunks())

    def pump(self) -> None:
        """Copy the data added since the last call."""
        for chunk in self.chunks():
            self.output.copy(chunk)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


class Labelled:
    """Several tails on one output, separated by headings once a second one has data."""

    def __init__(self, tails: Sequence[Tail]) -> None:
        self.tails = tails
        self.several = sum(tail.size > 0 for tail in tails) > 1
        self.current: Tail | None = None

    def pump(self) -> None:
        """Copy the data added since the last call."""
        for tail in self.tails:
            for chunk in tail.chunks():
                self.show(tail, chunk)

    def show(self, tail: Tail, chunk: bytes) -> None:
        """Print data of a file, below a heading if it is another one than before."""
        if tail is not self.current and (self.current or self.several):
            tail.output.text(("\n" if self.current else "") + f"==> {tail.name} <==\n")
        self.current = tail
        tail.output.copy(chunk)

    def close(self) -> None:
        """Close the files."""
        for tail in self.tails:
            tail.close()


class Concluded(Labelled):
    """The files of one run, each on its output: the last one tells of the end of the others.

    So it is read before them, and shown after.
    """

    def pump(self) -> None:
        *others, last = self.tails
        said = [*last.chunks()]
        for tail in others:
            tail.pump()
        for chunk in said:
            last.output.copy(chunk)


class Named(Labelled):
    """The files of one of several agents, with its name in front of each line."""

    def __init__(self, tails: Sequence[Tail], name: str, style: str) -> None:
        super().__init__(tails)
        self.name = name
        self.style = style
        self.partial = dict.fromkeys(tails, b"")

    def show(self, tail: Tail, chunk: bytes) -> None:
        *lines, rest = (self.partial[tail] + chunk).split(b"\n")
        if len(rest) >= BLOCK:
            lines, rest = [*lines, rest], b""
        self.partial[tail] = rest
        front = shown_line([(self.name, self.style), " | "], tail.output.is_colored())
        for line in lines:
            tail.output.text(front)
            tail.output.copy(line + b"\n")

    def close(self) -> None:
        """Print what is left, as lines, and close the files."""
        for tail, rest in self.partial.items():
            if rest:
                self.show(tail, b"\n")
        super().close()


Pumps = Sequence[Tail | Labelled]


def allow_descriptors() -> None:
    """Let this process have as many descriptors as it may: each agent takes a few."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        return


def open_wait(root: Root, owner: str) -> int:
    """Return a descriptor that polls as readable or hung up once an agent or a task has ended.

    A reader that opens a FIFO before any writer sees POLLHUP only after a writer opened and
    closed it, see pipe_poll() in the kernel. The regular file that replaces the FIFO after the
    end is readable at once.
    """
    return root.open(f"{owner}/wait", os.O_RDONLY | os.O_NONBLOCK)


def wait_ended(root: Root, owners: Iterable[str], timeout: float | None = None) -> Iterator[str]:
    """Yield agents or tasks as they end, until all have ended; `TimeoutError` after `timeout`."""
    allow_descriptors()
    following = Following(root, for_reader=False)
    waiting, ended = list(owners), list[str]()

    def add(owner: str) -> None:
        following.add(owner, [], lambda: ended.append(owner))

    for owner in waiting:
        add(owner)
    if timeout is not None:
        following.later(timeout, lambda: setattr(following, "over", True))
    while waiting and not following.over:
        following.step()
        while ended:
            waiting.remove(ended[0])
            yield ended.pop(0)
    if waiting:
        raise TimeoutError(", ".join(map(label, waiting)))


def versions(root: Root, name: str, timeout: float | None = None) -> Iterator[bytes]:
    """Yield a file of the root, again after each change, and at the end of so many seconds; a ctxd
    that goes away is waited for."""
    import select

    until = float("inf") if timeout is None else time.monotonic() + timeout
    seen = False
    while True:
        try:
            fd = root.open(name)
        except Failure as failure:
            if failure.number != errno.ENOTCONN or not seen:
                raise
            if time.monotonic() >= until:
                return
            time.sleep(RETRY)
            continue
        seen, poller = True, select.poll()
        poller.register(fd, POLLPRI)
        try:
            while True:
                os.lseek(fd, 0, os.SEEK_SET)
                yield read_all(fd)
                left = until - time.monotonic()
                if left <= 0:
                    return
                poller.poll(1000 * min(left, LONGEST))
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE):
                raise
            time.sleep(RETRY)
        finally:
            close(fd)


def nobody_reads() -> None:
    """End, as nobody reads standard output any more."""
    raise BrokenPipeError


class Following(Loop):
    """Files of agents or tasks, copied as they grow until their owners have ended.

    With `for_reader`, only as long as somebody reads standard output: otherwise the reader's end
    is noticed with the next bytes, of which there may be none for long. With `patient`, a ctxd that
    goes away is waited for.
    """

    def __init__(self, root: Root, for_reader: bool = True, patient: bool = False) -> None:
        super().__init__()
        self.root = root
        self.patient = patient
        self.pumps: dict[int, Pumps] = {}  # by the descriptor that tells of the end
        if for_reader:
            self.watch(1, nobody_reads, 0)  # poll(2) tells of errors unasked

    def add(self, owner: str, pumps: Pumps, ended: Callable[[], object] = lambda: None) -> None:
        """Copy files of an owner; call `ended` when it has ended and all is copied."""
        fd = open_wait(self.root, owner)
        self.pumps[fd] = pumps

        def end() -> None:
            if not self.copied(self.pumps[fd]):
                return  # again, once all can be read
            self.pumps.pop(fd)
            ended()
            self.forget(fd)
            os.close(fd)

        self.watch(fd, end)

    def pump(self) -> None:
        """Copy what there is."""
        self.copied([pump for pumps in self.pumps.values() for pump in pumps])

    def copied(self, pumps: Pumps) -> bool:
        """Copy what there is; return False if that cannot be known, as there is no ctxd."""
        try:
            for pump in pumps:
                pump.pump()
        except Failure as failure:
            if failure.number != errno.ENOTCONN or not self.patient:
                raise
            time.sleep(TICK)
            self.come_back()
            return False
        return True

    def come_back(self) -> None:
        """Find all files again, if there is another ctxd by now."""
        owner = self.root.held[0].removesuffix("/")
        self.root.let_go()
        if not self.root.present("agent"):
            return  # nothing is mounted yet
        try:
            if owner:
                self.root.hold(owner)
            for pump in [pump for pumps in self.pumps.values() for pump in pumps]:
                for tail in pump.tails if isinstance(pump, Labelled) else [pump]:
                    tail.reopen()
        except Failure as failure:
            if failure.number != errno.ENOTCONN:
                raise

    def copy(self, tick: float = TICK, forever: bool = False) -> None:
        """Copy until all owners have ended, or even then for those that come."""
        self.every(tick, self.pump)
        while self.pumps or forever:
            self.step()


def follow(
    root: Root, owner: str, pumps: Pumps, events_fd: int | None = None, for_reader: bool = True
) -> None:
    """Copy growing files until their owner has ended; `events_fd` reports growth at once."""
    following = Following(root, for_reader)
    following.add(owner, pumps)

    def grown() -> None:
        following.pump()
        time.sleep(0.02)  # collect bursts

    if events_fd is not None:
        following.watch(events_fd, grown, POLLPRI)
    following.copy(TICK if events_fd is None else 1.0)
