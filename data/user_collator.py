"""`get_data_collator` in a user's recipe, as llama-recipes has it: batches there, single samples here.

This project chooses and packs the rows of a batch, so a user's collator cannot. What is wanted of it is how a sample
becomes token ids: it is called once with each sample by itself, `collator([sample])`, and the one row that it returns,
less its padding, is the sample from then on. What it would do to a sample because of those beside it is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from utils.errors import ConfigError

_KNOWN = {"input_ids", "labels", "attention_mask"}
_NEEDLESS = {"position_ids", "token_type_ids"}  # follow from the others


def with_collator(function: Callable[..., Any], get_data_collator: Callable[..., Any]) -> Callable[..., Any]:
    """The recipe `function` with its samples sent through the collator that `get_data_collator(tokenizer)` makes.

    It may return None, and the samples stay as they are.
    """

    @wraps(function)
    def recipe(dataset_config: Any, tokenizer: Any, split: str) -> Any:
        samples, collator = function(dataset_config, tokenizer, split), get_data_collator(tokenizer)
        if samples is None or collator is None:
            return samples
        return CollatedSamples(samples, collator) if hasattr(samples, "__len__") else CollatedStream(samples, collator)

    return recipe


class CollatedStream:
    """Samples without a length, each through the collator when it is read."""

    def __init__(self, samples: Any, collator: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        self.samples, self.collator = samples, collator

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, sample in enumerate(self.samples, 1):
            yield self._collate(sample, number)

    def _collate(self, sample: Any, number: int) -> dict[str, Any]:
        batch = self.collator([sample])
        where = f"get_data_collator, row {number}"
        if not isinstance(batch, Mapping):
            raise ConfigError(f"{where}: the collator returned {type(batch).__name__}; return a dict of tensors")
        if unknown := sorted(set(batch) - _KNOWN - _NEEDLESS):
            raise ConfigError(
                f"{where}: the collator returned {', '.join(unknown)}, which text is not trained with; return "
                "input_ids, labels and perhaps attention_mask"
            )
        if sizes := {name: len(batch[name]) for name in _KNOWN & set(batch) if len(batch[name]) != 1}:
            raise ConfigError(f"{where}: one sample became {sizes} rows; a collator must return a row for each sample")
        return {name: batch[name][0] for name in _KNOWN & set(batch)}


class CollatedSamples(CollatedStream):
    """Samples with a length; one can be asked for by its index."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._collate(self.samples[index], index + 1)
