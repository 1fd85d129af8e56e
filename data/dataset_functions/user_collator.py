"""`get_data_collator` of a user's dataset file, as in llama-recipes: there it makes batches, here single sequences.

This project chooses the rows of a batch and packs them, so a user's collator cannot. It only turns an example into
token ids: it is called with each example by itself, `collator([example])`, and the one row that it returns, without its
padding, is the sequence. Effects of a collator across examples are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from utils.errors import ConfigError

_KNOWN = {"input_ids", "labels", "attention_mask"}
_IGNORED = {"position_ids", "token_type_ids"}  # follow from the others


def with_collator(function: Callable[..., Any], get_data_collator: Callable[..., Any]) -> Callable[..., Any]:
    """The dataset function, with its examples sent through the collator that `get_data_collator(tokenizer)` returns.

    If that is None, the examples stay as they are.
    """

    @wraps(function)
    def collated(dataset_config: Any, tokenizer: Any, split: str, **options: Any) -> Any:
        examples, collator = function(dataset_config, tokenizer, split, **options), get_data_collator(tokenizer)
        if examples is None or collator is None:
            return examples
        return (
            CollatedExamples(examples, collator) if hasattr(examples, "__len__") else CollatedStream(examples, collator)
        )

    return collated


class CollatedStream:
    """Examples without a length, each sent through the collator when it is read."""

    def __init__(self, examples: Any, collator: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.examples, self.collator = examples, collator

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, example in enumerate(self.examples, 1):
            yield self._collate(example, number)

    def _collate(self, example: Any, number: int) -> dict[str, Any]:
        batch = self.collator([example])
        where = f"get_data_collator, row {number}"
        if not isinstance(batch, Mapping):
            raise ConfigError(f"{where}: the collator returned {type(batch).__name__}; return a dict of tensors")
        if unknown := sorted(set(batch) - _KNOWN - _IGNORED):
            raise ConfigError(
                f"{where}: the collator returned {', '.join(unknown)}, which text is not trained with; return "
                "input_ids, labels and perhaps attention_mask"
            )
        if sizes := {name: len(batch[name]) for name in _KNOWN & set(batch) if len(batch[name]) != 1}:
            raise ConfigError(f"{where}: one sample became {sizes} rows; a collator must return a row for each sample")
        return {name: batch[name][0] for name in _KNOWN & set(batch)}


class CollatedExamples(CollatedStream):
    """Examples with a length, which can be indexed."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._collate(self.examples[index], index + 1)
