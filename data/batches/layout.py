"""How a global batch is cut into ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch is cut. `rows_per_micro_batch` is per rank; ranks that share their rows count as one.

    The cut changes speed alone. Every rank makes the same number of micro-batches; if rows run out, a rank gets an
    empty one, which the collate function turns into a batch without labels. So no rank ever waits in a collective that
    another does not enter.
    """

    rows_per_micro_batch: int
    gradient_accumulation_steps: int
    data_parallel_size: int  # ranks with rows of their own
    max_rows_per_epoch: int | None = None  # an epoch takes the first ones of its order

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step."""
        return self.rows_per_micro_batch * self.gradient_accumulation_steps * self.data_parallel_size

    def rows_of_epoch(self, num_rows: int) -> int:
        """How many of these rows an epoch takes."""
        return num_rows if self.max_rows_per_epoch is None else min(num_rows, self.max_rows_per_epoch)

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps of an epoch; the last may hold fewer rows."""
        return -(-self.rows_of_epoch(num_rows) // self.global_batch_size)

    def num_micro_batches(self, num_rows: int) -> int:
        """Micro-batches of a step of `num_rows` rows, the same on every rank."""
        return -(-num_rows // (self.rows_per_micro_batch * self.data_parallel_size))

    def cut(self, rows: Sequence[int], rank: int) -> list[list[int]]:
        """This rank's micro-batches of one step's rows; every rank gets the same number, some may be empty."""
        size, stride = self.rows_per_micro_batch, self.rows_per_micro_batch * self.data_parallel_size
        return [list(rows[start + rank * size : start + (rank + 1) * size]) for start in range(0, len(rows), stride)]
