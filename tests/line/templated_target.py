"""A tiny random chat model whose tokenizer reads any text, with a chat template of the tests of `prompts`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tiny_target import save_tiny_target

sys.path.insert(0, str(Path(__file__).parent.parent / "prompts"))

from prompt_templates import byte_level

VOCAB = 544
END = 3  # <|im_end|>


def save_templated_target(folder: Path, template: str) -> Path:
    """Write the model; its texts end with `<|im_end|>`."""
    save_tiny_target(folder, vocab=VOCAB)
    byte_level(template).save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": END}))
    return folder
