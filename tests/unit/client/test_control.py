"""Ctrl-C while an agent or a task is waited for."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.unit.client.fakes import FakeRoot, Obeying, Run


@pytest.mark.usefixtures("made_agents_are_full", "inside")
@pytest.mark.parametrize(
    ("argv", "path", "end", "said"),
    [
        (
            ["spawn", "y"],
            "agent/y.d",
            {"status": "dead", "outcome": "cancelled", "reason": "operator_stop"},
            [],  # its log tells of the end
        ),
        (
            ["task", "start"],
            "agent/x.d/task/task-1",
            {"status": "cancelled", "exit": "signal:9"},
            ["ctx: task-1: cancelled signal:9"],
        ),
    ],
)
def test_ctrl_c_stops_then_kills(
    root: FakeRoot,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    path: str,
    end: dict[str, str],
    said: list[str],
) -> None:
    interrupt = threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGINT))
    obeying = Obeying(
        root,
        monkeypatch,
        start=interrupt.start,
        stop=lambda: os.kill(os.getpid(), signal.SIGINT),
        kill=lambda: root.record_end(root.path / path, **end),
    )
    status, _, err = run(*argv, "--wait", "--", "make")
    interrupt.join()
    assert (status, obeying.written) == (130, ["start", "stop", "kill"])
    name = os.path.basename(path).removesuffix(".d")
    assert err.splitlines() == [
        f"ctx: {name}: stop (Ctrl-C again kills it)",
        f"ctx: {name}: kill",
        *said,
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
