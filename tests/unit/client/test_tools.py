"""Tools: listed, described and called."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.fakes import ASKED, FakeAgent, FakeRoot, Run, eventually, is_asleep


def make_tool(root: FakeRoot, name: str) -> Path:
    directory = root.path / "tool" / f"{name}.d"
    directory.mkdir(parents=True)
    for file, text in (
        ("description", "Gets it.\nAt once."),
        ("family", "core"),
        ("schema", '{"type": "object"}'),
        ("output_schema", "not json"),
    ):
        (directory / file).write_text(text + "\n")
    (root.path / "tool" / name).touch()
    return root.path / "tool" / name


DESCRIBED = 'Gets it.\nAt once.\n\ninput:\n{\n  "type": "object"\n}\n\noutput:\nnot json\n'


def test_tool_list_and_show(root: FakeRoot, run: Run) -> None:
    make_tool(root, "Get")
    assert run("tool")[1] == "TOOL  FAMILY  DESCRIPTION\nGet   core    Gets it.…\n"
    described = [{"name": "Get", "family": "core", "description": "Gets it.\nAt once."}]
    assert json.loads(run("tool", "list", "--json")[1]) == described
    assert run("tool", "show", "Get") == (0, DESCRIBED, "")
    assert run("tool", "show", "Nope") == (1, "", 'ctx: no tool "Nope"\n')


def answer(output: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool", "output": output}


OUTPUT = {"agent_id": "ü", "text": "a\nb\ud800"}


@pytest.mark.parametrize(
    ("argv", "stdin", "given"),
    [
        (["Get", '{"agent_id": "x"}'], b"", {"agent_id": "x"}),
        (["call", "Get", "-"], b'{\n"a": 1}\n', {"a": 1}),
        (["call", "Get", "-"], b" \n", {}),
        (["call", "Get"], b"", {}),
        (["call", "Get", "{}"], b"not read", {}),
    ],
)
@pytest.mark.parametrize("in_an_agent", [False, True])
def test_tool_call(
    root: FakeRoot, run: Run, argv: list[str], stdin: bytes, given: Any, in_an_agent: bool
) -> None:
    if in_an_agent:
        (root.path / "self").symlink_to("agent/x.d")
        root.agent("x", status="busy")
    news = {"type": "delta", "id": "another", "text": "not ours"}
    path = "agent/x.sock" if in_an_agent else "ctxd.sock"
    fake = FakeAgent(root, ASKED, news, answer(OUTPUT), path=path)
    expected = '{"agent_id": "ü", "text": "a\\nb\\ud800"}\n'
    assert run("tool", *argv, stdin=stdin) == (0, expected, "")
    (request,) = fake.requests
    assert request == {"op": "tool", "name": "Get", "input": given}


@pytest.mark.parametrize(
    ("frame", "status", "said"),
    [
        ({"code": "EINVAL", "message": "no number", "field": "timeout"}, 2, "timeout: no number"),
        ({"code": "EINVAL", "message": '"x" of name', "field": "name"}, 2, '"x" of name'),
        ({"code": "EACCES", "message": "no"}, 13, "no"),
        ({"code": "EPERM", "message": "no"}, 13, "no"),
        ({"code": "EOPNOTSUPP", "message": "no"}, 69, "no"),
        ({"code": "EDQUOT", "message": "no"}, 1, "no"),
        ({"code": "ESRCH", "message": "no"}, 1, "no"),
        ({"code": "ENOENT", "message": "no such task"}, 1, "no such task"),
    ],
)
def test_tool_refusals(
    root: FakeRoot, run: Run, frame: dict[str, Any], status: int, said: str
) -> None:
    make_tool(root, "Get")
    FakeAgent(root, ASKED, {"type": "error", **frame}, path="ctxd.sock")
    assert run("tool", "Get", "{}") == (status, "", f"ctx: {said} ({frame['code']})\n")


def test_tools_that_are_not_there(root: FakeRoot, run: Run) -> None:
    assert run("tool", "Get", "{}")[0] == 69  # no daemon
    error = {"type": "error", "code": "ENOENT", "message": "no such tool"}
    FakeAgent(root, ASKED, error, path="ctxd.sock")
    assert run("tool", "Get", "{}") == (69, "", "ctx: no such tool (ENOENT)\n")
    (root.path / "ctxd.sock").unlink()
    FakeAgent(root, ASKED, path="ctxd.sock")
    said = "ctx: Get: the connection ended before the answer\n"
    assert run("tool", "Get", "{}") == (69, "", said)


BAD = [
    ("{", "not JSON: line 1, column 2: a key in double quotes belongs here"),
    ("[]", 'not a JSON object such as {"key": "value"}: []'),
    ("3", 'not a JSON object such as {"key": "value"}: 3'),
    ("[" * 60_000, "not JSON that can be read: too long a number, or nested too deep"),
    ("9" * 5000, "not JSON that can be read: too long a number, or nested too deep"),
    ("{'a': 1}", "not JSON: line 1, column 2: a key in double quotes belongs here"),
    ("\n {'a': 1}", "not JSON: line 2, column 3: a key in double quotes belongs here"),
    ("{\n\"a\": b}", "not JSON: line 2, column 6: a value is missing here, or a text is not in "
                     "double quotes"),
    ('{"a" 1}', "not JSON: line 1, column 6: a comma or a colon belongs here, or the end of a list"
                " or an object"),
    ('{"a": 1', "not JSON: line 1, column 8: a comma or a colon belongs here, or the end of a list"
                " or an object"),
    ('{"a": 1\n', "not JSON: line 1, column 8: a comma or a colon belongs here, or the end of a "
                  "list or an object"),
    ("{} {}", "not JSON: line 1, column 4: the text ought to end here"),
    ('{"a": "b', "not JSON: line 1, column 7: the text that begins here has no closing double "
                 "quote"),
    ('{"a": "b\nc"}', "not JSON: line 1, column 9: a text cannot have a line break or TAB: write "
                      "\\n or \\t"),
    (r'{"a": "\d"}', "not JSON: line 1, column 8: JSON has no such escape: write \\\\ for a "
                     "backslash"),
    ('{"a": \xff}', "not UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), BAD)
def test_bad_tool_input(root: FakeRoot, run: Run, text: str, said: str) -> None:
    status, out, err = run("tool", "Get", "-", stdin=text.encode("latin-1"))
    assert (status, out, err) == (2, "", f"ctx: the input is {said}\n")


def test_a_call_leaves_the_input_of_a_loop_alone(root: FakeRoot, run: Run) -> None:
    FakeAgent(root, ASKED, answer({}), path="ctxd.sock")
    said = "ctx: standard input is not read: for the input of the tool, say -\n"
    assert run("tool", "Get", stdin=b"b\nc\n") == (0, "{}\n", said)


def test_a_tool_is_its_own_command(root: FakeRoot, program: Path) -> None:
    handle = make_tool(root, "Get")
    shutil.copy(program, handle)
    environment = {**os.environ, "CTX_ROOT": "/nowhere"}

    def call(*argv: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        process = subprocess.run([handle, *argv], input=stdin, capture_output=True, env=environment)
        return process.returncode, process.stdout, process.stderr

    for argv, stdin in (['{"a": 1}'], b""), (["--", '{"a": 1}'], b""), ([], b'{"a": 1}'):
        fake = FakeAgent(root, ASKED, answer({"b": 2}), path="ctxd.sock")
        assert call(*argv, stdin=stdin) == (0, b'{"b": 2}\n', b"")
        assert fake.requests[0]["name"] == "Get" and fake.requests[0]["input"] == {"a": 1}
        (root.path / "ctxd.sock").unlink()
    assert call("{}")[0] == 69
    assert call("a", "b")[0] == 2
    status, out, err = call("--help")
    assert (status, err) == (0, b"")
    assert out.startswith(f"usage: {handle} [JSON]\n".encode())
    assert out.endswith(DESCRIBED.encode())


def test_ctrl_c_leaves_a_tool_that_blocks(root: FakeRoot, spawned: Any) -> None:
    fake = FakeAgent(root, ASKED, ASKED, path="ctxd.sock")
    process = spawned("tool", "Get", '{"block": true}')
    eventually(lambda: fake.requests and is_asleep(process))
    process.send_signal(signal.SIGINT)
    assert process.communicate() == (b"", b"")
    assert process.returncode == 130
