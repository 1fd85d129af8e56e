"""What torch.compile cannot compile ends the run in one line; the cross-entropy compiles once for all batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from policies.compilation import compile_for_any_rows
from policies.loss import summed_cross_entropy
from tests.helpers.generated import flags
from tests.helpers.no_compiler import without_compiler
from tests.helpers.processes import ProcessGroup


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["everywhere", "on rank 1 alone"])
def test_a_layer_that_does_not_compile_is_named_once_and_no_rank_is_left(
    ranks: tuple[int, ...], tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    argv = flags(tiny_model, samples, tmp_path / "run", "--compile", "--context_length", "64", "--max_train_step", "2")
    outcomes = process_group.run(without_compiler(argv, ranks), 2)
    assert [outcome.status for outcome in outcomes] == [1, 1]
    said = [line for outcome in outcomes for line in outcome.stderr.splitlines() if line.startswith("error:")]
    (line,) = said
    assert "--compile: torch.compile failed on a layer" in line
    assert "/nowhere/c++" in line
    assert not any("Traceback" in outcome.stderr for outcome in outcomes)


@pytest.mark.slow
def test_the_cross_entropy_compiles_once_for_any_number_of_tokens() -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled, vocab = compile_for_any_rows(summed_cross_entropy), 500
    for num_tokens in (64, 37, 1, 0, 5, 64):
        logits = torch.randn(num_tokens, vocab, requires_grad=True)
        targets = torch.randint(0, vocab, (num_tokens,))
        targets[:2] = -100
        found, wanted = (f(logits, targets, label_smoothing=0.1) for f in (compiled, summed_cross_entropy))
        assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
        gradients = [torch.autograd.grad(loss, logits, torch.full_like(loss, 0.3))[0] for loss in (found, wanted)]
        assert torch.allclose(*gradients, rtol=1e-5, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == 1
