"""How the text of examples becomes token ids: one text for a causal model, source and target for an encoder-decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from data.tokens.spans import TextSpan
from utils.errors import ConfigError

if TYPE_CHECKING:  # the files of datasets/ import this module, and flags are read before numpy is loaded
    from transformers import PreTrainedTokenizerBase

    from data.tokens.loss_mask import TokenColumns
    from data.tokens.special_text import SpecialTokens


class Encode(Protocol):
    """What a task does with the spans of examples. Dataset functions with a parameter `encode` get it.

    Its repr names every setting that the tokens depend on.
    """

    @property
    def is_one_text(self) -> bool:
        """Whether an example is one text, in which a prompt leads to the answer; else source and target are apart."""

    @property
    def takes_templates(self) -> bool:
        """Whether it takes a text that a chat template wrote, prompts and answers in one."""

    def __call__(
        self,
        examples: Sequence[Sequence[TextSpan]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        by_template: bool = False,
        special: SpecialTokens | None = None,
    ) -> TokenColumns:
        """The columns `input_ids` and `labels` of these examples; both are empty for one without spans.

        Args:
            special: the tokenizer's special tokens, if its caller keeps what they build for text that spells them.
        """


def check_takes_templates(encode: Encode, flag: str) -> None:
    """
    Raises:
        ConfigError: if the task reads prompt and answer apart, and a chat template writes them as one text.
    """
    if not encode.takes_templates:
        raise ConfigError(
            f"{flag}: a chat template writes prompt and answer as one text, and this model reads them apart; give "
            "prompts and completions (--dataset instruction_dataset)"
        )


@dataclass(frozen=True)
class OneText:
    """For a causal model: spans are joined, and every token has a place in `labels`.

    A text begins with the tokenizer's start token, if there is one, and ends with its end token, unless it brings them.
    A chat template (`by_template`) writes both itself.
    """

    is_one_text = True
    takes_templates = True

    def __call__(
        self,
        examples: Sequence[Sequence[TextSpan]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        by_template: bool = False,
        special: SpecialTokens | None = None,
    ) -> TokenColumns:
        from data.tokens.loss_mask import no_tokens, tokenize_spans

        if by_template:
            return tokenize_spans(examples, tokenizer, special=special)
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        columns = tokenize_spans(examples, tokenizer, start=start, end=[tokenizer.eos_token_id], special=special)
        for place, spans in enumerate(examples):
            if not spans:
                columns.input_ids[place] = columns.labels[place] = no_tokens()
        return columns


@dataclass(frozen=True)
class SourceAndTarget:
    """For an encoder-decoder: the last spans with a loss are the target, all before them the source.

    Each is tokenized by itself, with the special tokens that the tokenizer puts around a source and a target. An
    example without a target has no labels.
    """

    source_prefix: str = ""
    is_one_text = False
    takes_templates = False

    def __call__(
        self,
        examples: Sequence[Sequence[TextSpan]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        by_template: bool = False,
        special: SpecialTokens | None = None,
    ) -> TokenColumns:
        from data.tokens.loss_mask import TokenColumns, encode_plainly, no_tokens

        columns = TokenColumns([no_tokens() for _ in examples], [no_tokens() for _ in examples], [0] * len(examples))
        first_targets = [_first_of_target(spans) for spans in examples]
        with_source = [place for place, spans in enumerate(examples) if spans]
        with_target = [place for place in with_source if first_targets[place] < len(examples[place])]
        sources = [self.source_prefix + _text(examples[place][: first_targets[place]]) for place in with_source]
        targets = [_text(examples[place][first_targets[place] :]) for place in with_target]
        for place, ids in zip(with_source, encode_plainly(tokenizer, special, text=sources), strict=True):
            columns.input_ids[place] = ids
        for place, ids in zip(with_target, encode_plainly(tokenizer, special, text_target=targets), strict=True):
            columns.labels[place] = ids
        return columns


@dataclass(frozen=True)
class Caption:
    """For a model of image and text: the caption alone, and the token that ends it. A processor writes the rest.

    What a chat template wrote is one text, as for a causal model.
    """

    end_id: int
    takes_templates: bool = False
    is_one_text = False

    def __call__(
        self,
        examples: Sequence[Sequence[TextSpan]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        by_template: bool = False,
        special: SpecialTokens | None = None,
    ) -> TokenColumns:
        from data.tokens.loss_mask import no_tokens, tokenize_spans

        if by_template:
            return tokenize_spans(examples, tokenizer, special=special)
        columns = tokenize_spans(examples, tokenizer, end=[self.end_id], special=special)
        for place, spans in enumerate(examples):
            if not any(span.has_loss for span in spans):
                columns.input_ids[place] = columns.labels[place] = no_tokens()
        return columns


@dataclass(frozen=True)
class LabeledTexts:
    """For classification: one text or two without a loss, and the JSON of their label, a span with one."""

    is_one_text = False
    takes_templates = False

    def __call__(
        self,
        examples: Sequence[Sequence[TextSpan]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        by_template: bool = False,
        special: SpecialTokens | None = None,
    ) -> TokenColumns:
        from data.tokens.labeled_texts import encode_labeled

        return encode_labeled(examples, tokenizer, special)


ONE_TEXT = OneText()


def _first_of_target(spans: Sequence[TextSpan]) -> int:
    """The index of the first of the spans with a loss that end an example; their number if it ends with another."""
    first = len(spans)
    while first and spans[first - 1].has_loss:
        first -= 1
    return first


def _text(spans: Sequence[TextSpan]) -> str:
    return "".join(span.text for span in spans)
