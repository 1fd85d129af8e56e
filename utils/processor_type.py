"""The type of what turns examples into model inputs: a tokenizer, or a processor that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Processor: TypeAlias = "PreTrainedTokenizerBase | ProcessorMixin"
