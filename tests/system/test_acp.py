"""The Agent Client Protocol both ways: agents in cells, and an editor by the protocol's library."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import acp
import pytest
from acp.schema import ClientCapabilities, TextContentBlock

from tests.acp import agent as scripted
from tests.system.test_modes import Talk, TalkTo, begin, kinds, talk_to, text_of
from tests.worlds.daemon import (
    TIMEOUT,
    Daemon,
    daemon_of,
    read,
    wait_dead,
    wait_status,
    wait_until,
    write,
)

__all__ = ["talk_to"]

EXAMPLES = Path(__file__).parents[2] / "contrib" / "examples" / "README.md"

COMMAND = (sys.executable, "-c", "from client.main import main; raise SystemExit(main())")

pytestmark = pytest.mark.settings(grace="500ms")


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"a{abs(hash(request.node.nodeid)) % 10**9}"


def bridged(daemon: Daemon, name: str, can: str = "resume", **files: str) -> Path:
    """A resident agent whose program speaks the protocol."""
    program = Path(shutil.copy(scripted.__file__, daemon.base / "agent.py"))
    agent = daemon.run(
        name, f"ctx bridge acp -- python3 /agent.py {can}", mode="resident",
        mount=f"{program} /agent.py ro", **files,
    )  # fmt: skip
    wait_status(agent, "ready")
    return agent


def tell(talk: Talk, ident: str) -> dict[str, Any]:
    """What the program knows of the conversation."""
    found: dict[str, Any] = json.loads(text_of(talk.send("tell", ident), "message"))
    return found


# the bridge


def test_an_agent_of_the_protocol_is_a_resident_agent(
    daemon: Daemon, name: str, talk_to: TalkTo
) -> None:
    agent = bridged(daemon, name)
    talk = talk_to(daemon, name)
    frames = talk.send("say Let me see.; call execute make; say It works.", "m1")
    assert text_of(frames, "message") == "Let me see.\n\nIt works."
    assert frames[-1]["status"] == "processed"
    lines = [json.loads(line) for line in read(agent, "out").splitlines()]
    assert [(line["title"], line["status"]) for line in lines] == [
        ("make", "pending"), ("make", "in_progress"), ("make", "completed")]  # fmt: skip
    done = talk.send("stop max_tokens", "m2")[-1]
    assert (done["status"], done["reason"].partition(":")[0]) == ("failed", "max_tokens")
    assert (daemon.agent_dir(name) / "session/latest.md").read_text().startswith("Let me")
    write(agent / "ctl", "stop")
    wait_dead(agent)
    assert read(agent, "outcome") == "cancelled\n"


def test_a_conversation_survives_aborts(daemon: Daemon, name: str, talk_to: TalkTo) -> None:
    agent = bridged(daemon, name, limits="grace=1h")
    talk = talk_to(daemon, name)
    begin(talk, "hold", "held")
    write(agent / "ctl", "abort")
    assert talk.frame()["status"] == "aborted"
    assert read(agent, "status") == "paused\n"
    write(agent / "ctl", "resume")
    assert tell(talk, "t1")["before"] == ["hold"]
    assert read(agent, "run") == "r1\n"
    # one that hears nothing is ended, and the next one continues
    begin(talk, "sleep", "deaf")
    write(agent / "limits", "grace=500ms")
    write(agent / "ctl", "abort")
    assert talk.frame()["status"] == "aborted"
    wait_until(lambda: not read(agent, "run"), "the run is over")
    write(agent / "ctl", "resume")
    told = tell(talk, "t2")
    assert (told["how"], told["before"]) == ("session/resume", ["hold", "tell"])
    assert read(agent, "run") == "r2\n"


def test_a_turn_goes_on_without_the_daemon(talk_to: TalkTo) -> None:
    with daemon_of() as daemon:
        agent = bridged(daemon, "r")
        talk = talk_to(daemon, "r")
        begin(talk, "hold", "held")
        daemon.kill()
        daemon.start()
        assert read(agent, "status") == "busy\n"
        talk = talk_to(daemon, "r")
        talk.ask(op="cancel", id="held")
        wait_status(agent, "ready")
        assert tell(talk, "t1")["before"] == ["hold"]
        assert kinds(daemon.events("r"), "run.start") == ["run.start"]


def test_the_example(daemon: Daemon, talk_to: TalkTo) -> None:
    """The commands of the README, with another agent of the protocol."""
    tools, source = daemon.base / "tools", daemon.base / "source"
    for directory in (tools, source):
        directory.mkdir()
    shutil.copy(scripted.__file__, tools / "gemini")
    (tools / "ctx").write_text(f'#!/bin/sh\nexec {sys.executable} -IS {daemon.root}/bin/ctx "$@"\n')
    for program in tools.iterdir():
        program.chmod(0o755)
    _, _, section = EXAMPLES.read_text().partition("## Agents of that protocol\n")
    lines = [line for line in section.splitlines() if line.startswith("    ")]
    env = {"CTX_ROOT": str(daemon.root), "PATH": f"{tools}:{os.environ['PATH']}",
           "tools": str(tools), "GEMINI_API_KEY": "k"}  # fmt: skip
    subprocess.run(
        ["sh", "-ec", "\n".join(lines)], env=env, cwd=source, timeout=TIMEOUT, check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    talk = talk_to(daemon, "gem")
    told = tell(talk, "t1")
    assert (told["cwd"], told["before"]) == ("/src", ["What does this project do?"])
    assert text_of(talk.send("ask read; say ,; ask edit", "a1"), "message") == (
        "id-allow_once,id-reject_once")


# the editor


class Editor:
    """A client of the protocol's own library."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.changed = asyncio.Event()
        self.asked: list[str] = []
        self.answers, self.chooses = asyncio.Event(), True

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)
        self.changed.set()

    async def request_permission(self, options: Any, tool_call: Any, **_: Any) -> Any:
        """Takes the option that is named first, when it may."""
        self.asked.append(tool_call.title)
        self.changed.set()
        await self.answers.wait()
        chosen = {"outcome": "selected", "optionId": options[0].option_id}
        return {"outcome": chosen if self.chooses else {"outcome": "cancelled"}}

    async def create_elicitation(self, mode: Any = None, message: str = "", **_: Any) -> Any:
        self.asked.append(message or mode.message)
        self.changed.set()
        return {"action": "accept", "content": {"answer": "blue"}}

    async def ext_method(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError(method)

    async def ext_notification(self, method: str, params: dict[str, Any]) -> None:
        raise AssertionError(method)

    def on_connect(self, conn: Any) -> None:
        pass

    def said(self, kind: str = "agent_message_chunk") -> str:
        """What was said, as one text."""
        found = [u for u in self.updates if u.session_update == kind]
        return "".join(update.content.text for update in found)

    def calls(self) -> list[tuple[str, str]]:
        """The kinds and states of tool calls."""
        found = [u for u in self.updates if u.session_update.startswith("tool_call")]
        return [(update.session_update, update.status) for update in found]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def edited(daemon: Daemon, *words: str) -> AsyncIterator[tuple[Editor, Any]]:
    """An editor that has started the command; it ends with the editor."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--root", str(daemon.root), "acp", *words,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    editor = Editor()
    assert process.stdin is not None and process.stdout is not None
    connection = acp.connect_to_agent(
        editor, process.stdin, process.stdout, use_unstable_protocol=True)  # type: ignore[arg-type]
    try:
        yield editor, connection
    finally:
        await connection.close()
        process.stdin.close()
        async with asyncio.timeout(TIMEOUT):
            assert await process.wait() == 0


def block(text: str) -> list[Any]:
    return [TextContentBlock(type="text", text=text)]


async def opened(connection: Any, cwd: str = "/") -> str:
    """A session, after what comes before it."""
    told = await connection.initialize(protocol_version=1, client_capabilities=ClientCapabilities())
    assert told.protocol_version == 1
    session = await connection.new_session(cwd=cwd, mcp_servers=[])
    return str(session.session_id)


def test_an_editor_talks_with_an_agent(daemon: Daemon, name: str) -> None:
    agent = bridged(daemon, name)

    async def story() -> None:
        async with edited(daemon, name) as (editor, connection):
            session = await opened(connection)
            assert session == "default"
            answer = await connection.prompt(session_id=session, prompt=block("say one; say  two"))
            assert (answer.stop_reason, editor.said()) == ("end_turn", "one two")
            # cancelled
            turn = asyncio.create_task(
                connection.prompt(session_id=session, prompt=block("hold")))
            await editor.until(lambda: editor.said().endswith("holding"))
            await connection.cancel(session_id=session)
            assert (await turn).stop_reason == "cancelled"
            answer = await connection.prompt(session_id=session, prompt=block("stop refusal"))
            assert answer.stop_reason == "refusal"
            with pytest.raises(acp.RequestError, match="no key"):
                await connection.prompt(session_id=session, prompt=block("fail no key"))
            with pytest.raises(acp.RequestError, match="no session"):
                await connection.prompt(session_id="another", prompt=block("x"))
        # the next one
        async with edited(daemon, name) as (editor, connection):
            told = await connection.initialize(protocol_version=7)
            assert told.protocol_version == 1
            assert told.agent_capabilities.load_session
            with pytest.raises(acp.RequestError, match="not another"):
                await connection.load_session(cwd="/", session_id="another", mcp_servers=[])
            await connection.load_session(cwd="/", session_id=session, mcp_servers=[])
            await editor.until(lambda: "fail no key" in editor.said("user_message_chunk"))
            assert editor.said("user_message_chunk").startswith("say one; say  twohold")
            assert editor.said() == "one two"
            answer = await connection.prompt(session_id=session, prompt=block("say on"))
            assert editor.said() == "one twoon"
            await connection.resume_session(cwd="/", session_id=session, mcp_servers=[])
            await connection.close_session(session_id=session)

    asyncio.run(story())
    assert read(agent, "status") == "ready\n", "it is not the editor's to end"


def test_tasks_and_children_are_tool_calls(daemon: Daemon, name: str) -> None:
    agent = bridged(daemon, name)

    async def story() -> None:
        async with edited(daemon, name) as (editor, connection):
            await opened(connection)
            for task, command in (("good", "echo built"), ("bad", "exit 3")):
                (agent / "task" / task).mkdir()
                write(agent / "task" / task / "cmd", command)
                write(agent / "task" / task / "ctl", "start")
                want = "completed" if task == "good" else "failed"
                await editor.until(lambda w=want: ("tool_call_update", w) in editor.calls())  # type: ignore[misc]
            daemon.run(f"{name}-kid", "true", "look at it\n", parent=f"agent:{name}")
            await editor.until(lambda: editor.calls().count(("tool_call_update", "completed")) == 2)
            begun = [u for u in editor.updates if u.session_update == "tool_call"]
            assert [(u.title, u.kind) for u in begun] == [
                ("echo built", "execute"), ("exit 3", "execute"),
                (f"{name}-kid: look at it", "other")]  # fmt: skip
            ended = [u for u in editor.updates if u.session_update == "tool_call_update"]
            assert ended[0].content[0].content.text == "built"
            assert [u.tool_call_id for u in ended] == [u.tool_call_id for u in begun]

    asyncio.run(story())


def test_an_editor_outlives_the_daemon() -> None:
    """What was said before is not said again."""
    with daemon_of() as daemon:
        bridged(daemon, "r")

        async def story() -> None:
            async with edited(daemon, "r") as (editor, connection):
                session = await opened(connection)
                turn = asyncio.create_task(
                    connection.prompt(session_id=session, prompt=block("say one; hold; say two")))
                await editor.until(lambda: editor.said().endswith("holding"))
                await asyncio.to_thread(daemon.kill)
                await asyncio.to_thread(daemon.start)
                await connection.cancel(session_id=session)
                assert (await turn).stop_reason == "cancelled"
                answer = await connection.prompt(session_id=session, prompt=block("say three"))
                assert answer.stop_reason == "end_turn"
                assert editor.said() in ("oneholdingtwothree", "oneholdingthree")

        asyncio.run(story())


def test_a_conversation_is_loaded_again_if_the_daemon_ends_meanwhile() -> None:
    with daemon_of() as daemon:
        bridged(daemon, "r")
        editor = subprocess.Popen(
            [*COMMAND, "--root", str(daemon.root), "acp", "r"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert editor.stdin is not None and editor.stdout is not None
        last = 0

        def begin(method: str, **params: Any) -> None:
            nonlocal last
            last += 1
            frame = {"id": last, "method": method, "params": params}
            print(json.dumps(frame), file=editor.stdin)

        def answer() -> Any:
            """Of the last request."""
            assert editor.stdout is not None
            while (frame := json.loads(editor.stdout.readline())).get("id") != last:
                pass
            return frame.get("result", frame.get("error"))

        def ask(method: str, **params: Any) -> Any:
            begin(method, **params)
            return answer()

        ask("initialize", protocolVersion=1)
        session = {"sessionId": ask("session/new", cwd="/", mcpServers=[])["sessionId"]}
        text = [{"type": "text", "text": f"say {'x' * 500_000}"}]
        for _ in range(6):
            assert ask("session/prompt", **session, prompt=text) == {"stopReason": "end_turn"}
        begin("session/load", **session, cwd="/", mcpServers=[])
        begun = select.poll()
        begun.register(editor.stdout, select.POLLIN)
        assert begun.poll(TIMEOUT * 1000), "it has begun, and waits"
        daemon.kill()
        assert "not connected" in answer()["message"]
        daemon.start()
        assert ask("session/load", **session, cwd="/", mcpServers=[]) == {}
        editor.communicate(timeout=TIMEOUT)
        assert editor.returncode == 0


def test_an_agent_of_a_recipe_ends_with_its_session(daemon: Daemon, tmp_path: Path) -> None:
    recipe, work = tmp_path / "echoer", daemon.base / "work"
    recipe.mkdir()
    work.mkdir()
    work.chmod(0o777)
    (recipe / "exec").write_text("sh -c 'read -r x; echo $x >> said; ls; touch /usr/y || pwd'\n")

    async def story() -> list[str]:
        async with edited(daemon, "--agent", str(recipe)) as (editor, connection):
            sessions = [await opened(connection, str(work)) for _ in range(3)]
            for session in sessions[:2]:
                answer = await connection.prompt(session_id=session, prompt=block(session))
                assert answer.stop_reason == "end_turn"
            assert editor.said() == f"said\n{work}\n" * 2
            assert (work / "said").read_text().splitlines() == sessions[:2]
            mounts = read(daemon.agent_dir(sessions[0]), "mount").splitlines()
            assert mounts == [f"{work}\t{work}\trw\t-"]
            await connection.close_session(session_id=sessions[0])
            gone = daemon.agent_dir(sessions[0])
            await asyncio.to_thread(wait_until, lambda: not gone.exists(), "it is removed")
            assert daemon.agent_dir(sessions[1]).exists()
            with pytest.raises(acp.RequestError, match="not an absolute path"):
                await connection.new_session(cwd="nowhere", mcp_servers=[])
            return sessions

    for session in asyncio.run(story()):
        assert not daemon.agent_dir(session).exists()


# asks


ASKING = "sh -c 'cat > /dev/null; ctx ask -o yes -o \"no Not today\" \"Push to main?\"'"


def test_the_editors_user_answers_what_the_agent_asks(daemon: Daemon, name: str) -> None:
    daemon.run(name, ASKING, mode="turn")

    async def talk() -> str:
        async with edited(daemon, name) as (editor, connection):
            session = await opened(connection)
            editor.answers.set()
            told = await connection.prompt(session_id=session, prompt=block("go"))
            assert (told.stop_reason, editor.asked) == ("end_turn", ["Push to main?"])
            return editor.said()

    assert asyncio.run(talk()).strip() == "yes"


def test_ctxd_is_killed_at_both_ends_of_an_editors_answer(daemon: Daemon, name: str) -> None:
    daemon.run(name, ASKING, mode="turn")

    async def talk() -> str:
        async with edited(daemon, name) as (editor, connection):
            session = await opened(connection)
            turn = asyncio.create_task(connection.prompt(session_id=session, prompt=block("go")))
            await editor.until(lambda: editor.asked)
            daemon.env["CTXD_CRASH_AT"] = "ask.answered"
            await asyncio.to_thread(daemon.restart)
            editor.answers.set()
            await asyncio.to_thread(daemon.wait_killed)
            del daemon.env["CTXD_CRASH_AT"]
            await asyncio.to_thread(daemon.start)
            assert (await turn).stop_reason == "end_turn"
            assert editor.asked == ["Push to main?"]
            return editor.said()

    assert asyncio.run(talk()).strip() == "yes"
    ends = [event for event in daemon.events(name) if event["type"] == "ask.end"]
    assert [(end["status"], end["by"]) for end in ends] == [("answered", "operator uid:0")]


def test_another_person_is_faster_than_the_editor(daemon: Daemon, name: str) -> None:
    daemon.run(name, ASKING, mode="turn")

    async def talk() -> str:
        async with edited(daemon, name) as (editor, connection):
            session = await opened(connection)
            turn = asyncio.create_task(connection.prompt(session_id=session, prompt=block("go")))
            await editor.until(lambda: editor.asked)
            answered = await asyncio.to_thread(daemon.ctx, "answer", name, "no")
            assert answered.returncode == 0, answered.stderr
            await turn
            editor.answers.set()
            return editor.said()

    assert asyncio.run(talk()).strip() == "no"


def test_what_the_editor_does_not_decide_stays_open(daemon: Daemon, name: str) -> None:
    daemon.run(name, ASKING, mode="turn")

    async def talk() -> str:
        async with edited(daemon, name) as (editor, connection):
            session = await opened(connection)
            editor.chooses = False
            editor.answers.set()
            turn = asyncio.create_task(connection.prompt(session_id=session, prompt=block("go")))
            await editor.until(lambda: editor.asked)
            assert daemon.ctx("answer", name, "yes").returncode == 0
            await turn
            assert len(editor.asked) == 1
            return editor.said()

    assert asyncio.run(talk()).strip() == "yes"


def test_an_editor_that_shows_forms_gets_questions_too(daemon: Daemon, name: str) -> None:
    daemon.run(name, "sh -c 'cat > /dev/null; ctx ask \"Which colour?\"'", mode="turn")

    async def talk() -> str:
        async with edited(daemon, name) as (editor, connection):
            shows = ClientCapabilities.model_validate({"elicitation": {"form": {}}})
            await connection.initialize(protocol_version=1, client_capabilities=shows)
            session = await connection.new_session(cwd="/", mcp_servers=[])
            await connection.prompt(session_id=session.session_id, prompt=block("go"))
            assert editor.asked == ["Which colour?"]
            return editor.said()

    assert asyncio.run(talk()).strip() == "blue"
