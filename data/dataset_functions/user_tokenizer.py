"""The tokenizer that a user's dataset file gets: token ids of a chat template are a list there, and a dict as well.

`apply_chat_template` returned a list of token ids until transformers 4, and returns a dict (BatchEncoding) since 5. The
dataset files of llama-recipes slice, count and join that list; newer files read `["input_ids"]`. Both run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import BatchEncoding

from utils.template_date import give_date

_ASK_FOR_A_DICT = ("return_dict", "return_tensors", "return_assistant_tokens_mask")


class TemplateTokens(list[Any]):
    """Token ids as a list, from which a name reads what transformers 5 returns (`["input_ids"]`, `.input_ids`)."""

    def __init__(self, encoding: BatchEncoding) -> None:
        super().__init__(encoding["input_ids"])
        self.encoding = encoding

    def __getitem__(self, place: Any) -> Any:
        return self.encoding[place] if isinstance(place, str) else super().__getitem__(place)

    def __contains__(self, item: object) -> bool:
        return item in self.encoding if isinstance(item, str) else super().__contains__(item)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "encoding":  # while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.encoding, name)

    def __copy__(self) -> list[Any]:
        return list(self)

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return list(self)

    def __reduce__(self) -> Any:
        return TemplateTokens, (self.encoding,)

    def keys(self) -> Iterable[str]:
        """With this, `dict(tokens)` and `**tokens` give the columns."""
        return self.encoding.keys()


class _ApplyChatTemplate:
    """Stands in for a tokenizer's method. A class, so that the tokenizer can be hashed and pickled as before."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, *args: Any, **options: Any) -> Any:
        give_date(self.tokenizer, options.get("chat_template") or self.tokenizer.chat_template)
        found = type(self.tokenizer).apply_chat_template(self.tokenizer, *args, **options)
        asked = any(name in options for name in _ASK_FOR_A_DICT)
        if asked or not isinstance(found, BatchEncoding) or not isinstance(found["input_ids"], list):
            return found
        return TemplateTokens(found)


def give_template_lists(tokenizer: Any) -> None:
    """Let the tokenizer's chat template return such lists. It stays the same object: what the user adds to it is saved.

    A tokenizer without chat templates is left as it is.
    """
    if hasattr(tokenizer, "apply_chat_template"):
        tokenizer.apply_chat_template = _ApplyChatTemplate(tokenizer)
