"""Runs in vLLM's environment: serves one target with several drafters in turn and writes down what vLLM drafted and counted.

    .venv-vllm/bin/python tests/vllm/engine.py JOB.json OUT.json

A job names `target`, `prompts` (lists of token ids), `max_tokens`, `temperature`, and `runs`: {name: speculative config, or null for plain
decoding}. A run's result has `tokens` and `drafts` per prompt (every proposal, in order) and the `counters`; or `error`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found = {}
    for name, speculative in job["runs"].items():
        try:
            found[name] = serve(job, speculative)
        except Exception as e:  # one that does not load must not hide the others
            found[name] = {"error": f"{type(e).__name__}: {e}", "trace": traceback.format_exc()}
        Path(sys.argv[2]).write_text(json.dumps(found))


def serve(job: dict, speculative: dict | None) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    started = time.monotonic()
    fix_context_norms()
    fix_temperatures()
    llm = LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=len(job["prompts"]),
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    try:
        drafts = record(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
        before, loaded = counters(llm), time.monotonic()
        sampling = SamplingParams(temperature=job["temperature"], max_tokens=job["max_tokens"], seed=1)
        outputs = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
        after = counters(llm)
        # Requests are numbered in the order of the prompts; the engine adds a suffix to the number.
        by_number = {int(key.split("-")[0]): rows for key, rows in drafts.items()}
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "drafts": [by_number.get(int(o.request_id), []) for o in outputs],
            "seconds": [loaded - started, time.monotonic() - loaded],
            "counters": {k: [a - b for a, b in zip(after[k], before[k], strict=True)] for k in after},
        }
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def record(runner: object) -> dict[str, list[list[int]]]:
    """Every proposal of either model runner, by request."""
    drafts: dict[str, list[list[int]]] = {}

    def note(requests, tokens):
        rows = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        for request, row in zip(requests, rows, strict=False):
            drafts.setdefault(request, []).append([int(t) for t in row])

    if getattr(runner, "speculator", None) is not None:
        propose = runner.speculator.propose

        def proposing(batch, *args, **kwargs):
            tokens = propose(batch, *args, **kwargs)
            note(batch.req_ids, tokens[: len(batch.req_ids)])
            return tokens

        runner.speculator.propose = proposing
    elif hasattr(runner, "propose_draft_token_ids"):
        inner = runner.propose_draft_token_ids

        def proposing_first(*args, **kwargs):
            tokens = inner(*args, **kwargs)
            note(list(runner.input_batch.req_ids), tokens)
            return tokens

        runner.propose_draft_token_ids = proposing_first
    return drafts


def counters(llm: object) -> dict[str, list[int]]:
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num"):
            found[metric.name.removeprefix("vllm:spec_decode_num_")] = list(metric.values) if hasattr(metric, "values") else [metric.value]
    return found


def fix_context_norms() -> None:
    """vLLM's CPU `rms_norm` takes the first row of a matrix of weights for all rows: draft layers after the first read context keys of a wrong norm."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            scale = torch.rsqrt(keys[layer].float().pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
            out[layer] = (keys[layer].float() * scale).to(keys.dtype) * weight
        return out

    DFlashQwen3Model._normalize_context_k = normalize


def fix_temperatures() -> None:
    """vLLM's CPU `expand_kernel_impl` writes the temperatures of drafted tokens into a copy: the first model runner divides logits by unset memory."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0) -> torch.Tensor:
        replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
        return replaced.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)).long())

    rejection_sampler.expand_batch_to_tokens = expand


if __name__ == "__main__":
    main()
