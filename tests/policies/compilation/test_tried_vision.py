"""With --compile auto the layers of a vision encoder are tried apart from the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch._dynamo.exc

from policies.compilation.layers import EagerFallback
from tests.helpers.aot_eager import with_aot_eager
from tests.helpers.image_chat_reference import write_conversations
from tests.helpers.image_chats import save_chat_model
from tests.helpers.processes import ProcessGroup, log_lines, train_events
from tests.helpers.tried_layers import SEES_SOMETHING_ELSE, with_trial


def flags_for(model: Path, data: Path, output: Path) -> list[str]:
    flags = ["--model_name", str(model), "--output_dir", str(output), "--lr", "0.01"]
    flags += ["--dataset", "chat_dataset", "--chat_dataset.data_path", str(data), "--run_validation", "False"]
    flags += ["--num_workers_dataloader", "0", "--mixed_precision", "False", "--save_model", "False"]
    return [*flags, "--batching_strategy", "packing", "--context_length", "128", "--save_every_steps", "2"]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_vision_encoder_that_fails_is_alone_uncompiled(
    num_ranks: int, tmp_path: Path, process_group: ProcessGroup
) -> None:
    model, data = save_chat_model("qwen2_vl", tmp_path / "model"), write_conversations(tmp_path / "data", 8)
    given, tried = (flags_for(model, data, tmp_path / name) for name in ("given", "tried"))
    first = ["--max_train_step", "2"]
    process_group.train(with_aot_eager([*given, *first, "--compile", "True"]), num_ranks)
    wrong: Any = {"mistake": SEES_SOMETHING_ELSE, "ranks": (num_ranks - 1,)}
    outcome, *_ = process_group.train(with_trial([*tried, *first], **wrong), num_ranks)
    (line,) = [line for line in log_lines(outcome.stdout) if line.startswith("--compile auto")]
    assert line.startswith("--compile auto leaves the vision encoder as it is written: model.visual.blocks.")
    assert "computes something else if it is compiled" in line
    losses, expected = ([event["loss"] for event in train_events(tmp_path / name)] for name in ("tried", "given"))
    assert losses == pytest.approx(expected, rel=1e-6)  # the mistake would move them by more
    resumed = [*tried, "--max_train_step", "3", "--resume", "auto"]
    outcome, *_ = process_group.train(with_trial(resumed, **wrong), num_ranks)
    assert line in log_lines(outcome.stdout)


def test_the_compilers_later_errors_name_what_goes_on_uncompiled() -> None:
    def fails() -> str:
        raise torch._dynamo.exc.Unsupported("no")

    said: list[str] = []
    assert EagerFallback(said.append, "the vision encoder").around(fails, lambda: "as written")() == "as written"
    assert said == ["--compile auto: the vision encoder goes on uncompiled: torch.compile failed (no)"]
