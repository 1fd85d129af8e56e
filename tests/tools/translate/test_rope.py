"""Scaled rotary positions in other tools' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.translated import translate_text

Capture = pytest.CaptureFixture[str]
FACTORY = "model_name_or_path: m\nstage: pt\ndataset_dir: nowhere\ndataset: a\ncutoff_len: 65536\n"
AXOLOTL = "base_model: m\nlearning_rate: 1e-4\ndatasets: [{path: a/b, type: alpaca}]\nsequence_len: 65536\n"


def test_llama_factorys_kind_is_taken_over_and_the_factor_follows_from_the_rows(
    tmp_path: Path, capsys: Capture
) -> None:
    train = translate_text(f"{FACTORY}rope_scaling: yarn\n", tmp_path, capsys).config.train_config
    assert (train.rope_scaling, train.rope_factor, train.context_length) == ("yarn", None, 65536)


@pytest.mark.parametrize(
    ("kind", "why"), [("dynamic", "follow the longest row so far"), ("cubic", "cubic is no scaling here")]
)
def test_a_kind_that_is_none_here_is_named(kind: str, why: str, tmp_path: Path, capsys: Capture) -> None:
    translated = translate_text(f"{FACTORY}rope_scaling: {kind}\n", tmp_path, capsys)
    assert translated.config.train_config.rope_scaling is None
    assert why in translated.printed


def test_axolotls_overrides_are_taken_over(tmp_path: Path, capsys: Capture) -> None:
    rope = "{type: yarn, factor: 4.0, original_max_position_embeddings: 32768, beta_fast: 32}"
    text = f"{AXOLOTL}overrides_of_model_config:\n  rope_scaling: {rope}\n  attention_dropout: 0.1\n"
    translated = translate_text(text, tmp_path, capsys)
    train = translated.config.train_config
    assert (train.rope_scaling, train.rope_factor, train.rope_original_positions) == ("yarn", 4.0, 32768)
    for said in ("rope_scaling.beta_fast", "overrides_of_model_config.attention_dropout", "multiplies the factor"):
        assert said in translated.printed


def test_axolotls_linear_and_dynamic_kinds(tmp_path: Path, capsys: Capture) -> None:
    rope = "{rope_type: linear, factor: 2, original_max_position_embeddings: 8192}"
    translated = translate_text(f"{AXOLOTL}overrides_of_model_config: {{rope_parameters: {rope}}}\n", tmp_path, capsys)
    train = translated.config.train_config
    assert (train.rope_scaling, train.rope_factor, train.rope_original_positions) == ("linear", 2.0, None)
    text = f"{AXOLOTL}overrides_of_model_config: {{rope_scaling: {{type: dynamic, factor: 2}}}}\n"
    translated = translate_text(text, tmp_path, capsys)
    assert translated.config.train_config.rope_scaling is None
    assert "follow the longest row so far" in translated.printed
