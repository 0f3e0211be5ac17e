"""The tool with which an agent says what came of its work."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, Final

from ctxfs.tools.schemas import listed, shape, text
from ctxfs.tools.tool import Does, Request, about, lines, tool
from runtime.errors import TooLargeError
from runtime.texts.names import dump_json

_REF: Final = shape(
    {"path": text("an absolute path, or one below artifact/", minLength=1)},
    {
        "hash": text("a hash of what is there"),
        "kind": text("what it is, such as report or patch"),
        "summary": text("what it says, in a sentence"),
    },
)


@tool(
    "ResultWrite",
    does=Does.DESTROYS | Does.REPEATS,
    example={
        "text": "Two bugs, both in the parser.",
        "refs": [{"path": "artifact/bugs.md", "kind": "report", "summary": "where they are"}],
    },
    required={"text": text("the result", minLength=1)},
    optional={"refs": listed(_REF, "references; those that are there stay if it is omitted")},
    output=shape({"result_path": text("the file with the result")}),
)
async def _write(request: Request) -> dict[str, Any]:
    """Write your result, and the references that belong to it, for whoever gave you your task. Use
    it once the task is done, or earlier for what is done so far; for progress that you alone read
    use WorkUpdate. Each call replaces the text, and the references if you give them. Without a
    result, the end of your standard output is the result. What you write stays, also if you run
    again. Put long material into artifact/ and name it in refs."""
    # refs.jsonl, then result.md: from the checks on, nothing else happens meanwhile
    given, agent, agents = request.input, request.agent, request.agents
    directory = f"agent/{agent.name}.d"
    result = lines(given["text"]).encode()
    refs = "".join(f"{dump_json(ref)}\n" for ref in given.get("refs", ()))
    limit = request.base.runtime.config.document_max
    if len(result) > limit:
        raise TooLargeError(f"text: a document may have at most {limit} bytes (document_max)")
    async with AsyncExitStack() as stack:
        staged = None
        if refs:
            with about("refs"):
                staged = await stack.enter_async_context(
                    request.paths.staged(f"{directory}/refs.jsonl", refs)
                )
        request.paths.check_writer(f"{directory}/result.md")
        share = agents.disk.share(agent)
        share.check(request.caller, len(refs.encode()) + len(result))
        agents.documents.result_written(agent)
        if staged is not None:
            staged.flush()
        elif "refs" in given:
            agents.documents.write(agent, "refs.jsonl", b"")
        agents.documents.write(agent, "result.md", result)
        share.note(len(result))
    return {"result_path": request.path(f"{directory}/result.md")}
