"""Where torch may take cuDNN's attention, which makes a plan for each new shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.helpers.attention_calls import noting_attention
from tests.helpers.generated import GENERATE, flags, write_rows
from tests.helpers.processes import ProcessGroup
from tools.answering.loading import load
from utils.cudnn_attention import leave_out_cudnn, tag_of_kernels, without_cudnn


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    """A run in this process may have left it out."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_it_is_left_out_of_a_context_alone_also_if_that_fails() -> None:
    @without_cudnn()
    def failing() -> None:
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise ValueError("seen")

    with pytest.raises(ValueError, match="seen"):
        failing()
    assert torch.backends.cuda.cudnn_sdp_enabled()
    leave_out_cudnn()
    with without_cudnn():
        pass
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_compiled_code_is_kept_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tag_of_kernels() == ""
    leave_out_cudnn()
    assert tag_of_kernels() == "without cuDNN's attention"
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "mine")
    assert tag_of_kernels() == "mine without cuDNN's attention"


@pytest.mark.parametrize(("strategy", "trains_with_it"), [("padding", False), ("packing", True)])
def test_rows_of_many_widths_and_generated_tokens_do_without(
    strategy: str, trains_with_it: bool, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    """On a CPU, where the switch can be read. A packed row of one document has its own width: that of all rows."""
    data = write_rows(tmp_path / "data")
    given = [*GENERATE, "--max_train_step", "1", "--save_model", "False", "--batching_strategy", strategy]
    argv = flags(tiny_model, data, tmp_path / "run", "--context_length", "128", *given, "--use_fast_kernels", "False")
    (outcome,) = process_group.run(noting_attention(argv, tmp_path / "notes.json"), 1)
    assert outcome.status == 0, outcome.stderr
    found = {(allowed, is_one) for allowed, is_one in json.loads((tmp_path / "notes.json").read_text())}
    assert (False, True) in found  # a token that was generated
    assert (True, True) not in found
    assert ((True, False) in found) == trains_with_it


def test_a_tool_that_answers_does_without(tiny_model: Path) -> None:
    load(tiny_model, None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_takes_other_kernels_then() -> None:
    query = torch.ones(1, 2, 77, 64, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile() as profile, without_cudnn():
        functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    names = " ".join(event.key for event in profile.key_averages())
    assert "scaled_dot_product" in names
    assert "cudnn" not in names
