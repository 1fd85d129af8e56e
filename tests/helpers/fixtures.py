"""What many tests share: tiny models, tiny data, and runs on several ranks.

Fixtures import torch, not this file: the process that only hands tests to pytest's workers reads it before they start.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import ProcessGroup
from tests.helpers.refusals import Bench, dialogues, write_lines

TINY = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small gain nothing from more threads, which wait, spinning, for cores that others use."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two small layers, untied, with a tokenizer made from the samples."""
    from tools.make_tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tie_word_embeddings=False, **TINY)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, its head sharing the embedding's weight."""
    from tools.make_tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tied", tie_word_embeddings=True, **TINY)


@pytest.fixture(scope="session")
def process_group() -> ProcessGroup:
    return ProcessGroup()


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dialogues")
    write_lines(folder / "train.jsonl", dialogues(12))
    write_lines(folder / "validation.jsonl", dialogues(3))
    return folder


@pytest.fixture
def bench(tiny_model: Path, samples: Path, tmp_path: Path, process_group: ProcessGroup) -> Bench:
    return Bench(tiny_model, samples, tmp_path, process_group)
