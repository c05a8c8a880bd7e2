"""Options of a chat template: what it renders with them, who may override them, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from firesteel.errors import TargetError
from firesteel.package.contract import thinking_mode
from firesteel.prompts.template import encode_prompt, render
from firesteel.recipe import Target
from firesteel.target.loading import load_tokenizer
from firesteel.target.template_options import check_options, with_options

# The first line is the text's own: nothing of it may be lost, nor anything be put before it.
TEMPLATE = (
    "\n{%- macro shown(m) %}{% if effort is defined %}[{{ effort }}]{% endif %}{{ m.content }}{% endmacro %}"
    "start {% for m in messages %}{{ m.role }}: {{ shown(m) }}{% if enable_thinking is defined and enable_thinking is false %} (quick){% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
PLAIN = "  start {% for m in messages %}{{ m.content }}{% endfor %}{% if thinking %} hm{% endif %}"
ASKED = [{"role": "user", "content": "Hi"}]


def tokenizer(template: str | dict[str, str]) -> Any:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"w0": 0}, unk_token="w0")))
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN, "\n" + PLAIN])
@pytest.mark.parametrize("options", [{"enable_thinking": False}, {"enable_thinking": True, "effort": 'a "high" one\n', "thinking": True}, {"effort": 3}])
@pytest.mark.parametrize("generate", [True, False])
def test_options_in_the_template_are_options_given_to_it(template: str, options: dict[str, Any], generate: bool) -> None:
    known = {name: value for name, value in options.items() if name in re.findall(r"\w+", template)}
    given = tokenizer(template).apply_chat_template(ASKED, tokenize=False, add_generation_prompt=generate, **known)
    assert render(tokenizer(with_options(template, known)), ASKED, None, generate=generate, where="x") == given


def test_they_show_and_a_renderer_may_say_otherwise() -> None:
    quick = tokenizer(with_options(TEMPLATE, {"enable_thinking": False, "effort": "low"}))
    assert render(quick, ASKED, None, generate=True, where="x") == "start user: [low]Hi (quick)assistant:<think></think>"
    assert render(quick, ASKED, None, generate=True, where="x", options={"enable_thinking": True}) == "start user: [low]Hiassistant:"
    assert encode_prompt(quick, ASKED, options={"enable_thinking": True})


def test_nothing_to_set_changes_nothing() -> None:
    assert with_options(TEMPLATE, {}) == TEMPLATE
    assert with_options(None, {"enable_thinking": True}) is None


def test_all_of_several_templates_get_them() -> None:
    several = with_options({"default": TEMPLATE, "tool_use": PLAIN}, {"enable_thinking": False})
    assert isinstance(several, dict)
    quick = tokenizer(several)
    assert "(quick)" in quick.apply_chat_template(ASKED, tokenize=False)
    assert set(several) == {"default", "tool_use"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinkng": False}, "has 'enable_thinkng', which the chat template does not read\n  -> did you mean enable_thinking"),
        ({"budget": 3}, "which the chat template does not read\n  -> it asks for: effort, enable_thinking"),
        ({"messages": "x"}, "has 'messages', which is no option"),
        ({"add_generation_prompt": False}, "which is no option"),
        ({"a b": 1}, "which is no option"),
    ],
)
def test_what_the_template_does_not_read_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match="setting has ") as caught:
        check_options(TEMPLATE, options, where="setting")
    assert message in str(caught.value)


def test_a_targets_tokenizer_has_them(tmp_path: Path) -> None:
    tokenizer(TEMPLATE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    quick = load_tokenizer(str(tmp_path), Target(model=str(tmp_path), template_options={"enable_thinking": False}))
    assert "(quick)" in render(quick, ASKED, None, generate=False, where="x")
    file = tmp_path / "other.jinja"
    file.write_text(PLAIN)
    other = load_tokenizer(str(tmp_path), Target(model=str(tmp_path), chat_template=str(file), template_options={"thinking": True}))
    assert render(other, ASKED, None, generate=False, where="x").endswith(" hm")
    with pytest.raises(TargetError, match=r"target\.template_options has 'enable_thinking'"):
        load_tokenizer(str(tmp_path), Target(model=str(tmp_path), chat_template=str(file), template_options={"enable_thinking": False}))


def test_what_a_contract_says_of_thinking() -> None:
    assert thinking_mode({}) is None
    assert thinking_mode({"effort": "high"}) is None
    assert thinking_mode({"enable_thinking": False}) == "off"
    assert thinking_mode({"thinking": True}) == "on"
