"""Our checkpoints in vLLM, as they are: the text is the target's, the drafts are ours token for token, and the counters say what evaluation said."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from served_drafts import Both, Served, eval_prompts
from served_environment import vllm_environment

from firesteel.decoding.decode import decode_speculative
from firesteel.package.card import speculative_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

# The first model runner serves these on a CPU; the others need the second one, and that an interpreter.
FIRST = ("eagle3", "eagle3-qwen3", "eagle3-normed", "peagle", "peagle-qwen3", "dflash", "dflash-reduced")
SECOND = ("dspark-anchor", "dspark-fill", "dspark-reduced", "dspark-mixed", "dspark-sliding-causal", "dflash2", "eagle3")
TEMPERATURE = 0.4


@pytest.fixture(scope="module")
def first(serve_both: Callable[..., dict[str, Both]]) -> dict[str, Both]:
    return serve_both(FIRST, second_runner=False)


@pytest.fixture(scope="module")
def second(serve_both: Callable[..., dict[str, Both]]) -> dict[str, Both]:
    return serve_both(SECOND, second_runner=True)


@pytest.mark.parametrize("name", FIRST)
def test_first_runner(first: dict[str, Both], name: str) -> None:
    check(first[name])


@pytest.mark.parametrize("name", SECOND)
def test_second_runner(second: dict[str, Both], name: str) -> None:
    check(second[name])


def check(both: Both) -> None:
    assert both.theirs["tokens"] == both.plain, "drafting changed the text"
    assert [o.tokens for o in both.ours] == both.plain, "the two engines write different texts"
    for ours, theirs in zip(both.ours, both.theirs["drafts"], strict=True):
        # vLLM drafts once more after the last token.
        assert len(theirs) in (len(ours.drafts), len(ours.drafts) + 1)
        assert theirs[: len(ours.drafts)] == ours.drafts
    # A server counts drafted tokens behind the end of an answer as accepted; ours, left to run on, counts them too: the same numbers.
    counters, accepted = both.theirs["counters"], [n for o in both.ours for n in o.accepted]
    width = both.served.runtime.num_drafts
    assert counters["drafts"] == [len(accepted)]
    assert counters["draft_tokens"] == [len(accepted) * width]
    assert counters["accepted_tokens_per_pos"] == [sum(n > k for n in accepted) for k in range(width)]
    # Evaluation, which counts what the reader gets, differs by the last round of each answer.
    report = both.served.report
    served = 1 + counters["accepted_tokens"][0] / counters["drafts"][0]
    assert served > 1.4, "a drafter that is hardly ever right proves nothing"
    assert served == pytest.approx(report["acceptance_length"]["pooled"], rel=0.02)
    for row, count in zip(report["positions"]["unconditional"], counters["accepted_tokens_per_pos"], strict=True):
        assert count / counters["drafts"][0] == pytest.approx(row["rate"], abs=0.02)


@pytest.mark.parametrize(("name", "second_runner"), [("eagle3", False), ("peagle", False), ("dspark-anchor", True)])
def test_sampled_acceptance_resembles_ours(draft: Callable[[str], Served], run_engine: Callable[..., dict], name: str, second_runner: bool) -> None:
    """Draws differ, so lengths agree as far as chance lets them. The config is the one that we tell people to serve with."""
    served = draft(name)
    prompts = eval_prompts(served.line)
    config = speculative_config(served.runtime.config, served.runtime.contract, str(served.package))
    assert config["draft_sample_method"] == "probabilistic"
    counters = run_engine({name: config}, prompts, second_runner=second_runner, temperature=TEMPERATURE)[name]["counters"]
    theirs = 1 + counters["accepted_tokens"][0] / counters["drafts"][0]
    accepted = rounds = 0
    generator = torch.Generator().manual_seed(0)
    for prompt in prompts * 2:
        done = decode_speculative(
            served.runtime.target,
            served.runtime.session,
            prompt,
            draft_tokens=served.runtime.num_drafts,
            max_new_tokens=160,
            eos_ids=(),
            temperature=TEMPERATURE,
            generator=generator,
        )
        accepted += sum(r.accepted for r in done.rounds)
        rounds += len(done.rounds)
    assert theirs - 1 == pytest.approx(accepted / rounds, rel=0.2)


READ_CONFIG = (
    "import json, sys; from vllm.engine.arg_utils import EngineArgs\n"
    "speculative = json.loads(sys.argv[2])\n"
    "args = EngineArgs(model=sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=256, speculative_config=speculative)\n"
    "made = args.create_engine_config().speculative_config\n"
    "draft = made.draft_model_config\n"
    "print(json.dumps([made.method, made.num_speculative_tokens, draft.architectures, draft.hf_config.target_layer_ids]))\n"
)


def test_latent_attention_is_read_if_not_run(draft: Callable[[str], Served], vllm_python: Path, counting: Path) -> None:
    """Its layers need a GPU; its configuration is at least what vLLM takes it for. vLLM counts layers from the first one's output."""
    served = draft("dspark-latent")
    config = speculative_config(served.runtime.config, served.runtime.contract, str(served.package))
    command = [str(vllm_python), "-c", READ_CONFIG, str(counting / "target"), json.dumps(config)]
    done = subprocess.run(command, env=vllm_environment(second_runner=True), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["dspark", 5, ["K3DSparkModel"], [0, 1, 3]]
