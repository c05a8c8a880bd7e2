"""What validation promises is what decoding reaches, for every algorithm and option, on documents where the drafter knows what to draft.

The tiny target's held-out text says little here: an untrained drafter that repeats the anchor is accepted as often as a trained one. So each
drafter is trained until it knows a few documents by heart, and promise and decoding are compared on these.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hybrid_target import save_hybrid_target
from line_screen import QuietScreen
from tiny_target import recipe_settings, write_prompts

from firesteel.cli.runner import LINE
from firesteel.recipe import recipe_from_dict
from firesteel.stages import extract, package, train
from firesteel.stages.line import Line
from firesteel.stages.runtime import open_trained
from firesteel.training.data import held_out_batches
from firesteel.training.loop import run_validation

WINDOW = {"num_layers": 2, "attention": "mixed", "sliding_window": 8}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
SMALL = {"group": 8, "rank": 8, "top_k": 6}
DRAFTERS: dict[str, dict[str, object]] = {
    "dspark": {"algorithm": "dspark"},
    "dspark-rnn-fill-in-reduced-window": {"algorithm": "dspark", "markov_head": "rnn", "sample_from_anchor": False, "draft_vocab_size": 60, **WINDOW},
    "dspark-latent": {"algorithm": "dspark", "backbone": "mla", "mla": MLA, "num_layers": 2},
    "dflash-causal-window": {"algorithm": "dflash", "causal": True, **WINDOW},
    "dflash2": {"algorithm": "dflash2", "dflash2": SMALL},
    "dflash2-anchor-window": {"algorithm": "dflash2", "dflash2": SMALL, "sample_from_anchor": True, **WINDOW},
    "eagle3": {"algorithm": "eagle3"},
    "eagle3-reduced-window": {"algorithm": "eagle3", "draft_vocab_size": 60, "eagle": {"norm_output": True, "layer_style": "qwen3"}, **WINDOW},
    "peagle": {"algorithm": "peagle"},
    "peagle-reduced-window": {"algorithm": "peagle", "draft_vocab_size": 60, **WINDOW},
    "mtp": {"algorithm": "mtp", "block_size": 3},
}


@pytest.fixture(scope="module")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_hybrid_target(folder / "target")
    write_prompts(folder / "train.jsonl", 16)
    write_prompts(folder / "eval.jsonl", 4, start=100)
    return folder


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("few")
    write_prompts(folder / "train.jsonl", 16)
    write_prompts(folder / "eval.jsonl", 4, start=100)
    (folder / "target").symlink_to(base_folder / "target")
    return folder


@pytest.mark.parametrize("name", DRAFTERS)
def test_decoding_walks_the_rounds_that_validation_replayed(name: str, llama_folder: Path, hybrid_folder: Path) -> None:
    mtp = name == "mtp"
    settings = recipe_settings(
        hybrid_folder if mtp else llama_folder,
        drafter=DRAFTERS[name],
        responses={"max_new_tokens": 24, "precision": "float32"},
        # States captured with bfloat16 products are not to the bit those that decoding meets.
        hidden={"precision": "float32"},
        train={"max_steps": 160, "validate_every": 160, "lr": 1e-2},
        package={"tolerance": 1e-9},
    )
    if mtp:
        del settings["target"]["layer_ids"]  # type: ignore[attr-defined]
    line = Line(recipe_from_dict(settings), QuietScreen())
    for _, stage in LINE[:4]:
        stage(line)
    algorithm, hidden = line.recipe.drafter.algorithm, line.input("hidden")
    trained = train.load_trained(line, algorithm)
    keys = [d.key for d in extract.read_index(hidden, "train")]
    job = train.make_job(line, line.folder, trained.config, trained.vocab, hidden, lambda values: None, tokens=1)
    job.drafter, job.held_out = trained.drafter, held_out_batches(job.source.store, keys, job.source.layout, batch_tokens=96)
    promised = run_validation(job)
    proof = package._prove(line, open_trained(line, algorithm), job.source.store, keys, promised.acceptance_length)
    assert proof.decoded == pytest.approx(promised.acceptance_length, abs=1e-9)
    assert promised.acceptance_length > 2, "a drafter that does not know what to draft proves nothing"
