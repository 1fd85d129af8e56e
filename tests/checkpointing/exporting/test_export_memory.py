"""An export needs memory for the largest tensors, not for the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.helpers.checkpoints import changed, save_checkpoint, with_lora
from tests.helpers.export_memory import measure
from tests.helpers.processes import ProcessGroup

# 16 layers of hidden size 1280: 500 million parameters, of which the embeddings are a sixth.
LARGE = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 16, "num_attention_heads": 20}
MEDIUM = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}

# Large enough that some 140 MB of freed layers, which the allocator keeps at any size, do not decide.
LAYERED = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10, "num_attention_heads": 8}


def make_model(sizes: dict[str, int], vocab_size: int, *, in_one_memory: bool = False) -> torch.nn.Module:
    """A model with random values drawn directly; transformers' own initialisation takes a minute.

    Args:
        in_one_memory: each parameter begins at the start of the largest one's memory. The values do not matter then,
            and the process that makes the model has room for others.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, **sizes), dtype=torch.float32)
    largest = max(parameter.numel() for parameter in model.parameters())
    memory = torch.empty(largest if in_one_memory else 0).uniform_(-0.05, 0.05)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shape = parameter.shape
            drawn = memory[: shape.numel()] if in_one_memory else torch.empty(shape.numel()).uniform_(-0.05, 0.05)
            setattr(module, name, torch.nn.Parameter(drawn.view(shape)))
    return model


def size_of(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def peak_bytes(small: Path, checkpoint: Path, to: Path, *flags: str) -> int:
    (done,) = ProcessGroup().train(partial(measure, small, checkpoint, to, *flags), 1)
    return int(done.stdout.splitlines()[-1])


@pytest.fixture
def small(tiny_model: Path, tmp_path: Path) -> Path:
    model = changed(AutoModelForCausalLM.from_pretrained(tiny_model))
    return save_checkpoint(tmp_path / "small", model, tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_checkpoint_of_two_hundred_megabytes_takes_a_fraction_of_it(
    kind: str, small: Path, tiny_model: Path, tmp_path: Path
) -> None:
    model = make_model(MEDIUM, 4000)
    assert size_of(model) > 190e6
    checkpoint = save_checkpoint(tmp_path / "checkpoint", model, tiny_model, kind=kind, optimizer=False)
    assert peak_bytes(small, checkpoint, tmp_path / "out") < 0.5 * size_of(model)


@pytest.fixture(scope="module")
def large(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint and the bytes of its model."""
    model = make_model(LARGE, 32000, in_one_memory=True)
    folder = tmp_path_factory.mktemp("large") / "checkpoint"
    return save_checkpoint(folder, model, tiny_model, optimizer=False), size_of(model)


@pytest.mark.full  # gigabytes on the disk; the two tests next to it show the same of smaller models
@pytest.mark.parametrize("flags", [[], ["--dtype", "bf16"]], ids=["as it is", "bf16"])
def test_a_checkpoint_of_500_million_parameters_takes_less_than_a_fifth_of_it(
    flags: list[str], small: Path, large: tuple[Path, int], tmp_path: Path
) -> None:
    checkpoint, size = large
    assert size > 4 * 500e6
    assert peak_bytes(small, checkpoint, tmp_path / "out", *flags) < 0.2 * size


@pytest.mark.slow
def test_merging_takes_a_layer_and_not_the_model(small: Path, tiny_model: Path, tmp_path: Path) -> None:
    model = make_model(LAYERED, 4000)
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "base")
    small_lora = save_checkpoint(tmp_path / "small-lora", with_lora(tiny_model), tiny_model)
    size = size_of(model)
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    lora = save_checkpoint(tmp_path / "lora", with_lora(model, target_modules=targets), tmp_path / "base")
    assert peak_bytes(small_lora, lora, tmp_path / "out", "--merge") < 0.15 * size
