"""Small tokenizers and chat templates for the tests of this room, in the manner of well-known models."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>",
]  # fmt: skip
CORPUS = [
    "user system assistant model tool\n\nYou are helpful.\n",
    '<think>\n\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "The answer is four, because two and two are four. Hello, hello there!\n\n\n  indented\n    more\n",
    "Grüße aus Köln: naïve café, 你好, привет",
] * 4

CHATML = r"""{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{ '<s>' }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """{{ '<s>' }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}\
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# Old reasoning leaves the history; the last answer always has a think block, an empty one if need be.
QWEN3 = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}\
{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# The generation prompt opens the reasoning block itself.
THINKER = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}\
{% if m.role == 'assistant' and m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}\
{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

# Calls as Qwen3-Coder and as GLM-4.5 write them.
CODER = r"""{% for t in tools or [] %}Tool: {{ t.function.name }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\n' + v | string + '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM = r"""{% for t in tools or [] %}Tool: {{ t.function.name }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>
{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}
{%- for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson }}</arg_value>
{% endfor %}{{ '</tool_call>' }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Ends the text, but not the prompt, with a second token that nobody emits.
PHI3 = """{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""

# Says at the beginning whether the last turn is an answer.
REWRITER = """{{ '<s>done' if messages[-1].role == 'assistant' else '<s>open' }}\
{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

SHOUTER = """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content | upper + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

ENDLESS = """{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


# Newlines stay together and apart from what follows them, as in Llama 3 and Qwen; GPT-2 leaves the last one to itself.
NEWLINES_APART = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"


def byte_level(template: str | None, *, gpt2: bool = False, thinks: bool = True) -> Any:
    """A byte-level BPE tokenizer: it decodes exactly what it encodes."""
    tokenizer = Tokenizer(models.BPE())
    pattern = pre_tokenizers.Split(Regex(NEWLINES_APART), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    tokenizer.pre_tokenizer = plain if gpt2 else pre_tokenizers.Sequence([pattern, plain])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if thinks:  # as in Qwen: parts of the answer, so not special
        tokenizer.add_tokens(["<think>", "</think>"])
    return _wrap(tokenizer, template)


def metaspace(template: str | None) -> Any:
    """A BPE tokenizer that marks spaces and puts one before each text, as Llama 2 has."""
    tokenizer = Tokenizer(models.BPE(unk_token="</s>", byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False))
    return _wrap(tokenizer, template)


def _wrap(tokenizer: Tokenizer, template: str | None) -> Any:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIALS[2:])
    wrapped.chat_template = template
    return wrapped
