"""Shows the data before anything is trained on it: one sample as the model will see it, and figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from configs.training import TrainConfig
from data.batches.layout import BatchLayout
from data.batches.order import epoch_order
from data.batches.padding import PaddedWidth, padding_share
from data.batches.rows import Rows
from data.pipeline import RunData
from data.sequences.pairs import AnswerPair
from data.sequences.tokenized import Sequences
from data.tokens.labels import IGNORE_INDEX
from data.tokens.spans import TextSpan
from ranks.environment import Environment
from reporting.tables import print_for_people, table_of

SHOWN_TOKENS = 1000  # the middle of a longer sample is left out
PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def preview_data(
    data: RunData,
    tokenizer: PreTrainedTokenizerBase,
    train_config: TrainConfig,
    layout: BatchLayout,
    width: PaddedWidth,
    env: Environment,
) -> dict[str, Any]:
    """Print the first training sample, unless `--show_sample False`, and the figures, on rank 0.

    Args:
        width: how wide a training batch is; its limit is what packed rows are filled with.

    Returns:
        The section `data` of run.yaml: figures of both splits (None without validation), and the first training sample
        as text if it may be shown.
    """
    spans = sample_spans(data.train, tokenizer) if train_config.show_sample else []
    train: dict[str, Any] = {"streamed": True, "num_samples": None, "num_rows": None}
    if data.train_rows is not None:
        train = split_figures(data.train, data.epoch_indices) | {"num_rows": len(data.train_rows)}
        train |= row_figures(data.train_rows, layout, width, seed=train_config.seed)
        train |= {"mix": [asdict(part) for part in data.mix]} if data.mix else {}
    validation = None
    if data.evaluation is not None and data.eval_rows is not None:
        validation = split_figures(data.evaluation) | {"num_rows": len(data.eval_rows)}
    figures = {"train": train, "validation": validation}
    if env.is_rank_zero:
        console = Console(highlight=False)
        if train_config.show_sample:
            sample = coloured(spans) if console.is_terminal else marked(spans)
            what = ", what is learned of it marked" if data.train.labels_are_tokens else ""
            print_for_people("", f"first training sample{what}:", sample, console=console)
        table = figures_table(figures)
        if table.row_count:
            print_for_people("", table, "", console=console)
    return figures | ({"first_sample": marked(spans)} if train_config.show_sample else {})


def sample_spans(examples: Sequences, tokenizer: PreTrainedTokenizerBase) -> list[TextSpan]:
    """The first sample as text, with special tokens; if it is a conversation of several samples, all of these.

    A source and its target stand one below the other, and so do both texts of a pair.
    Control characters are shown by their codes (`\\x1b`).
    """
    num_samples = 1
    if examples.num_by_turns and not examples.num_split:
        num_samples = int((examples.source_rows == examples.source_rows[0]).sum())
    spans: list[TextSpan] = []
    for number in range(num_samples):
        if num_samples > 1:
            heading = f"[sample {number + 1} of {num_samples} of the first conversation]\n"
            spans.append(TextSpan(f"\n{heading}" if number else heading, False))
        sequence = examples[number]
        if isinstance(sequence, AnswerPair):
            spans += _both_texts(tokenizer, sequence)
            continue
        ids, labels = sequence[:2]
        if (places := getattr(sequence, "places", None)) is not None:
            ids, labels = _one_token_each(ids, labels, places)
        if not examples.labels_are_tokens:
            spans += _shortened(tokenizer, ids, np.zeros(len(ids), bool), SHOWN_TOKENS)
            continue
        if examples.has_targets:
            spans += [
                TextSpan("[source]\n", False),
                *_shortened(tokenizer, ids, np.zeros(len(ids), bool), SHOWN_TOKENS),
            ]
            target = labels[labels != IGNORE_INDEX]
            spans += [TextSpan("\n[target]\n", False), *_shortened(tokenizer, target, target >= 0, SHOWN_TOKENS)]
        else:
            spans += _shortened(tokenizer, ids, labels != IGNORE_INDEX, SHOWN_TOKENS // num_samples)
    return spans


def _both_texts(tokenizer: PreTrainedTokenizerBase, pair: AnswerPair) -> Iterator[TextSpan]:
    """Each with its prompt, also if they share it."""
    for heading, text in zip(("[chosen]\n", "\n[rejected]\n"), pair.texts, strict=True):
        yield TextSpan(heading, False)
        yield from _shortened(tokenizer, text.input_ids, text.labels != IGNORE_INDEX, SHOWN_TOKENS // 2)


def _one_token_each(ids: np.ndarray, labels: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sample with one token for each image, as its template writes them: hundreds would hide its text.

    Args:
        places: of the images, int64 [images, 2] (`data.images.samples.ImageSample`).
    """
    is_shown = np.ones(len(ids), dtype=bool)
    for first, last in places.tolist():
        is_shown[first + 1 : last] = False
    return ids[is_shown], labels[is_shown]


