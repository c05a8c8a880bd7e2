"""The KV connector that vLLM loads by `kv_connector_module_path`: hands out the states that `extract_hidden_states` puts into its cache.

vLLM keeps the captured layers of every token in a cache group of its own, written at the end of each step, before the final norm.
This connector takes a prompt's states at the end of the step in which its prefill ends: all chunks are there by then, also those of a
prefix that was found in the cache. Captured states are whole on every tensor-parallel rank; rank 0 hands them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from firesteel.errors import FiresteelError
from firesteel.hidden.exchange import open_exchange
from firesteel.hidden.weights import weights_digest
from firesteel.inside_vllm.plan import LAYER, Planner, Save, find_group
from firesteel.inside_vllm.writer import Writer


@dataclass
class StatesMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers about a step."""

    saves: list[Save] = field(default_factory=list)


class FiresteelStates(KVConnectorBase_V1, SupportsHMA):
    """Hidden states, out only. Its settings, `kv_connector_extra_config`, are written by `firesteel extract-server`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        model, parallel, speculative = vllm_config.model_config, vllm_config.parallel_config, vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise FiresteelError("hidden states need the speculative method extract_hidden_states", mend="start vLLM by firesteel extract-server")
        if parallel.pipeline_parallel_size > 1 or getattr(parallel, "decode_context_parallel_size", 1) > 1:
            raise FiresteelError("hidden states cannot be taken with pipeline or context parallelism", mend="use tensor parallelism")
        ids = list(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        layers = model.get_total_num_hidden_layers()
        if layers not in ids:
            raise FiresteelError(f"eagle_aux_hidden_state_layer_ids={ids} lacks the output of the last layer, {layers}")
        self.group, self.block_size = find_group(kv_cache_config)
        weights = weights_digest(model.model, model.revision)
        self.planner = Planner(ids, layers, self.block_size, model.max_model_len, weights, model.model)
        self.cache: Tensor | None = None
        self.writer: Writer | None = None

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> StatesMetadata:
        out, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in out.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            extra = new.sampling_params.extra_args if new.sampling_params is not None else None
            self.planner.start(new.req_id, new.prompt_token_ids, (extra or {}).get("kv_transfer_params"))

        def blocks(request: str) -> Sequence[int]:
            return list(out.kv_connector_block_state.get_block_ids(request)[self.group])

        return StatesMetadata(self.planner.step(computed, out.num_scheduled_tokens, blocks))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # False: the states are out of the blocks already, which may be used again.
        return False, self.planner.finish(request.request_id)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if get_tensor_model_parallel_rank() != 0:
            return
        found = [cache for name, cache in kv_caches.items() if LAYER in name]
        if len(found) != 1 or found[0].ndim != 4 or found[0].shape[1:3] != (len(self.planner.layer_ids), self.block_size):
            shapes = {name: list(cache.shape) for name, cache in kv_caches.items() if LAYER in name}
            raise FiresteelError(f"vLLM's cache of hidden states is not [blocks, {len(self.planner.layer_ids)}, {self.block_size}, d]: {shapes}")
        self.cache = found[0]
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.writer = Writer(
            open_exchange(extra), self.planner.layer_ids, self.planner.num_layers, self.planner.weights, lease=extra["lease"], threads=extra.get("threads", 2)
        )

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        """Called at the end of a step, after states were written to the cache."""
        if self.writer is None or self.cache is None or not self.has_connector_metadata():
            return
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StatesMetadata)
        for save in metadata.saves:
            self.writer.submit(save, self.cache)
        metadata.saves = []

    def get_finished_count(self) -> int:
        return 1

    def shutdown(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
