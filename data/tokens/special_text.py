"""Special tokens that the data spells stay text: `<|im_end|>` in an answer does not end it.

In text of the data, the first character of each special token gets a stand-in, a code point that is no character. So
neither a chat template nor a tokenizer takes it for the token, and every place in the text stays the same. To tokenize
such a text, the two change places: tokens of templates and prompts get the stand-in, the data its own characters, and
the tokenizer's backend is built again with the special tokens under their spelling with the stand-in. It then treats
everything else as it always does. Text without special tokens never comes here, so its ids are the tokenizer's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from data.tokens.spans import BadExample
from utils.rust_panics import panics_as_errors

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

_FIRST_STAND_IN, _NUM_STAND_INS = 0xFDD0, 31  # Unicode's noncharacters, which no text may hold
_IN_BRACKETS = re.compile(r"<\S+>|\[\S+\]|\{\S+\}")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token that SentencePiece's byte fallback writes


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer, and the tokens of roles that its chat template writes.

    Some tokenizers have `<|USER_TOKEN|>` as an added token that is not special. Others that are not, like `<think>`,
    are none: models write them in their answers.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)  # longest first

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
        added = tokenizer.added_tokens_decoder.values()
        used = {*tokenizer.all_special_tokens}  # of a tokenizer written in Python, these may not be marked as special
        tokens = {token.content for token in added if token.special or token.content in used}
        tokens |= _tokens_of_roles(tokenizer, {token.content for token in added} - tokens)
        spelled = [token for token in tokens if token.strip() and not _BYTE.fullmatch(token)]
        return cls(tokenizer, tuple(sorted(spelled, key=len, reverse=True)))

    @overload
    def as_text(self, value: str) -> str: ...
    @overload
    def as_text(self, value: Any) -> Any: ...
    def as_text(self, value: Any) -> Any:
        """A text of the data, or a value with texts in it, with stand-ins in the special tokens that it spells.

        Raises:
            BadExample: if it holds a stand-in itself.
        """
        if isinstance(value, str):
            if any(stand_in in value for stand_in in self._firsts):
                raise BadExample("it holds a code point that is no character (U+FDD0 to U+FDEF); take it out")
            if not any(first in value for first in self._stand_ins):
                return value
            return self._pattern.sub(self._with_stand_in, value)
        if isinstance(value, Mapping):
            return {self.as_text(key): self.as_text(part) for key, part in value.items()}
        return [self.as_text(part) for part in value] if isinstance(value, list | tuple) else value

    def are_in(self, value: Any) -> bool:
        """Whether a text of the data, or one in a value of it, spells special tokens, or holds a stand-in."""
        written = repr(value)  # one call: to look into each text of a long conversation takes ten times as long
        may_be = any(first in written for first in self._stand_ins) or "\\ufdd" in written
        return may_be and self._written.search(written) is not None

    def spells(self, text: str) -> bool:
        """Whether a text holds stand-ins."""
        return any(stand_in in text for stand_in in self._firsts)

    @overload
    def plain(self, value: str) -> str: ...
    @overload
    def plain(self, value: Any) -> Any: ...
    def plain(self, value: Any) -> Any:
        """A text, or a value with texts in it, without stand-ins: as the data has it."""
        if isinstance(value, str):
            return value.translate(self._to_firsts) if self.spells(value) else value
        if isinstance(value, Mapping):
            return {self.plain(key): self.plain(part) for key, part in value.items()}
        return [self.plain(part) for part in value] if isinstance(value, list | tuple) else value

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """The tokens of texts with stand-ins, without special tokens around them."""
        with panics_as_errors():
            return self._backend.encode_batch([self._exchanged(text) for text in texts], add_special_tokens=False)

    def encode_slowly(self, text: str) -> list[int]:
        """The same by a tokenizer that is written in Python: piece by piece, between its added tokens."""
        ids: list[int] = []
        for piece in self._added.split(text):
            if piece in self.tokenizer.added_tokens_encoder:
                ids.append(self.tokenizer.added_tokens_encoder[piece])
            elif piece:
                options = {"add_special_tokens": False, "split_special_tokens": True}
                ids += self.tokenizer(self.plain(piece), verbose=False, **options)["input_ids"]
        return ids

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        """Stand-ins by the first characters of special tokens."""
        firsts = sorted({token[0] for token in self.tokens})
        if len(firsts) > _NUM_STAND_INS:
            raise ValueError(f"special tokens begin with {len(firsts)} characters, more than there are stand-ins for")
        return {first: chr(_FIRST_STAND_IN + number) for number, first in enumerate(firsts)}

    @cached_property
    def _firsts(self) -> dict[str, str]:
        return {stand_in: first for first, stand_in in self._stand_ins.items()}

    @cached_property
    def _to_firsts(self) -> dict[int, str]:
        return str.maketrans(self._firsts)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tokens)) or "(?!)")  # (?!) matches nothing

    @cached_property
    def _written(self) -> re.Pattern[str]:
        """Finds special tokens and stand-ins in what `repr` writes."""
        tokens = [repr(token)[1:-1] for token in self.tokens] + [repr(stand_in)[1:-1] for stand_in in self._firsts]
        with_quotes = (re.escape(token).replace("'", r"\\?'") for token in tokens)  # escaped next to the other quotes
        return re.compile("|".join(with_quotes) or "(?!)")

    @cached_property
    def _added(self) -> re.Pattern[str]:
        tokens = sorted(self.tokenizer.added_tokens_encoder, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")

    @cached_property
    def _tokens_or_stand_ins(self) -> re.Pattern[str]:
        return re.compile(f"{self._pattern.pattern}|[{''.join(self._firsts)}]")

    def _with_stand_in(self, token: re.Match[str]) -> str:
        return self._stand_ins[token[0][0]] + token[0][1:]

    def _exchanged(self, text: str) -> str:
        """The text with stand-ins in the tokens that had none, and none where they were."""
        return self._tokens_or_stand_ins.sub(
            lambda found: self._firsts.get(found[0]) or self._with_stand_in(found), text
        )

    @cached_property
    def _backend(self) -> Tokenizer:
        """The tokenizer's backend with special tokens that have a stand-in in their spelling."""
        from tokenizers import Tokenizer

        parts = json.loads(self.tokenizer.backend_tokenizer.to_str())
        names = {token: self._stand_ins[token[0]] + token[1:] for token in self.tokens}
        ids = {token["content"]: token["id"] for token in parts["added_tokens"]}
        for token in parts["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "normalized": False}
        parts["model"] = _renamed(parts["model"], names)
        parts |= {"truncation": None, "padding": None}
        backend = Tokenizer.from_str(json.dumps(parts))
        for token in names:
            assert backend.token_to_id(names[token]) == ids[token], f"{token} has another id under its stand-in"
        return backend


def _tokens_of_roles(tokenizer: PreTrainedTokenizerBase, added: Set[str]) -> Set[str]:
    """Which of the added tokens the template writes around plain turns; none of a pair like `<think>`, `</think>`."""
    pairs = {token for token in added if token.startswith("</") or f"</{token[1:]}" in added}
    may_be = [token for token in added - pairs if _IN_BRACKETS.fullmatch(token)]
    if not may_be or not tokenizer.chat_template:
        return set()
    from utils.chat_rendering import rendered_prompt
    from utils.template_limits import TemplateLimitError

    for as_parts in (False, True):
        content: Any = [{"type": "text", "text": "-"}] if as_parts else "-"
        turns = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
        try:
            text = rendered_prompt(tokenizer, turns)
        except TemplateLimitError:
            break
        except Exception:  # whatever a template stumbles over
            continue
        return {token for token in may_be if token in text}
    return set()


def _renamed(model: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a backend's model with other names of some tokens, which text then never becomes."""
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    else:  # Unigram
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("merges"):
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
    return model
