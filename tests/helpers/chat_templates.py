"""Chat templates of families, written for these tests in the families' format, and tokenizers that have them."""

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

# Qwen 3: thoughts after the last question are kept, earlier ones dropped; the last turn has them even if empty.
_EMPTY_THOUGHT = """\
{%- set at = namespace(question=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set at.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- set thoughts = message.reasoning_content or '' -%}
{%- if message.role == 'assistant' and loop.index0 > at.question and (loop.last or thoughts) -%}
{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# gpt-oss: the thoughts of a call are dropped as soon as an answer without a call follows.
_FINAL_ANSWER = """\
{%- for message in messages -%}
{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant')
    | rejectattr('tool_calls', 'defined') | list -%}
{%- set header = '<|start|>' + message.role -%}
{%- if message.role == 'assistant' and message.reasoning_content and not later and (message.tool_calls or loop.last) -%}
{{ header + '<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
{%- endif -%}
{%- if message.tool_calls -%}
{{ header + '<|channel|>call<|message|>' + message.tool_calls[0].function | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' -%}
{{ header + '<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else -%}{{ header + '<|message|>' + message.content + '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""

# GLM-4: no end tokens; a turn ends where the next speaker's token begins.
_ROLE_TOKENS = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + message.content }}
{%- for call in message.tool_calls or [] -%}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"""

# Mistral Nemo: the system's text is in the last question, if nothing follows it; there is no generation prompt.
_SYSTEM_IN_QUESTION = """\
{{- bos_token -}}
{%- for message in messages if message.role != 'system' -%}
{%- if message.role == 'user' -%}
{{ '[INST]' + (messages[0].content + '\\n\\n' if loop.last and messages[0].role == 'system' else '') + message.content
   + '[/INST]' }}
{%- else -%}{{ ' ' + message.content + eos_token }}{%- endif -%}
{%- endfor -%}"""

_IM = ("<|im_start|>", "<|im_end|>")
_OPEN = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}")
_PARTS = CHATML.replace("(message['content'] or '')", "message['content'][0]['text']")
_PARTS = _PARTS.replace("messages[0]['role'] != 'system'", "false")
_ARGUMENT_TEXT = CHATML.replace("call.function | tojson", "call.function.name + ' ' + call.function.arguments")

REWRITING = {
    "empty thought": Family(_EMPTY_THOUGHT, _IM, "{}<|im_end|>"),
    "open thought": Family(_OPEN, _IM, "{}<|im_end|>"),
    "final answer": Family(_FINAL_ANSWER, ("<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|message|>"), "{}"),
    "role tokens": Family(_ROLE_TOKENS, ("<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"), "{}"),
    "system in question": Family(_SYSTEM_IN_QUESTION, ("[INST]", "[/INST]"), " {}</s>"),
    "parts": Family(_PARTS, _IM, "{}<|im_end|>"),
    "argument text": Family(_ARGUMENT_TEXT, _IM, "{}<|im_end|>"),
}
