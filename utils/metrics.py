"""What a run measures: metrics.jsonl, the log line of a step, FLOPs, and llama-recipes' JSON of lists."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class MetricsFile:
    """metrics.jsonl: one JSON object per line, one write per line, numbers never strings, non-finite as null."""

    def __init__(self, path: Path | None) -> None:
        """Append to `path`; None (every rank but 0) writes nothing."""
        self.path = path

    def write(self, event: str, **values: Any) -> None:
        if self.path is None:
            return
        line = json.dumps({"event": event} | {name: _json_number(value) for name, value in values.items()}) + "\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line)

    def read(self) -> list[dict[str, Any]]:
        """All lines so far; nothing where nothing is written."""
        if self.path is None or not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def perplexity(loss: float) -> float:
    """exp(loss), infinite rather than an error where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf


class StepFlops:
    """Model FLOPs of a step: what the mathematics needs, recomputation not counted.

    Per token, a matrix of n weights costs 2n in forward and 2n for the gradient of its input, and 2n more for its own
    gradient where it is trained; attention costs 4 x heads x head_dim per layer and visited (query, key) pair in
    forward and twice that in backward (Chowdhery et al., "PaLM", 2022, appendix B, with causal pairs counted exactly).
    """

    def __init__(self, model: Any) -> None:
        """Counts weights of a model that is not sharded yet; embeddings that only look rows up cost nothing."""
        embedding = model.get_input_embeddings()
        tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embedding.weight
        lookups = set() if tied else {id(parameter) for parameter in embedding.parameters()}
        matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in lookups]
        self.num_weights = sum(parameter.numel() for parameter in matrices)
        self.num_trained_weights = sum(parameter.numel() for parameter in matrices if parameter.requires_grad)
        text = model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)
        head_dim = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, heads)
        self.per_pair = 4 * heads * head_dim * getattr(text, "num_hidden_layers", 0)

    def count(self, num_tokens: float, num_attended_pairs: float) -> float:
        """FLOPs of forward and backward over so many tokens."""
        of_weights = num_tokens * (4 * self.num_weights + 2 * self.num_trained_weights)
        return of_weights + 3 * num_attended_pairs * self.per_pair

    def rates(self, num_tokens: int, num_attended_pairs: int, seconds: float, world_size: int) -> dict[str, float]:
        """Speed of a step of so many tokens over all ranks, as the `train` event names it."""
        return {
            "tokens_per_second": num_tokens / seconds,
            "tokens_per_second_per_device": num_tokens / seconds / world_size,
            "model_tflops_per_device": self.count(num_tokens, num_attended_pairs) / seconds / world_size / 1e12,
        }


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
        name.replace("loss", "perplexity"): [perplexity(loss) for loss in losses] for name, losses in lists.items()
    }
    (folder / "metrics_data.json").write_text(json.dumps(lists, indent=1))
