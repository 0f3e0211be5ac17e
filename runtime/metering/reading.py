"""Requests to models, as far as they are counted, and what answers say was used: pure.

An answer comes in whatever pieces the network makes of it: any cut gives the same numbers. Only
whole numbers at the places where each API has them count, and the sums of one answer only grow.

    ====================  ==========================================================
    Messages              ``message_start``, then ``message_delta``; the whole answer
    Responses             ``response.completed``, ``.incomplete``, ``.failed``; the whole answer
    Chat Completions      the chunk with ``usage``; the whole answer
    Gemini                each ``usageMetadata``
    ====================  ==========================================================
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec

#: bytes of an event, of a whole answer, and of what a compressed answer becomes
EVENT_MAX: Final = 16 << 20
_BLANK: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_DATA: Final = re.compile(rb"(?:^|(?<=[\r\n]))data: ?([^\r\n]*)")
_GEMINI_PATH: Final = re.compile(
    r"/v1beta/models/([A-Za-z0-9._-]{1,128}):(generateContent|streamGenerateContent|countTokens)"
)
#: of the name of a model, which patterns are held against
_MODEL_MAX: Final = 256
_PACKED: Final = ("gzip", "x-gzip", "deflate")
#: of zlib: with the largest window, and either of its two headers
_ANY_HEADER: Final = 32 + 15

_T = TypeVar("_T")
_D = TypeVar("_D")

#: the values of an object, which are read only where they are needed
Fields = Mapping[str, msgspec.Raw]
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECTS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_COUNT: Final = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=0, le=1 << 40)])
_NOTHING: Final = msgspec.Raw(b"null")
#: errors of what is no JSON, is not UTF-8, or is nested too deep
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class UncountableError(Exception):
    """A request that the meter lets nobody send: a status of HTTP, and one sentence."""


class Usage(NamedTuple):
    """Tokens of one answer: ``cached`` and ``written`` are parts of ``input``."""

    input: int = 0
    cached: int = 0
    written: int = 0
    output: int = 0


# values


def _as(kind: msgspec.json.Decoder[_T], raw: msgspec.Raw | bytes, instead: _D) -> _T | _D:
    """The value, if it is of this kind."""
    try:
        return kind.decode(raw)
    except _UNREADABLE:
        return instead


def fields(raw: msgspec.Raw | bytes) -> Fields:
    """The values of an object; nothing of anything else."""
    return _as(_FIELDS, raw, {})


def _objects(raw: msgspec.Raw | bytes) -> list[Fields]:
    """An object, or those of a list."""
    found = _as(_OBJECTS, raw, None)
    return [found] if isinstance(found, dict) else [*filter(None, map(fields, found or ()))]


def _at(values: Fields, places: str) -> Iterator[msgspec.Raw]:
    """The values at these places: keys with dots between them, in each object of a list."""
    for place in places.split():
        found = [values]
        *keys, last = place.split(".")
        for key in keys:
            found = [inner for each in found if key in each for inner in _objects(each[key])]
        yield from (each[last] for each in found if last in each)


def _text(values: Fields, key: str) -> str:
    """A text; an empty one for anything else."""
    return _as(_TEXT, values.get(key, _NOTHING), "")


def _counts(values: Fields, places: str) -> list[int]:
    """The numbers of tokens at these places."""
    found = (_as(_COUNT, raw, None) for raw in _at(values, places))
    return [count for count in found if count is not None]


# what each API says


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One sort of request to one API, and where its events and whole answers have what counts.

    ``kinds`` are those that have a usage, by their ``type``: the key that holds it and the model,
    and whether these numbers are the last. ``usage`` has the places (``_at``) of each number
    of ``Usage``, and ``text`` those of what a person would see; both are added up. An answer that
    has a ``total`` is exact if nothing of it is missing. ``most`` are the places in a request that
    bound each of its outputs, the first one counts, and ``count`` how many of these there are.
    """

    api: str
    kinds: Mapping[str, tuple[str, bool]]
    model: str = "model"
    usage: tuple[str, str, str, str]
    total: str = ""
    text: str
    most: str
    count: str = ""
    #: such requests cost nothing, and are not counted
    free: bool = False
    #: the model, if the path has it
    named: str = ""


