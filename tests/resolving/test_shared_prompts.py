"""Which runs let both answers of a pair share their prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from configs.flags import parse_flags
from policies.mixed_precision import Precision
from resolving.shared_prompts import with_shared_prompts
from tasks.preference import Preference
from tests.helpers.packed_models import CONFIGS, WITH_SINKS
from tests.helpers.small_configs import SMALL
from utils.device import DeviceFacts
from utils.errors import ConfigError

FP32, BF16 = (Precision(str(dtype), dtype, dtype) for dtype in (torch.float32, torch.bfloat16))
CPU, GPU = DeviceFacts("cpu", 2**34, has_bf16=False), DeviceFacts("cuda", 2**36, has_bf16=True)
WITH_STATES = transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])


def decide(
    model_config: Any,
    *flags: str,
    device: DeviceFacts = CPU,
    precision: Precision = FP32,
    were_shared: bool | None = None,
) -> tuple[Preference, list[str]]:
    pairs = ["--loss_type", "dpo", "--dataset", "preference_dataset", "--preference_dataset.data_path", "pairs.jsonl"]
    config = parse_flags(["--model_name", "M", *pairs, *flags])
    task, notes = with_shared_prompts(
        Preference(), config, model_config, precision, device, 64, were_shared=were_shared
    )
    assert isinstance(task, Preference)
    return task, notes


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize(("device", "precision"), [(CPU, FP32), (GPU, BF16)], ids=["CPU", "GPU"])
def test_attention_by_offsets_shares_them_and_the_model_is_as_before(
    name: str, device: DeviceFacts, precision: Precision
) -> None:
    config = (CONFIGS | WITH_SINKS)[name]
    before = config.to_dict(), config._attn_implementation
    task, notes = decide(config, device=device, precision=precision)
    assert (task.shares_prompts, notes) == (True, [])
    assert (config.to_dict(), config._attn_implementation) == before
    assert decide(config, "--share_prompts", "False", device=device, precision=precision) == (Preference(), [])


@pytest.mark.parametrize(
    ("model_config", "flags", "device", "why"),
    [
        (CONFIGS["llama"], ["--compile"], CPU, "the attention of LlamaForCausalLM takes masks here"),
        (CONFIGS["llama"], ["--use_fast_kernels", "False"], CPU, "the attention of LlamaForCausalLM takes masks here"),
        (CONFIGS["llama"], [], GPU, "the attention of LlamaForCausalLM takes masks here"),  # in fp32
        (WITH_STATES, [], CPU, "Lfm2ForCausalLM passes a state from token to token"),
    ],
)
def test_others_have_a_prompt_for_each_answer_and_say_so(
    model_config: Any, flags: list[str], device: DeviceFacts, why: str
) -> None:
    assert decide(model_config, *flags, device=device) == (Preference(), [f"pairs: each answer has its prompt: {why}"])
    with pytest.raises(ConfigError, match=f"--share_prompts: {why}; leave it out"):
        decide(model_config, *flags, "--share_prompts", "True", device=device)


def test_padded_rows_share_nothing_without_a_word_unless_asked() -> None:
    padding = ["--batching_strategy", "padding"]
    assert decide(CONFIGS["llama"], *padding) == (Preference(), [])
    with pytest.raises(ConfigError, match="--share_prompts: under --batching_strategy padding each answer has a row"):
        decide(CONFIGS["llama"], *padding, "--share_prompts", "True")


@pytest.mark.parametrize("flags", [[], ["--resume_anyway"]])
@pytest.mark.parametrize("were_shared", [True, False])
def test_a_run_that_is_resumed_keeps_the_form_of_its_checkpoint(were_shared: bool, flags: list[str]) -> None:
    same = Preference(shares_prompts=were_shared), []
    assert decide(CONFIGS["llama"], *flags, were_shared=were_shared) == same
    assert decide(CONFIGS["llama"], *flags, "--share_prompts", str(were_shared), were_shared=were_shared) == same


def test_another_form_than_the_checkpoints_is_refused_unless_anything_goes() -> None:
    config, masks = CONFIGS["llama"], ["--use_fast_kernels", "False"]
    with pytest.raises(ConfigError, match="--share_prompts: the checkpoint's pairs share their prompt; leave it out"):
        decide(config, "--share_prompts", "False", were_shared=True)
    with pytest.raises(ConfigError, match="--share_prompts: the checkpoint's pairs have a prompt for each answer"):
        decide(config, "--share_prompts", "True", were_shared=False)
    with pytest.raises(ConfigError, match=r"--resume: the checkpoint's pairs share their prompt, and .* masks here; "):
        decide(config, *masks, were_shared=True)
    assert decide(config, *masks, were_shared=False) == (Preference(), [])
    for other in (["--share_prompts", "False"], masks):
        assert decide(config, *other, "--resume_anyway", were_shared=True)[0] == Preference()


def test_losses_without_pairs_refuse_the_flag() -> None:
    with pytest.raises(ConfigError, match="--share_prompts: cross_entropy has none; give --loss_type dpo or simpo"):
        parse_flags(["--model_name", "M", "--share_prompts", "True"])
