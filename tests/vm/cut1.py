"""The end of the first boot: agents of all kinds, some of it synced, and the power is cut."""

from __future__ import annotations

import shlex
import time

from tests.systemd.service import SECONDS, Service
from tests.vm.power import append_synced, cut, durable_trees, models, sync, write_synced
from tests.worlds.daemon import wait_dead, wait_status, wait_until, write
from tests.worlds.spenders import spend, usage

#: after this many seconds and the time to write it, what was used is on the disk
KEPT_SECONDS = 10.0 + 5.0


def main() -> None:
    with models():
        begin_and_cut(Service())


def begin_and_cut(service: Service) -> None:
    service.start()
    # each is synced by who may write it, while that may be
    program = "echo result > $CTX_SELF/result.md; sync $CTX_SELF/result.md"
    ended = service.make("ended", f"sh -c {shlex.quote(program)}", handoff="task\n")
    sync(ended / "handoff.md")
    write(ended / "ctl", "start")
    wait_dead(ended, SECONDS)
    made = service.make("made", "true")
    by_file = service.make("by-file", "true")
    kid = shlex.quote(
        "cd $CTX_ROOT/agent; mkdir below.d; echo 'sleep 1000' > below.d/exec; "
        "echo start > below.d/ctl; sleep 1000"
    )
    for name, command in (("runs", "sh -c 'echo out; sleep 1000'"), ("above", f"sh -c {kid}")):
        wait_status(service.run(name, command), "busy", timeout=SECONDS)
    below = service.agent_dir("below")
    wait_until(below.exists, "the child is made", SECONDS)
    wait_status(below, "busy", timeout=SECONDS)
    # a history of which the beginning is on the disk, and the rest has yet to be
    partly = service.make("partly", "sleep 1000")
    sync(partly / "session/events.jsonl")
    write(partly / "ctl", "start")
    wait_status(partly, "busy", timeout=SECONDS)
    write_synced(made / "label", "synced")
    sync(ended / "session/events.jsonl")
    # the last that is synced is so by a descriptor for reading
    write(by_file / "label", "synced")
    sync(by_file / "label")
    (service.root / "shared/power").mkdir()
    for tree in durable_trees(service.root):
        tree.mkdir()
        append_synced(tree / "synced", b"first\nsecond\n")
        with (tree / "synced").open("ab") as file:
            file.write(b"third\n")
        (tree / "not-synced").write_bytes(b"lost or not\n")
        append_synced(tree / "new", b"new\n")
        append_synced(tree / "current", b"old\n")
        (tree / "new").rename(tree / "current")
        sync(tree)
    # it is started again and again, and nobody syncs what it used of models
    spends = spend(service, "spends", "plain", restart="always", limits="tokens.max=60")
    wait_until(lambda: usage(spends)["requests.refused"] != "0", "it is refused", SECONDS)
    refused = time.monotonic()
    wait_until(lambda: time.monotonic() > refused + KEPT_SECONDS, "it is kept", SECONDS)
    wait_status(service.run("late", "sleep 1000"), "busy", timeout=SECONDS)
    write(made / "label", "not-synced")
    cut()


if __name__ == "__main__":
    main()
