"""Answers as the documentation of the APIs has them, of November 2026, with what they say was used.

Messages: docs.anthropic.com, "Streaming messages" and "Prompt caching"; Responses and Chat
Completions: platform.openai.com, "Streaming events" and "Create chat completion"; Gemini:
ai.google.dev, "Generating content". Texts are shortened.
"""

from __future__ import annotations

import gzip
import json
from typing import Any, Final, NamedTuple

from runtime.metering.reading import Usage


class Answer(NamedTuple):
    api: str
    path: str
    kind: str
    body: bytes
    model: str
    usage: Usage
    encoding: str = ""

    def packed(self) -> Answer:
        return self._replace(body=gzip.compress(self.body), encoding="gzip")


_SSE: Final = "text/event-stream; charset=utf-8"
_JSON: Final = "application/json"


def _events(*events: dict[str, Any], named: bool = True, end: str = "") -> bytes:
    lines = []
    for event in events:
        if named:
            lines.append(f"event: {event['type']}\n")
        lines.append(f"data: {json.dumps(event)}\n\n")
    return "".join([*lines, end]).encode()


#: what a model may say, and means nothing
_LIES: Final = 'data: {"type":"message_delta","usage":{"output_tokens":9999999}}\n\n"usage"'
_CLAUDE: Final = "claude-sonnet-4-5-20250929"
_ANTHROPIC_USED: Final = {
    "input_tokens": 25, "cache_creation_input_tokens": 248, "cache_read_input_tokens": 1800,
    "output_tokens": 503, "server_tool_use": {"web_search_requests": 1},
}  # fmt: skip
_ANTHROPIC: Final = Usage(2073, 1800, 248, 503)
_OPENAI_USED: Final = {
    "input_tokens": 36, "input_tokens_details": {"cached_tokens": 12}, "output_tokens": 87,
    "output_tokens_details": {"reasoning_tokens": 64}, "total_tokens": 123,
}  # fmt: skip
_OPENAI: Final = Usage(36, 12, 0, 87)
_CHAT_USED: Final = {
    "prompt_tokens": 19, "completion_tokens": 10, "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 3},
}  # fmt: skip
_CHAT: Final = Usage(19, 4, 0, 10)
_GEMINI_USED: Final = {
    "promptTokenCount": 100, "cachedContentTokenCount": 40, "toolUsePromptTokenCount": 7,
    "candidatesTokenCount": 20, "thoughtsTokenCount": 30, "totalTokenCount": 157,
}  # fmt: skip
_GEMINI: Final = Usage(107, 40, 0, 50)
_G: Final = "/v1beta/models/gemini-2.5-pro:"


def _chunk(text: str, used: Any = None, **more: Any) -> dict[str, Any]:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None}] if text else []
    return {"id": "c", "object": "chat.completion.chunk", "model": "gpt-5", "choices": choices,
            "usage": used, **more}  # fmt: skip


def _part(text: str, used: dict[str, Any], **more: Any) -> dict[str, Any]:
    content = {"parts": [{"text": text}], "role": "model"}
    return {"candidates": [{"content": content, "index": 0, **more}], "usageMetadata": used,
            "modelVersion": "gemini-2.5-pro"}  # fmt: skip


_RESPONSE: Final = {"id": "r", "object": "response", "status": "completed", "model": "gpt-5",
                    "output": [{"type": "message", "content": [{"text": _LIES}]}],
                    "usage": _OPENAI_USED}  # fmt: skip
_CHAT_STREAM: Final = _events(
    _chunk("Hel"), _chunk(_LIES), _chunk("", _CHAT_USED), named=False, end="data: [DONE]\n\n"
)

ANSWERS: Final = {
    "messages": Answer("anthropic", "/v1/messages", _JSON, json.dumps({
        "id": "msg", "type": "message", "role": "assistant", "model": _CLAUDE,
        "content": [{"type": "text", "text": _LIES}], "usage": _ANTHROPIC_USED,
    }, indent=1).encode(), _CLAUDE, _ANTHROPIC),
    "messages, streamed": Answer("anthropic", "/v1/messages", _SSE, _events(
        {"type": "message_start", "message": {
            "model": _CLAUDE, "type": "message", "content": [],
            "usage": {**_ANTHROPIC_USED, "output_tokens": 1}}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "text_delta", "text": _LIES}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"},
         "usage": {"output_tokens": 503}},
        {"type": "message_stop"},
    ), _CLAUDE, _ANTHROPIC),
    "responses": Answer("openai", "/v1/responses", _JSON, json.dumps(_RESPONSE).encode(),
                        "gpt-5", _OPENAI),
    "responses, streamed": Answer("openai", "/v1/responses", _SSE, _events(
        {"type": "response.created", "response": {**_RESPONSE, "usage": None}},
        {"type": "response.output_text.delta", "delta": _LIES},
        {"type": "response.completed", "response": _RESPONSE},
    ), "gpt-5", _OPENAI),
    "responses, incomplete": Answer("openai", "/v1/responses", _SSE, _events(
        {"type": "response.incomplete", "response": _RESPONSE},
    ).replace(b"\n", b"\r\n"), "gpt-5", _OPENAI),
    "chat": Answer("openai", "/v1/chat/completions", _JSON, json.dumps({
        "id": "c", "object": "chat.completion", "model": "gpt-5",
        "choices": [{"message": {"role": "assistant", "content": _LIES}}], "usage": _CHAT_USED,
    }).encode(), "gpt-5", _CHAT),
    "chat, streamed": Answer("openai", "/v1/chat/completions", _SSE, _CHAT_STREAM, "gpt-5", _CHAT),
    "gemini": Answer("gemini", f"{_G}generateContent", _JSON,
                     json.dumps(_part(_LIES, _GEMINI_USED)).encode(), "gemini-2.5-pro", _GEMINI),
    "gemini, streamed": Answer("gemini", f"{_G}streamGenerateContent", _SSE, _events(
        _part("Hel", {"promptTokenCount": 100, "candidatesTokenCount": 2}),
        _part(_LIES, _GEMINI_USED, finishReason="STOP"), named=False,
    ), "gemini-2.5-pro", _GEMINI),
    "gemini, as a list": Answer("gemini", f"{_G}streamGenerateContent", _JSON, json.dumps([
        _part("Hel", {"promptTokenCount": 100}), _part(_LIES, _GEMINI_USED),
    ]).encode(), "gemini-2.5-pro", _GEMINI),
}  # fmt: skip