_READ, _WRITTEN = "usage.cache_read_input_tokens", "usage.cache_creation_input_tokens"
_MESSAGES: Final = Form(
    api="anthropic",
    most="max_tokens",
    kinds={"message_start": ("message", False), "message_delta": ("", True), "message": ("", True)},
    usage=(f"usage.input_tokens {_READ} {_WRITTEN}", _READ, _WRITTEN, "usage.output_tokens"),
    text="delta.text delta.thinking delta.partial_json",
)
_RESPONSE_KINDS: Final = ("created", "completed", "incomplete", "failed")
_RESPONSES: Final = Form(
    api="openai",
    most="max_output_tokens",
    kinds={"": ("", True), **{f"response.{kind}": ("response", True) for kind in _RESPONSE_KINDS}},
    usage=("usage.input_tokens", "usage.input_tokens_details.cached_tokens", "",
           "usage.output_tokens"),
    text="delta",
)  # fmt: skip
_DELTA: Final = "choices.delta"
_CHAT: Final = Form(
    api="openai",
    most="max_completion_tokens max_tokens",
    count="n",
    kinds={"": ("", True)},
    usage=("usage.prompt_tokens", "usage.prompt_tokens_details.cached_tokens", "",
           "usage.completion_tokens"),
    text=f"{_DELTA}.content {_DELTA}.refusal {_DELTA}.reasoning_content "
         f"{_DELTA}.tool_calls.function.arguments",
)  # fmt: skip
_USED: Final = "usageMetadata"
#: either way it may be written
_OPTIONS: Final = ("generationConfig", "generation_config")
_GEMINI: Final = Form(
    api="gemini",
    most=" ".join(f"{holder}.{name}" for holder in _OPTIONS
                  for name in ("maxOutputTokens", "max_output_tokens")),
    count=" ".join(f"{holder}.{name}" for holder in _OPTIONS
                   for name in ("candidateCount", "candidate_count")),
    kinds={"": ("", False)},
    model="modelVersion",
    usage=(f"{_USED}.promptTokenCount {_USED}.toolUsePromptTokenCount",
           f"{_USED}.cachedContentTokenCount", "",
           f"{_USED}.candidatesTokenCount {_USED}.thoughtsTokenCount"),
    total=f"{_USED}.totalTokenCount",
    text="candidates.content.parts.text",
)  # fmt: skip


# requests


_FORMS: Final = {
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": replace(_MESSAGES, free=True),
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": replace(_RESPONSES, free=True),
    "/v1/chat/completions": _CHAT,
}
#: whose forms are known
APIS: Final = ("anthropic", "openai", "gemini")


def form_of(api: str, path: str) -> Form | None:
    """The form of a POST to this path, without its query; None for what cannot be counted."""
    form = _FORMS.get(path)
    if match := _GEMINI_PATH.fullmatch(path):
        form = replace(_GEMINI, named=match[1], free=match[2] == "countTokens")
    return form if form and form.api == api else None


class Asked(msgspec.Struct, frozen=True):
    """A request's wishes; ``size`` is that of the body that is sent on."""

    model: str
    #: of its output; None if it does not say
    most: int | None
    size: int
    #: whether the chunk with the usage was put in by the meter, and is not shown
    hides: bool = False


