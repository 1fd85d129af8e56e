"""The order of an epoch's rows: a function of seed, epoch and global batch size, and of nothing else."""

from __future__ import annotations

import numpy as np

WINDOW_ROWS = 1024  # sorted together: enough for neighbours of like length, few enough to differ from epoch to epoch
MIN_WINDOWS = 4  # so that small data too has other global batches in every epoch


def epoch_order(
    num_rows: int, *, seed: int | None, epoch: int, global_batch_size: int, lengths: np.ndarray | None = None
) -> np.ndarray:
    """All rows in the order in which an epoch takes them, `global_batch_size` of them in each optimizer step.

    Without `lengths` the rows are shuffled. With `lengths` they are shuffled, sorted by length inside windows of about
    `WINDOW_ROWS`, cut into global batches, and these are shuffled: a global batch then holds rows of like length,
    longest first, so that each of its micro-batches, over all ranks, does too. The last batch, where it is smaller,
    stays last and is a random choice of rows.

    Args:
        seed: None is for evaluation, where nothing is shuffled: file order, or all rows sorted, longest first.
        epoch: counted from 0.
        lengths: tokens of each row, [num_rows], where rows are padded to their batch's longest.

    Returns:
        Row indices, int64 [num_rows].
    """
    if seed is None:
        return np.arange(num_rows) if lengths is None else _longest_first(np.arange(num_rows), lengths)
    generator = np.random.default_rng([seed, epoch])
    shuffled = generator.permutation(num_rows)
    if lengths is None:
        return shuffled
    num_batches = num_rows // global_batch_size
    num_in_batches = num_batches * global_batch_size
    num_windows = max(MIN_WINDOWS, round(num_in_batches / WINDOW_ROWS))
    windows = np.array_split(shuffled[:num_in_batches].reshape(num_batches, global_batch_size), num_windows)
    batches = np.concatenate(
        [_longest_first(window.reshape(-1), lengths).reshape(-1, global_batch_size) for window in windows]
    )
    rest = _longest_first(shuffled[num_in_batches:], lengths)
    return np.concatenate([batches[generator.permutation(num_batches)].reshape(-1), rest])


def _longest_first(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows of one length stay in their order."""
    return rows[np.argsort(-lengths[rows], kind="stable")]
