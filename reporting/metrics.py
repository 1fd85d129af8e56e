"""What a run measures: metrics.jsonl, the log line of a step, FLOPs, and llama-recipes' JSON of lists."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from reporting.trackers import Trackers
from utils.parameters import Counted, count_weights


class MetricsFile:
    """metrics.jsonl: one JSON object per line, one write per line, numbers never strings, non-finite as null.

    The trackers get the same events; `end` is the last, with which they are closed. A full disk does not end the run:
    lines wait until they can be written.
    """

    def __init__(self, path: Path | None, trackers: Trackers | None = None) -> None:
        """Append to `path`; None (every rank but 0) writes nothing."""
        self.path, self.trackers = path, trackers or Trackers()
        self._waiting = b""  # lines that the disk did not take

    def write(self, event: str, **values: Any) -> None:
        if self.path is None:
            return
        line = json.dumps({"event": event} | {name: _json_number(value) for name, value in values.items()}) + "\n"
        could_write, self._waiting = not self._waiting, self._waiting + line.encode()
        try:
            append_whole(self.path, self._waiting)
            self._waiting = b""
        except OSError as error:
            if could_write:
                self.trackers.say(f"{self.path} cannot be written ({error.strerror}); its lines wait until it can be")
        self.trackers.write(event, values)

    def read(self) -> list[dict[str, Any]]:
        """All lines so far; nothing where nothing is written."""
        if self.path is None or not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def append_whole(path: Path, data: bytes) -> None:
    """Append all of the data or nothing of it.

    Raises:
        OSError: where there is no room, or the file cannot be opened.
    """
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(end)
            raise


def keep_until(source: Path, target: Path, *, step: int, epoch: int, eval_due: bool = False) -> None:
    """Write to `target` what `source` holds of a run up to a step: what a resumed run goes on after.

    Later lines go, and with them the end of the run that it had not reached, and a torn last line.

    Args:
        epoch: the first whose end had not been reached. eval_due: whether the step's evaluation is still to be done;
            a session that was killed later may have done it.
    """
    kept = []
    for line in source.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        is_later = event.get("step", 0) > step or (event["event"] == "epoch" and event["epoch"] >= epoch)
        is_later = is_later or (eval_due and event["event"] == "eval" and event["step"] == step)
        if event["event"] != "end" and not is_later:
            kept.append(line + "\n")
    temporary = target.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(target)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def perplexity(loss: float) -> float:
    """exp(loss), infinite rather than an error where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


class Counts(Protocol):
    """What a step's tokens were, over all ranks (`tasks.task.BatchCounts`)."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_label_tokens(self) -> int: ...
    @property
    def num_attended_pairs(self) -> int: ...


class StepFlops:
    """Model FLOPs of a step: what the mathematics needs, recomputation not counted.

    A matrix of n weights costs 2n per token in forward, 2n for its input's gradient, and 2n more for its own gradient
    where it is trained; the head only meets tokens that are learned. Attention costs 4 x heads x head_dim per layer and
    visited (query, key) pair in forward and twice that in backward (Chowdhery et al., "PaLM", 2022, appendix B, with
    causal pairs counted exactly).
    """

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        head_weights = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - head_weights
        matrices = [m for m in count_weights(model) if m.parameter.dim() > 1 and id(m.parameter) not in lookups]
        self.per_label_token = sum(_flops_per_token(m) for m in matrices if id(m.parameter) in head_weights)
        self.per_token = sum(_flops_per_token(m) for m in matrices if id(m.parameter) not in head_weights)
        text = model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)
        head_dim = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, heads)
        self.per_pair = 3 * 4 * heads * head_dim * getattr(text, "num_hidden_layers", 0)

    def count(self, counts: Counts) -> float:
        """FLOPs of forward and backward over so many tokens."""
        return (
            counts.num_tokens * self.per_token
            + counts.num_label_tokens * self.per_label_token
            + counts.num_attended_pairs * self.per_pair
        )

    def rates(self, counts: Counts, seconds: float, world_size: int) -> dict[str, float]:
        """The step's speed, as the `train` event names it."""
        return {
            "tokens_per_second": counts.num_tokens / seconds,
            "tokens_per_second_per_device": counts.num_tokens / seconds / world_size,
            "model_tflops_per_device": self.count(counts) / seconds / world_size / 1e12,
        }


def _flops_per_token(matrix: Counted) -> int:
    return matrix.num_weights * (6 if matrix.parameter.requires_grad else 4)


def end_facts(events: list[dict[str, Any]]) -> dict[str, Any]:
    """How far a run came, from its own events: the last step, the highest peak of any rank, the best evaluation."""
    peaks = [event["peak_allocated_gib"] for event in events if event["event"] == "memory"]
    losses = [event["loss"] for event in events if event["event"] == "eval" and event["step"] > 0]
    return {
        "step": max((event["step"] for event in events if event["event"] == "train"), default=0),
        "peak_allocated_gib": max(peaks, default=None),
        "best_eval_loss": min((loss for loss in losses if loss is not None), default=None),
    }


def log_line(event: dict[str, Any], *, num_steps: int, peak_gib: float) -> str:
    """One greppable line per logged step."""
    return (
        f"step {event['step']}/{num_steps} | epoch {event['epoch']} | loss {event['loss']:.4f} | "
        f"grad_norm {event['grad_norm']:.4f} | lr {event['lr']:.3e} | {event['tokens_per_second']:,.0f} tokens/s | "
        f"{event['model_tflops_per_device']:.2f} TFLOP/s per device | peak {peak_gib:.2f} GiB | "
        f"data wait {event['data_wait_seconds']:.3f} s"
    )


def write_metrics_data(folder: Path, events: Iterable[dict[str, Any]]) -> None:
    """`--save_metrics`: llama-recipes' JSON of eight lists.

    A val step is one evaluation, a val epoch an epoch's last.
    """
    events = list(events)
    steps = [event["loss"] for event in events if event["event"] == "train"]
    epochs = [event for event in events if event["event"] == "epoch"]
    evals = [event["loss"] for event in events if event["event"] == "eval" and event["step"] > 0]
    val_epochs = [event["eval_loss"] for event in epochs if event["eval_loss"] is not None]
    lists = {
        "train_step_loss": steps,
        "train_epoch_loss": [event["train_loss"] for event in epochs],
        "val_step_loss": evals,
        "val_epoch_loss": val_epochs,
    }
    lists |= {
        name.replace("loss", "perplexity"): [
            None if loss is None else _json_number(perplexity(loss)) for loss in losses
        ]
        for name, losses in lists.items()
    }
    (folder / "metrics_data.json").write_text(json.dumps(lists, indent=1))