def asked(form: Form, body: bytes | mmap) -> tuple[Asked, bytes | mmap]:
    """Reads what a body asks for; also what is sent on. ``UncountableError`` for what cannot be
    counted."""
    try:
        values = dict(_FIELDS.decode(body))
    except _UNREADABLE:
        raise UncountableError(400, "the body is no JSON object") from None
    most = next(iter(_counts(values, form.most)), None)
    if most is not None:
        most *= max([1, *_counts(values, form.count)])
    if bytes(values.get("background", _NOTHING)) not in (b"null", b"false"):
        raise UncountableError(403, "what runs in the background cannot be counted: leave it out")
    hides = False
    if form is _CHAT and bytes(values.get("stream", _NOTHING)) == b"true":
        options = dict(fields(values.get("stream_options", _NOTHING)))
        hides = bytes(options.get("include_usage", _NOTHING)) != b"true"
        options["include_usage"] = msgspec.Raw(b"true")
        values["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    if form.api == "openai":  # who reads it may take another one of two values with one name
        body = msgspec.json.encode(values)
    model = form.named or _text(values, "model")[:_MODEL_MAX]
    return Asked(model, most, len(body), hides), body


# answers


class Reader:
    """One answer, from its first byte to its last.

    ``feed`` takes what came and returns what may be passed on when ``usage`` was counted: all of
    it, but for the last byte of a whole answer, which ``finish`` returns.
    """

    def __init__(self, form: Form, kind: str = "", encoding: str = "", hides: bool = False) -> None:
        self.usage = Usage()
        #: the model that answers; empty if it does not say
        self.model = ""
        #: bytes of text, for an estimate
        self.text = 0
        #: whether the numbers are those that the API ends with
        self.exact = False
        self._form = form
        self._total = 0
        self._streams = kind.partition(";")[0].strip().lower() == "text/event-stream"
        encoding = encoding.strip().lower()
        self._unpacked = zlib.decompressobj(_ANY_HEADER) if encoding in _PACKED else None
        #: whether nothing more is read: it is too long, or packed as nobody here can read it
        self._blind = encoding not in ("", "identity", *_PACKED)
        self._hides = hides and self._streams and self._unpacked is None and not self._blind
        self._rest = bytearray()
        self._looked = 0
        #: what may be passed on
        self._shown = bytearray()

    def feed(self, data: bytes) -> bytes:
        plain = self._plain(data)
        self._rest += plain
        if not self._hides:
            self._shown += data
        while self._streams and (end := _BLANK.search(self._rest, self._looked)):
            event = bytes(self._rest[: end.end()])
            del self._rest[: end.end()]
            self._looked = 0
            self._take(event)
        self._looked = max(0, len(self._rest) - 3)
        if self._blind or not self._streams:
            self.text += len(plain or data)
        if len(self._rest) > EVENT_MAX:
            self.text += len(self._rest) if self._streams else 0
            self._shown += self._rest if self._hides else b""
            self._blind, self._hides = True, False
            self._rest.clear()
        ready = bytes(self._shown if self._streams else self._shown[:-1])
        del self._shown[: len(ready)]
        return ready

    def finish(self) -> bytes:
        """The answer has ended as it should."""
        rest = bytes(self._rest)
        if self._streams:
            self._take(rest)
        else:
            for each in _objects(rest):
                self._read(each)
        if self._form.total:
            seen = self.usage.input + self.usage.output
            self.exact = not self._blind and 0 < self._total <= seen
        return bytes(self._shown)

    def _plain(self, data: bytes) -> bytes:
        if self._unpacked and not self._blind:
            try:
                return self._unpacked.decompress(data, EVENT_MAX + 1)
            except zlib.error:
                self._blind = True
        return b"" if self._blind else data

    def _take(self, event: bytes) -> None:
        """Reads an event, and shows it, unless it is one that nobody asked for."""
        values = fields(b"\n".join(_DATA.findall(event)))
        has_usage = self._read(values)
        if self._hides and (any(_objects(values.get("choices", _NOTHING))) or not has_usage):
            self._shown += event

    def _read(self, event: Fields) -> bool:
        """Notes what an event, or a whole answer, says; whether it has a usage."""
        form, kind = self._form, _text(event, "type")
        texts = (_as(_TEXT, raw, "") for raw in _at(event, form.text))
        self.text += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if kind not in form.kinds:
            return False
        key, last = form.kinds[kind]
        holder = fields(event.get(key, _NOTHING)) if key else event
        self.model = _text(holder, form.model)[:_MODEL_MAX] or self.model
        self._total = max(self._total, *_counts(holder, form.total), 0)
        found = [_counts(holder, each) for each in form.usage]
        if not any(found):
            return False
        self.usage = Usage(*map(max, self.usage, map(sum, found)))
        self.exact |= last
        return True
