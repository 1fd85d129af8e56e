"""The optimizer steps of a stream, pass after pass, from the first or from where a state was taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from data.sequences.tokenized import Row
from data.streaming.passes import StateMismatch, StreamPass
from data.streaming.sources import Stream
from utils.errors import ConfigError

_VERSION = 1


class StreamSteps:
    """Iterates over the rows of each optimizer step, and the lines to print before it.

    The last batch of a pass over the data may be smaller, as in an epoch.
    """

    def __init__(self, stream: Stream, global_batch_size: int) -> None:
        self.stream, self.global_batch_size = stream, global_batch_size
        self.step = 0  # given last
        self._number = 0  # of the pass, from 0
        self._pass: StreamPass | None = None

    def __iter__(self) -> Iterator[tuple[list[Row], tuple[str, ...]]]:
        row_length = self.stream.context_length if self.stream.packing else None
        lines: list[str] = []
        for number in count(self._number):
            current = self._pass or StreamPass(self.stream, number, self.global_batch_size)
            self._number, self._pass = number, current
            for rows in current:
                self.step += 1
                if self.step == self.stream.num_steps:
                    lines.append(f"stream: in pass {number + 1} at the end: {current.counts.describe(row_length)}")
                yield rows, tuple(lines)
                lines = []
                if self.step == self.stream.num_steps:
                    return
            lines.append(f"stream: pass {number + 1} ended at step {self.step}: {current.counts.describe(row_length)}")
            self._pass = None

    @property
    def num_held(self) -> int:
        """Sequences that were read and not given: a state names each."""
        return 0 if self._pass is None else self._pass.num_held

    def state(self) -> bytes:
        """The state after the last step, as JSON, for `go_on`."""
        assert self._pass is not None
        values = {"settings": self._settings(), "step": self.step, "pass": self._number, **self._pass.state()}
        return json.dumps(values, separators=(",", ":")).encode()

    def mismatch(self, state: bytes | None) -> str:
        """Why the stream cannot go on from a state and has to be read from its beginning; empty if it can."""
        for source in self.stream.sources:
            if source.places is None:
                return f"the rows of {source.dataset} cannot be read from a place in their middle"
        if state is None:
            return "the checkpoint does not say where it was"
        try:
            there, here = json.loads(state)["settings"], json.loads(json.dumps(self._settings()))
            differing = [name for name in here if there.get(name) != here[name]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "the checkpoint's place in it cannot be read"
        if differing == ["files"]:
            return "its files have changed since"
        return f"{', '.join(differing)} differ from the checkpoint's" if differing else ""

    def go_on(self, state: bytes) -> None:
        """Continue from a state without a mismatch. What waited in the shuffle buffer is read and tokenized again.

        Raises:
            StateMismatch: if it is not there, or the state is damaged.
        """
        try:
            values: dict[str, Any] = json.loads(state)
            current = StreamPass(self.stream, int(values["pass"]), self.global_batch_size)
            current.go_on(values)
            self.step, self._number, self._pass = int(values["step"]), int(values["pass"]), current
        except StateMismatch:
            raise
        except ConfigError as error:
            raise StateMismatch(str(error)) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise StateMismatch(f"the checkpoint's place in it is damaged ({type(error).__name__})") from error

    def _settings(self) -> dict[str, Any]:
        """What a state is of; all else that decides what the rows are is compared before a run goes on."""
        stream = self.stream
        return {
            "version": _VERSION,
            "global_batch_size": self.global_batch_size,
            **{name: getattr(stream, name) for name in _SETTINGS},
            "datasets": [[source.dataset, source.max_rows] for source in stream.sources],
            "files": [source.identity() for source in stream.sources],
        }


_SETTINGS = ("seed", "weights", "shuffle_buffer_size", "packing", "context_length")
