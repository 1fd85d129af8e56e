"""ROUGE: what two texts share of words and word sequences (Lin, "ROUGE", 2004), by the package rouge-score.

rouge-score drops all letters but a to z. Texts that mostly have others are cut into words here: at white space and
punctuation, or into single characters where a script writes no spaces. They are not stemmed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from evaluation.measure import Measure, Scorer
from utils.wording import plural

_WITHOUT_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Kana, Han
)
_WORD = re.compile(f"[{_WITHOUT_SPACES}]|[^\\W_{_WITHOUT_SPACES}]+")
# A mark above or below a letter, such as a vowel of Hindi, is no letter to `re`, and would end a word.
_MARK = re.compile("[\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0903\u093a-\u094f\u0981-\u0983\u09bc-\u09cd]")


class Rouge(Measure):
    """F-measures, 0 to 100, of stemmed words: single ones, pairs, and the longest common sequence."""

    NAME = "rouge"
    NAMES = ("rouge1", "rouge2", "rougeL")
    PACKAGE = "rouge-score"

    def make_scorer(self) -> Scorer:
        from rouge_score.rouge_scorer import RougeScorer  # optional
        from rouge_score.tokenizers import DefaultTokenizer

        usual = DefaultTokenizer(use_stemmer=True)
        scorer: Any = RougeScorer(list(self.NAMES), tokenizer=_Tokenizer(usual))

        def score(reference: str, text: str) -> dict[str, float]:
            return {name: 100 * value.fmeasure for name, value in scorer.score(reference, text).items()}

        return score

    def notes(self, references: Sequence[str]) -> list[str]:
        """A line if some references have other letters than rouge-score's."""
        if not (number := sum(map(has_other_letters, references))):
            return []
        return [
            f"eval_generate: ROUGE counts words of {number:,} of {plural(len(references), 'reference')} as written, "
            "single characters where a script has no spaces: rouge-score has letters from a to z alone"
        ]


class _Tokenizer:
    """rouge-score's own, or words of other letters."""

    def __init__(self, usual: Any) -> None:
        self._usual = usual

    def tokenize(self, text: str) -> list[str]:
        if has_other_letters(text):
            return words_of(text)
        words: list[str] = self._usual.tokenize(text)
        return words


def has_other_letters(text: str) -> bool:
    """Whether most letters are none from a to z."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return 2 * sum("a" <= letter <= "z" for letter in letters) < len(letters)


def words_of(text: str) -> list[str]:
    """Words in any script, in lower case; single characters of scripts without spaces."""
    return _WORD.findall(_MARK.sub("", text.lower()))
