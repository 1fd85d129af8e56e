"""Tiny models with the structure of published ones: their config.json, shrunk (benchmarks/families/published.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families.random_weights import make_random_model
from tools.make_tiny_model import DEFAULT_DATA, make_tokenizer, read_texts
from utils.compat import list_text_model

FILE = Path(__file__).with_name("published.yaml")
VOCAB = 600


@dataclass(frozen=True)
class PublishedModel:
    """A model of a family.

    Args:
        model: its id on the Hugging Face hub.
        read_in: where its config.json was read.
        published: what that says of the structure.
        shrunk: the sizes that take the place of published ones.
    """

    name: str
    model: str
    read_in: str
    published: dict[str, Any]
    shrunk: dict[str, Any]

    @property
    def has_experts(self) -> bool:
        return any(self.published.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))

    def tiny_config(self, vocab_size: int) -> Any:
        """The config of the tiny model, for the tokenizer of `tools.make_tiny_model`.

        Raises:
            Exception: whatever the config's class raises for such sizes.
        """
        sizes = {"vocab_size": vocab_size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
        if "hidden_size_per_layer_input" in self.published:
            sizes["vocab_size_per_layer_input"] = vocab_size
        given = self.published | self.shrunk | sizes
        return AutoConfig.for_model(given.pop("model_type"), **given)


def read_published() -> dict[str, PublishedModel]:
    """The models of published.yaml by the names of their families."""
    return {name: PublishedModel(name, **entry) for name, entry in yaml.safe_load(FILE.read_text()).items()}


def save_tiny(published: PublishedModel, folder: Path) -> None:
    """Save the tiny model and a tokenizer."""
    tokenizer = make_tokenizer(read_texts(DEFAULT_DATA), VOCAB)
    config = published.tiny_config(len(tokenizer))
    list_text_model(config)
    make_random_model(AutoModelForCausalLM, config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
