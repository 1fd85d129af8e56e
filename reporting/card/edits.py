"""The part of a card that a run writes, and what a person has written around it or instead."""

from __future__ import annotations

import hashlib
import re

_SAYS = "finetuning.py writes the text from here to its end mark anew, until somebody changes that text"
_BEGIN, _END = f"<!-- {_SAYS}: %s -->", "<!-- end of the text that finetuning.py writes -->"
_PART = re.compile(rf"<!-- {re.escape(_SAYS)}: (\w+) -->\n(.*?)\n{re.escape(_END)}", re.DOTALL)
_FRONT_MATTER = re.compile(r"---\n.*?^---\n", re.DOTALL | re.MULTILINE)
_LICENSE = re.compile(r"^(?:# )?license.*\n", re.MULTILINE)
_OF_PEFT = ("# Model Card for Model ID", "[More Information Needed]")  # the form that peft leaves to be filled in


def marked(text: str) -> str:
    """A text between marks by which `renewed` finds it, and sees whether it was changed."""
    return f"{_BEGIN % _digest(text)}\n{text}\n{_END}"


def renewed(card: str, earlier: str | None) -> str:
    """The card to write in an earlier one's place: the earlier one with this one's text between the marks.

    An earlier card stays as it is if a person has changed that text, or wrote all of it; peft's empty form does not.
    """
    if not earlier or not earlier.strip() or all(words in earlier for words in _OF_PEFT):
        return card
    new, old = _PART.search(card), _PART.search(earlier)
    if new is None or old is None or old[1] != _digest(old[2]):
        return earlier
    return earlier[: old.start()] + new[0] + earlier[old.end() :]


def with_license_of(card: str, earlier: str | None) -> str:
    """The card, with the license that a person has given the card of the adapter that it comes from."""
    head, head_before = _FRONT_MATTER.match(card), _FRONT_MATTER.match(earlier or "")
    if head is None or head_before is None:
        return card
    given = [line for line in _LICENSE.findall(head_before[0]) if line.startswith("license")]
    if not given:
        return card
    return _LICENSE.sub("", head[0]).removesuffix("---\n") + "".join(given) + "---\n" + card[head.end() :]


def _digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]
