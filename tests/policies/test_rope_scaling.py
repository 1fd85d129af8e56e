"""Stretched positions are those of transformers' own models with such a config.json."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from policies.config_overrides import ROPE_FILE, override, read_config_overrides
from policies.loading import build_model
from policies.rope_scaling import scaled_values
from resolving.lengths import resolve_lengths, scale_positions
from tasks.causal_lm import CausalLM
from tests.helpers.families import FAMILIES, LLAMA_LIKE
from utils.errors import ConfigError
from utils.positions import positions_of

TASK = CausalLM()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def resolved(model_config: Any, *flags: str) -> tuple[Any, dict[str, Any], list[str]]:
    """A copy of the config as a run with these flags has it, what differs, and what was printed."""
    config, model_config = parse_flags(["--model_name", "m", *flags]), copy.deepcopy(model_config)
    arguments = config.train_config, config.prefix_config, model_config, TASK.LENGTHS
    values, notes = scale_positions(*arguments)
    return model_config, values, [*notes, *resolve_lengths(*arguments)[1]]


def positions_by_rotation(model_config: Any, num_positions: int) -> list[torch.Tensor]:
    """The cosines and sines with which the model rotates queries and keys, of each kind of layers."""
    model: Any = AutoModelForCausalLM.from_config(model_config).model
    states, ids = torch.zeros(1, num_positions, 1), torch.arange(num_positions)[None]
    kinds = model.rotary_emb.rope_type
    of_kinds = [(kind,) for kind in kinds] if isinstance(kinds, dict) else [()]
    return [table for kind in of_kinds for table in model.rotary_emb(states, ids, *kind)]


def llama(**more: Any) -> Any:
    return transformers.LlamaConfig(**LLAMA_LIKE | copy.deepcopy(more))  # it adds theta to the parameters that it gets


def phi3() -> Any:
    return transformers.Phi3Config(**LLAMA_LIKE)


def gemma(full: dict[str, Any]) -> Any:
    config = copy.deepcopy(FAMILIES["gemma3"].config)
    config.rope_parameters["full_attention"] = {"rope_theta": 1000000.0} | full
    return config


CASES = {
    "yarn": (llama(), ("yarn", 4.0), llama(rope_parameters=YARN, max_position_embeddings=512), 512),
    "linear": (llama(), ("linear", 2.5), llama(rope_parameters={"rope_type": "linear", "factor": 2.5}), 320),
    "llama3": (
        llama(),
        ("llama3", 4.0),
        llama(
            rope_parameters=LLAMA3 | {"factor": 4.0, "original_max_position_embeddings": 128},
            max_position_embeddings=512,
        ),
        512,
    ),
    "Llama 3.1, stretched further": (
        llama(rope_parameters=LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 32}),
        ("llama3", 4.0),
        llama(
            rope_parameters=LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 32},
            max_position_embeddings=512,
        ),
        512,
    ),
    "YaRN by hand, stretched further": (
        llama(rope_parameters=YARN | {"attention_factor": 1.1386294}),
        ("yarn", 2.0),
        llama(rope_parameters=YARN | {"factor": 8.0}, max_position_embeddings=1024),
        1024,
    ),
    # Its layers with windows stay as they are; its number of positions has the factor in it.
    "Gemma 3": (
        gemma({"rope_type": "linear", "factor": 8.0}),
        ("linear", 4.0),
        gemma({"rope_type": "linear", "factor": 32.0}),
        512,
    ),
    "Gemma 3 1B": (gemma({"rope_type": "default"}), ("yarn", 4.0), gemma(YARN), 512),
    "part of each head": (
        FAMILIES["gpt_neox"].config,
        ("yarn", 4.0),
        None,
        512,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_positions_are_those_of_a_model_made_with_such_a_config(name: str) -> None:
    base, (kind, factor), wanted, num_positions = CASES[name]
    found, _, (note, *_) = resolved(base, "--rope_scaling", kind, "--rope_factor", str(factor))
    assert positions_of(found) == num_positions
    assert f"{num_positions:,} positions instead of {positions_of(base):,}" in note
    if wanted is None:
        assert found.rope_parameters["partial_rotary_factor"] == base.rope_parameters["partial_rotary_factor"]
        return
    tables = positions_by_rotation(found, num_positions)
    assert all(map(torch.equal, tables, positions_by_rotation(wanted, num_positions)))
    assert not all(map(torch.equal, tables, positions_by_rotation(base, num_positions)))


def test_config_json_says_it_and_transformers_reads_it(tmp_path: Path) -> None:
    for name, (base, (kind, factor), _, num_positions) in CASES.items():
        found, _, _ = resolved(base, "--rope_scaling", kind, "--rope_factor", str(factor))
        found.save_pretrained(tmp_path / name)
        read = transformers.AutoConfig.from_pretrained(tmp_path / name)
        assert read.rope_parameters == found.rope_parameters
        assert positions_of(read) == num_positions


def test_a_model_of_images_has_it_in_its_texts_config() -> None:
    text = transformers.Qwen2Config(**LLAMA_LIKE)
    base = transformers.LlavaConfig(text_config=text, vision_config=transformers.CLIPVisionConfig())
    found, values, _ = resolved(base, "--rope_scaling", "yarn", "--rope_factor", "4")
    assert values.keys() == {"text_config"}
    assert found.text_config.rope_parameters["factor"] == 4
    again = copy.deepcopy(base)
    override(again, values)
    assert again.to_dict() == found.to_dict()


def test_the_factor_follows_from_the_longest_row() -> None:
    found, _, notes = resolved(llama(), "--rope_scaling", "yarn", "--context_length", "300")
    assert (found.rope_parameters["factor"], found.max_position_embeddings) == (3, 384)
    assert notes == ["rope: yarn x3, 384 positions instead of 128"]
    found, values, notes = resolved(llama(), "--rope_scaling", "yarn", "--context_length", "128")
    assert (found.to_dict(), values) == (llama().to_dict(), {})
    assert notes == ["rope_scaling: rows of 128 tokens need none, so positions stay as they are"]


def test_positions_of_training_may_be_fewer_than_config_json_says() -> None:
    flags = "--rope_scaling", "yarn", "--rope_factor", "4", "--rope_original_positions", "100"
    found, _, _ = resolved(llama(), *flags)
    assert found.max_position_embeddings == 400
    assert found.rope_parameters["original_max_position_embeddings"] == 100
    tables = positions_by_rotation(found, 400)
    wanted = llama(rope_parameters=YARN | {"original_max_position_embeddings": 100}, max_position_embeddings=400)
    assert all(map(torch.equal, tables, positions_by_rotation(wanted, 400)))


def test_mixtral_without_a_size_of_heads_is_scaled_too() -> None:
    base = transformers.MixtralConfig(**LLAMA_LIKE, num_local_experts=4)
    assert base.head_dim is None
    found, _, _ = resolved(base, "--rope_scaling", "yarn", "--rope_factor", "4")
    assert len(positions_by_rotation(found, 512)) == 2


@pytest.mark.parametrize(
    ("model_config", "wanted"),
    [
        (llama(), "--rope_scaling yarn --rope_factor 8"),
        (CASES["Llama 3.1, stretched further"][0], "--rope_scaling llama3 --rope_factor 8"),
        (CASES["Gemma 3"][0], "--rope_scaling linear --rope_factor 8"),
        (FAMILIES["gpt2"].config, ""),
        (llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), ""),
        (phi3(), ""),
    ],
)
def test_rows_that_are_too_long_are_refused_with_the_flags_that_would_do(model_config: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match="1000 is more than the 128 positions") as refused:
        resolved(model_config, "--context_length", "1000")
    assert str(refused.value).endswith(f"give at most 128, or {wanted}" if wanted else "give at most 128")
    if wanted:
        resolved(model_config, "--context_length", "1000", *wanted.split())


def test_a_factor_that_is_too_small_is_refused_with_one_that_is_not() -> None:
    flags = "--context_length", "1000", "--rope_scaling", "yarn"
    with pytest.raises(ConfigError, match=r"give at most 512, or --rope_factor 8$"):
        resolved(llama(), *flags, "--rope_factor", "4")


@pytest.mark.parametrize(
    ("model_config", "flags", "reason"),
    [
        (FAMILIES["gpt2"].config, ["yarn"], "gpt2 models have no rotary positions"),
        (llama(rope_parameters=YARN), ["linear"], "scaled by yarn already.*give --rope_scaling yarn"),
        (llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0}), ["yarn"], "rope is dynamic already"),
        (transformers.FalconConfig(alibi=True), ["yarn"], "no rotary positions"),
        # It was trained, and its config.json could not be saved.
        (phi3(), ["yarn"], "transformers takes no yarn of phi3 models"),
        (llama(), ["linear", "--rope_original_positions", "64"], "linear has none"),
        (llama(rope_parameters=YARN), ["yarn", "--rope_original_positions", "64"], "config.json says them"),
        (llama(), ["yarn", "--rope_original_positions", "129"], "129 is more than the 128 positions"),
    ],
)
def test_models_that_cannot_be_scaled_so_are_refused(model_config: Any, flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolved(model_config, "--rope_factor", "4", "--rope_scaling", *flags)


def test_a_model_whose_code_reads_no_scaling_is_refused() -> None:
    sizes = LLAMA_LIKE | {"mamba_n_heads": 8, "mamba_d_head": 8}
    config = transformers.GraniteMoeHybridConfig(**sizes, position_embedding_type="nope")
    train = parse_flags(["--model_name", "m", "--rope_scaling", "yarn", "--rope_factor", "4"]).train_config
    override(config, scaled_values(config, "yarn", 4.0))
    with pytest.raises(ConfigError, match="the code of m does not scale its rotary positions"):
        build_model(train, config, AutoModelForCausalLM, torch.float32)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--rope_factor", "4"], "--rope_factor: no position is scaled without --rope_scaling"),
        (["--rope_scaling", "dynamic"], "its frequencies follow the longest row so far"),
        (["--rope_scaling", "longrope"], "its factors are found by a search"),
        (["--rope_scaling", "yarn", "--rope_factor", "1"], "--rope_factor"),
        (["--rope_theta", "1e6"], "--rope_scaling stretches them"),
        (["--rope_type", "yarn"], "--rope_scaling yarn"),
    ],
)
def test_flags_that_say_nothing_are_refused(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_flags(["--model_name", "m", *flags])


@pytest.mark.parametrize("text", ["[1]", "{", '{"vocab_size": 3}'])
def test_a_file_of_positions_that_holds_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / ROPE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=ROPE_FILE):
        override(llama(), read_config_overrides(tmp_path))
    assert read_config_overrides(tmp_path / "elsewhere") == {}
    (tmp_path / ROPE_FILE).write_text(json.dumps({"max_position_embeddings": 256}))
    config = llama()
    override(config, read_config_overrides(tmp_path))
    assert config.max_position_embeddings == 256
