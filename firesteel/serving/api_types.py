"""What clients may ask: OpenAI's requests with vLLM's extras that load generators use, and Firesteel's own two.

A field that is not here is refused, and so is a value that would have to be ignored: a client learns at once what it does not get.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from firesteel.serving.refusals import Refusal

_Stop = Annotated[str, StringConstraints(min_length=1)]
_Id = Annotated[int, Field(ge=0)]
_HIGHEST = 2**63 - 1

# Fields of several shapes: an error of one of the shapes would mislead.
_EITHER = {
    "prompt": "a text, a list of token ids, or a list of either",
    "stop": "a text that is not empty, or a list of up to 4",
}

R = TypeVar("R", bound="Request")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the usage so far with every chunk
    include_obfuscation: bool = False


class Request(_Strict):
    """What both APIs share.

    Attributes:
        speculate: Firesteel's; False decodes without the drafter.
        firesteel: Firesteel's; choices tell of each token whether it was drafted.
    """

    # Fields whose only supported values change nothing.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "min_tokens": (0,),
        "store": (False,),
        "service_tier": ("auto", "default"),
        "priority": (0,),
    }

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_HIGHEST, le=_HIGHEST)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    stop_token_ids: list[_Id] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    speculate: bool = True
    firesteel: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    store: bool | None = None
    service_tier: str | None = None
    priority: int | None = None

    @model_validator(mode="after")
    def _refuse(self) -> Request:
        for name, allowed in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise Refusal(400, f"{name} is not supported: leave it out", param=name, code="unsupported_value")
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options is only for stream=true", param="stream_options")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Request):
    """`POST /v1/completions`. `prompt`: a text, token ids, or a list of either."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {**Request.neutral, "echo": (False,), "suffix": ("",), "best_of": (1,)}

    prompt: str | list[_Id] | list[str] | list[list[_Id]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        found: list[Any] = self.prompt
        return [found] if found and isinstance(found[0], int) else found


class ResponseFormat(_Strict):
    type: str
    json_schema: Any = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """A turn. Tool calls of earlier answers go into the template, as do their results."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    # What OpenAI's answers have, so that one can be sent back as it came.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    def turn(self) -> dict[str, Any]:
        """As chat templates take it: text as one string, arguments of calls as objects."""
        content = "".join(p.text for p in self.content) if isinstance(self.content, list) else self.content or ""
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.tool_calls:
            found["tool_calls"] = [_call(c) for c in self.tool_calls]
        return found


class ChatRequest(Request):
    """`POST /v1/chat/completions`."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {**Request.neutral, "tool_choice": ("none", "auto"), "reasoning_effort": ()}

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse_chat(self) -> ChatRequest:
        if self.response_format is not None and self.response_format.type != "text":
            raise Refusal(
                400, f"response_format {self.response_format.type!r} is not supported: only text is", param="response_format", code="unsupported_value"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        if not any(m.role in ("user", "tool") for m in self.messages):
            raise Refusal(400, "messages has no user turn to answer", param="messages")
        return self

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """Tools that the template shows."""
        return None if self.tool_choice == "none" else self.tools or None


def parse(kind: type[R], body: bytes) -> R:
    """A request from its body.

    Raises:
        Refusal: no JSON, or not such a request; names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        # Of a field of several shapes, the shape that was met furthest is the one that was meant.
        first = min(e.errors(include_url=False, include_context=False), key=lambda x: (x["type"] != "extra_forbidden", -len(x["loc"])))
    if first["type"] == "json_invalid":
        raise Refusal(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    names = [str(part) for part in first["loc"] if "[" not in str(part)]  # without the names of shapes
    if first["type"] == "extra_forbidden":
        raise Refusal(400, f"unknown parameter {'.'.join(names)}", param=names[0], code="unknown_parameter")
    got = repr(first["input"])
    got = got if len(got) <= 80 else got[:77] + "..."
    missing = first["type"] == "missing"
    if missing:
        message = f"{'.'.join(names)} is missing"
    elif names and names[0] in _EITHER:
        message = f"{names[0]} must be {_EITHER[names[0]]} (got {got})"
    else:
        message = f"{'.'.join(names) or 'the body'}: {first['msg'].lower()} (got {got})"
    raise Refusal(400, message, param=names[0] if names else None, code="missing_parameter" if missing else "invalid_value")


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, "messages: a tool call needs function.name", param="messages")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise Refusal(400, "messages: the arguments of a tool call are not valid JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
