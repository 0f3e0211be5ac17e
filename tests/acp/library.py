"""An agent made with the protocol's own library, which checks every frame that it gets."""

from __future__ import annotations

import asyncio
from typing import Any

import acp
from acp.schema import (
    AgentCapabilities,
    PermissionOption,
    SessionCapabilities,
    SessionResumeCapabilities,
    ToolCallUpdate,
)


class Agent:
    """Asks before it answers; a prompt "hold" ends when it is cancelled."""

    def __init__(self) -> None:
        self.client: Any = None
        self.cancelled = asyncio.Event()

    def on_connect(self, conn: Any) -> None:
        self.client = conn

    async def initialize(self, protocol_version: int, **_: Any) -> acp.InitializeResponse:
        sessions = SessionCapabilities(resume=SessionResumeCapabilities())
        capabilities = AgentCapabilities(session_capabilities=sessions)
        return acp.InitializeResponse(
            protocol_version=protocol_version, agent_capabilities=capabilities
        )

    async def new_session(self, **_: Any) -> acp.NewSessionResponse:
        return acp.NewSessionResponse(session_id="new")

    async def resume_session(self, session_id: str, **_: Any) -> dict[str, Any]:
        return {}

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> acp.PromptResponse:
        text = prompt[-1].text
        call = acp.start_tool_call("c1", "to edit", kind="edit", status="pending")
        await self.client.session_update(session_id=session_id, update=call)
        if text == "hold":
            self.cancelled.clear()
            await self.say(session_id, "holding")
            await self.cancelled.wait()
        options = [
            PermissionOption(option_id=kind, name=kind, kind=kind)
            for kind in ("allow_once", "reject_once")
        ]
        answer = await self.client.request_permission(
            session_id=session_id, tool_call=ToolCallUpdate(tool_call_id="c1"), options=options
        )
        outcome = getattr(answer.outcome, "option_id", answer.outcome.outcome)
        await self.say(session_id, f"{session_id} {text}: {outcome}")
        cancelled = self.cancelled.is_set()
        return acp.PromptResponse(stop_reason="cancelled" if cancelled else "end_turn")

    async def say(self, session_id: str, text: str) -> None:
        update = acp.update_agent_message_text(text)
        await self.client.session_update(session_id=session_id, update=update)

    async def cancel(self, session_id: str, **_: Any) -> None:
        self.cancelled.set()


if __name__ == "__main__":
    asyncio.run(acp.run_agent(Agent(), use_unstable_protocol=True))  # type: ignore[arg-type]
