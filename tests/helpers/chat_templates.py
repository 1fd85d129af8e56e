"""Chat templates of five families, written for these tests in the families' format, and tokenizers that have them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from tests.helpers.tokenizers_of_kinds import byte_level, metaspace

LLAMA_2 = """\
{%- if messages[0]['role'] == 'system' -%}
{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
{%- else -%}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}"""

LLAMA_3 = """\
{%- for message in messages -%}
{{ (bos_token if loop.first else '') + '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
   + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif -%}
{%- if tools -%}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message.tool_calls or [] -%}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

MISTRAL = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else -%}{{ ' ' + message['content'] | trim + eos_token }}{%- endif -%}
{%- endfor -%}"""

GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""


@dataclass(frozen=True)
class Family:
    """A template, the kind of tokenizer, its special tokens, and an assistant's turn: what has a loss."""

    template: str
    tokens: tuple[str, ...]
    answer: str
    spaces: bool = False  # a tokenizer of Llama-2's kind

    def tokenizer(self, template: str | None = None) -> Any:
        tokenizer = copy.deepcopy(metaspace() if self.spaces else byte_level())
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.tokens)})
        tokenizer.chat_template = template or self.template
        return tokenizer


FAMILIES = {
    "Llama-2": Family(LLAMA_2, ("<<SYS>>",), " {} </s>", spaces=True),
    "Llama-3": Family(LLAMA_3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "{}<|eot_id|>"),
    "ChatML": Family(CHATML, ("<|im_start|>", "<|im_end|>"), "{}<|im_end|>"),
    "Mistral": Family(MISTRAL, ("[INST]", "[/INST]"), " {}</s>", spaces=True),
    "Gemma": Family(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "{}<end_of_turn>"),
}
