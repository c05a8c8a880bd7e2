"""From a client's request to what the engine is asked."""

from __future__ import annotations

from collections.abc import Sequence

from firesteel.decoding.batched.protocol import Ask
from firesteel.decoding.sampling import Sampling
from firesteel.errors import FiresteelError
from firesteel.serving.answer import Answer
from firesteel.serving.api_types import ChatRequest, CompletionRequest, Request
from firesteel.serving.refusals import Refusal, too_long
from firesteel.serving.service import Service

# OpenAI's default of /v1/completions; a chat may use the rest of the context.
_COMPLETION_TOKENS = 16
# Below this a division by the temperature may overflow, and sampling could not be told from the likeliest token.
_COLDEST = 1e-3


def read_prompts(service: Service, asked: Request) -> list[list[int]]:
    """Token ids of each prompt. Slow for long texts: not to be called in asyncio's thread.

    Raises:
        Refusal: a prompt is empty, of unknown tokens, or refused by the chat template; or more answers are wanted than this server ever has room for.
    """
    served = service.served
    wanted = (asked.n or 1) * (len(asked.prompts) if isinstance(asked, CompletionRequest) else 1)
    if wanted > service.thread.most:
        raise Refusal(400, f"{wanted} answers in one request; this server has room for {service.thread.most}", param="n")
    try:
        if isinstance(asked, ChatRequest):
            return [served.encode_chat([m.turn() for m in asked.messages], asked.offered, asked.chat_template_kwargs or {})]
        assert isinstance(asked, CompletionRequest)
        found = [served.encode(p) if isinstance(p, str) else p for p in asked.prompts]
    except FiresteelError as e:
        raise Refusal(400, str(e), param="messages" if isinstance(asked, ChatRequest) else "prompt") from None
    if not found or not all(found):
        raise Refusal(400, "the prompt has no tokens: give at least one", param="prompt")
    highest = max(map(max, found))
    if highest >= served.vocab_size:
        raise Refusal(400, f"the prompt has token id {highest}; the model has {served.vocab_size} tokens", param="prompt")
    return found


def plan_asks(service: Service, asked: Request, prompts: Sequence[list[int]]) -> list[tuple[Ask, Answer]]:
    """What the engine is asked: `n` answers to each prompt, one prompt after another.

    Raises:
        Refusal: prompt and answer do not fit the context.
    """
    served, engine = service.served, service.engine
    eos = (frozenset() if asked.ignore_eos else served.eos_ids) | frozenset(asked.stop_token_ids or ())
    sampling, logprobs = _sampling(asked, served.vocab_size), _logprobs(asked)
    found = []
    for prompt in prompts:
        room = engine.max_length - len(prompt)
        wanted = _wanted(asked)
        if room < 1 or (wanted is not None and wanted > room):
            raise too_long(len(prompt), wanted, engine.max_length)
        for k in range(asked.n or 1):
            answer = Answer(served.decode, asked.stops, include_stop=asked.include_stop_str_in_output)
            # Answers of one request differ, and the first is what it would be alone.
            seed = None if asked.seed is None else (asked.seed + k) % 2**63
            ask = Ask(tuple(prompt), wanted or room, sampling, seed, eos, answer.stop, logprobs, asked.speculate)
            found.append((ask, answer))
    return found


def _wanted(asked: Request) -> int | None:
    if isinstance(asked, ChatRequest):
        return asked.max_completion_tokens or asked.max_tokens
    return asked.max_tokens or _COMPLETION_TOKENS


def _sampling(asked: Request, vocab_size: int) -> Sampling:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if temperature < _COLDEST:
        return Sampling()
    top_k = None if asked.top_k is None or asked.top_k < 1 else min(asked.top_k, vocab_size)
    return Sampling(temperature, top_k, asked.top_p or 1.0, asked.min_p or 0.0)


def _logprobs(asked: Request) -> int | None:
    if isinstance(asked, ChatRequest):
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs if isinstance(asked, CompletionRequest) else None
