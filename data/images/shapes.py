"""Which images a processor refuses for their shape, found without decoding them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Size = tuple[int, int]
"""Width and height, pixels."""

RefusalOf = Callable[[Size], str | None]
"""Why the processor takes no image of this size; None if it takes it."""


def refused_sizes(sizes: Iterable[Size], refusal_of: RefusalOf) -> dict[Size, str]:
    """The sizes that the processor refuses, and why.

    Processors refuse what is too narrow (Qwen2.5-VL: sides of more than 200 to 1) or too small. So the most extreme
    sizes are tried, and trying ends at the first that is taken: two trials for most datasets, however many sizes
    they have. A trial takes 5 to 100 ms.
    """
    distinct = set(sizes)
    answers: dict[Size, str | None] = {}
    for extremeness in (_narrowness, _smallness):
        for size in sorted(distinct, key=extremeness, reverse=True):
            if size not in answers:
                answers[size] = refusal_of(size)
            if answers[size] is None:
                break
    return {size: reason for size, reason in answers.items() if reason is not None}


def _narrowness(size: Size) -> float:
    return max(size) / min(size)


def _smallness(size: Size) -> float:
    return -min(size)
