"""Documents of token ids, and the rows that a dataset function makes of them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

# Of any length up to 24 tokens, few of them hidden: a third of the documents is longer than a row.
TOKEN = st.tuples(st.integers(0, 99), st.booleans(), st.integers(0, 9).map(bool))
DOCUMENT = st.integers(0, 24).flatmap(lambda length: st.lists(TOKEN, min_size=length, max_size=length))
DOCUMENTS = st.lists(DOCUMENT, min_size=1, max_size=12)


def row(ids: Any, labels: Any = None, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids if labels is None else labels, **more}


def to_rows(documents: list[Any]) -> list[dict[str, list[int]]]:
    """Rows of documents, which are lists of (token, whether it has a label, whether it is attended to)."""
    return [
        {
            "input_ids": [token for token, _, _ in document],
            "labels": [token if learned else -100 for token, learned, _ in document],
            "attention_mask": [int(seen) for _, _, seen in document],
        }
        for document in documents
    ]
