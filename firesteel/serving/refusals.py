"""Refusal: what a client is told instead of an answer, in OpenAI's shape, so that its official client raises the right exception."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """An HTTP error with OpenAI's body.

    Args:
        status: HTTP status.
        message: what is wrong and how to mend it.
        kind: OpenAI's `type`; None takes the one that belongs to the status.
        code: a word that programs can compare, such as `context_length_exceeded`.
        param: the field of the request that is wrong.
        retry: seconds after which it is worth another try; None: the official client must not try again by itself.
    """

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, code: str | None = None, param: str | None = None, retry: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry = status, message, code, param, retry
        self.kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        found = {"x-should-retry": "false"} if self.retry is None else {"Retry-After": f"{self.retry:g}"}
        return {**found, "WWW-Authenticate": "Bearer"} if self.status == 401 else found


_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}


def too_long(prompt: int, answer: int | None, longest: int) -> Refusal:
    """A prompt of this many tokens with an answer of up to `answer` (None: any) does not fit."""
    wanted = "leaves no room for an answer" if answer is None else f"and an answer of up to {answer} tokens do not fit"
    return Refusal(
        400,
        f"this model's longest context is {longest} tokens; a prompt of {prompt} tokens {wanted}: shorten the prompt"
        + ("" if answer is None else " or lower max_tokens"),
        code="context_length_exceeded",
        param="prompt",
    )


def timed_out(seconds: float) -> Refusal:
    return Refusal(504, f"the answer was not finished within {seconds:g} s, the server's limit (serve.request_seconds): ask for less", code="request_timeout")


def draining() -> Refusal:
    return Refusal(503, "the server is shutting down", code="shutting_down", retry=5)


def engine_failed(reason: str, *, status: int = 500) -> Refusal:
    return Refusal(status, f"the engine has failed: {reason}; the server's log has more", code="engine_failed")
