"""Options of a chat template (`target.template_options`), such as whether the target thinks before it answers.

Templates read them as variables: Qwen3's and GLM's `enable_thinking`, DeepSeek-V3.1's `thinking`, gpt-oss' `reasoning_effort`. They are set at
the head of the template itself, so that whatever renders it (prompts, answers, evaluation, our server) has them, and a hash of the
template tells them apart. vLLM is told the same by `--default-chat-template-kwargs`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from firesteel.errors import TargetError

Option = bool | int | str
_ASKED = re.compile(r"\b([A-Za-z_]\w*)\s+is\s+(?:not\s+)?(?:defined|undefined|none|true|false)\b")
# What a renderer sets itself, and words of `apply_chat_template` that would change what it does.
_GIVEN = {"messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "return_dict"} | {
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
    "bos_token",
    "eos_token",
}


def with_options(template: str | dict[str, str] | None, options: Mapping[str, Option]) -> str | dict[str, str] | None:
    """A template (or several by name) in which `options` are set where whoever renders it does not give them.

    Raises:
        TargetError: the template never reads such a variable; names those that it asks for.
    """
    if not template or not options:
        return template
    check_options(template, options, where="target.template_options")
    return {name: _head(options) + text for name, text in template.items()} if isinstance(template, dict) else _head(options) + template


def check_options(template: str | dict[str, str], options: Mapping[str, Any], *, where: str) -> None:
    """Every option is a variable that the template reads.

    Raises:
        TargetError: one is not, or is none for a caller to set; names it, and those that the template asks for.
    """
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    for name in options:
        if name in _GIVEN or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise TargetError(f"{where} has {name!r}, which is no option of a template", mend="leave it out")
        if re.search(rf"\b{name}\b", text) is None:
            asked = sorted(set(_ASKED.findall(text)) - _GIVEN)
            near = difflib.get_close_matches(name, asked, n=1)
            known = f"did you mean {near[0]}?" if near else f"it asks for: {', '.join(asked) or 'none'}"
            raise TargetError(f"{where} has {name!r}, which the chat template does not read", mend=known)


def _head(options: Mapping[str, Option]) -> str:
    # The newline is the block's own (`trim_blocks`, as all chat templates are rendered); an `if` has no scope of its own.
    return "".join(f"{{% if {name} is not defined %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}" for name, value in sorted(options.items())) + "\n"


def _literal(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)