def _shortened(
    tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, has_loss: np.ndarray, num_shown: int
) -> Iterator[TextSpan]:
    if len(ids) <= num_shown:
        yield from _spans(tokenizer, ids, has_loss)
        return
    half = max(1, num_shown // 2)
    yield from _spans(tokenizer, ids[:half], has_loss[:half])
    yield TextSpan(f"\n[... {len(ids) - 2 * half:,} tokens ...]\n", False)
    yield from _spans(tokenizer, ids[-half:], has_loss[-half:])


def _spans(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, has_loss: np.ndarray) -> Iterator[TextSpan]:
    def decode(end: int) -> str:
        shown = ids[:end].tolist()
        return cast(str, tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    text = decode(len(ids))
    ends = [*(np.flatnonzero(np.diff(has_loss)) + 1).tolist(), len(ids)]
    start = 0
    for end in ends:
        # Decoded from the start, since spaces and characters of several tokens depend on what precedes them. A
        # character that is incomplete here (U+FFFD) belongs to the next span.
        stop = len(text) if end == len(ids) else max(start, min(len(text), len(decode(end).rstrip("\ufffd"))))
        yield TextSpan("".join(map(_shown, text[start:stop])), bool(has_loss[end - 1]))
        start = stop


def _shown(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return character.encode("unicode_escape").decode()


def marked(spans: list[TextSpan]) -> str:
    """The text for files and logs, its label tokens between marks."""
    return "".join(f"[learned]{span.text}[/learned]" if span.has_loss else span.text for span in spans)


def coloured(spans: list[TextSpan]) -> Text:
    """The text for terminals, its label tokens bold and green."""
    return Text.assemble(*((span.text, "bold green" if span.has_loss else "") for span in spans))


def split_figures(examples: Sequences, documents: np.ndarray | None = None) -> dict[str, Any]:
    """Counts of a split: its samples, and what was cut or left out. Lengths are tokens of a sample.

    Args:
        documents: the samples of an epoch, if it does not hold each of them once.
    """
    chosen = np.arange(len(examples)) if documents is None else documents
    lengths = {"lengths": _percentiles(examples.lengths[chosen])}
    if examples.has_targets:
        lengths["target_lengths"] = _percentiles((examples.num_tokens - examples.lengths)[chosen])
    return {
        "num_samples": len(chosen),
        "num_tokens": int(examples.num_tokens[chosen].sum()),
        "num_label_tokens": int(examples.num_label_tokens[chosen].sum()),
        "num_truncated": examples.num_truncated,
        "num_tokens_cut": examples.num_tokens_cut,
        "num_too_long": examples.num_too_long,
        "num_without_label": examples.num_without_label,
        "num_empty": examples.num_empty,
        "num_empty_answers": examples.num_empty_answers,
        "num_split": examples.num_split,
        "num_parts": examples.num_parts,
        "num_parts_without_label": examples.num_parts_without_label,
        **({"num_targets_cut": examples.num_targets_cut} if examples.has_targets else {}),
        **lengths,
    }


def _percentiles(lengths: np.ndarray) -> dict[str, int]:
    found = np.percentile(lengths, list(PERCENTILES.values()), method="inverted_cdf")
    return dict(zip(PERCENTILES, found.astype(int).tolist(), strict=True))


def row_figures(rows: Rows, layout: BatchLayout, width: PaddedWidth, *, seed: int) -> dict[str, float]:
    """How full the training rows are: `fill` of packed rows, `padding_share` of the first epoch's batches."""
    lengths = rows.lengths
    if rows.packed:
        return {"fill": round(float(lengths.sum() / np.maximum(lengths, width.limit).sum()), 4)}
    size = layout.global_batch_size
    order = epoch_order(len(rows), seed=seed, epoch=0, global_batch_size=size, lengths=lengths)
    order = order[: layout.rows_of_epoch(len(rows))]
    return {"padding_share": round(padding_share(lengths[order], layout.rows_per_micro_batch, width), 4)}


def figures_table(data: dict[str, Any]) -> Table:
    """Figures that the start table lacks: label tokens, lengths, and how full the rows are."""
    splits = {name: figures for name, figures in data.items() if figures and not figures.get("streamed")}
    rows = {}
    if splits and any(figures["num_label_tokens"] for figures in splits.values()):
        rows["learned"] = "\n".join(f"{name} {_label_tokens(figures)}" for name, figures in splits.items())
        rows["lengths"] = "\n".join(f"{name} {_lengths(figures['lengths'])}" for name, figures in splits.items())
    if any("target_lengths" in figures for figures in splits.values()):
        rows["targets"] = "\n".join(f"{name} {_lengths(figures['target_lengths'])}" for name, figures in splits.items())
    train = data["train"]
    if "fill" in train:
        rows["packing"] = f"training rows are {100 * train['fill']:.1f} % full"
    if "padding_share" in train:
        rows["padding"] = f"{100 * train['padding_share']:.1f} % of the training batches"
    return table_of(rows)


def _label_tokens(figures: dict[str, Any]) -> str:
    with_loss, total = figures["num_label_tokens"], figures["num_tokens"]
    return f"{with_loss:,} of {total:,} tokens ({100 * with_loss / total:.0f} %)"


def _lengths(lengths: dict[str, int]) -> str:
    return (
        f"{lengths['min']:,} to {lengths['max']:,} tokens, half up to {lengths['p50']:,}, "
        f"90 % up to {lengths['p90']:,}, 99 % up to {lengths['p99']:,}"
    )
