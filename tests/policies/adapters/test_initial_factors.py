"""PiSSA, OLoRA and orthogonal factors: those of peft, over an untouched base."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from configs.flags import parse_flags
from policies.adapters.apply import apply_adapters
from policies.adapters.initial_factors import first_factors, set_factors
from policies.adapters.lora_layers import use_lean_forward
from tests.helpers.processes import read_metrics, run_command
from tests.helpers.reference import flags_for, plain_eval_loss
from utils.errors import ConfigError

IDS = torch.arange(5, 25).view(1, -1)
BASE = ("pissa", "olora")


def ours(model: Any, *flags: str) -> Any:
    config = parse_flags(["--model_name", "m", "--use_peft", "--lora_config.r", "4", *flags])
    adapted = apply_adapters(model, config, "CAUSAL_LM")
    lora = config.lora_config
    use_lean_forward(adapted, num_trained_ranks=lora.r if lora.begins_in_base else None)
    if lora.begins_in_base:
        set_factors(adapted, lora.init_lora_weights)
    return adapted.train()


@pytest.mark.parametrize("init", BASE)
def test_the_first_half_learns_as_peft_learns_it_and_the_second_half_is_constant(init: str, tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    weight = copy.deepcopy(model.state_dict())
    settings = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=init)
    theirs = peft.get_peft_model(copy.deepcopy(model), settings)
    wanted = model(IDS).logits
    adapted = ours(model, "--init_lora_weights", init)
    logits = adapted(IDS).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)  # the model begins as it was
    for one in (adapted, theirs):
        one(IDS, labels=IDS).loss.backward()
    for (name, own), other in zip(
        ((n, p) for n, p in adapted.named_parameters() if p.requires_grad),
        (p for p in theirs.parameters() if p.requires_grad),
        strict=True,
    ):
        dim = 0 if "lora_A" in name else 1
        gradient, rest = own.grad.chunk(2, dim)
        torch.testing.assert_close(gradient, other.grad, rtol=1e-4, atol=1e-7)
        assert not rest.any()
        assert torch.equal(own.chunk(2, dim)[0], other)
    for name, tensor in adapted.get_base_model().state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, weight[name.replace("base_layer.", "")]), name


def test_subspace_iterations_find_the_largest_singular_values() -> None:
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 40))[0] for size in (60, 40))
    weight = left * 0.8 ** torch.arange(40) @ right.T
    products = [
        factor_b @ factor_a
        for init in ("pissa", "pissa_niter_16")
        for factor_a, factor_b in [first_factors(weight, 4, 2, init)]
    ]
    torch.testing.assert_close(*products, rtol=1e-4, atol=1e-5)
    assert torch.linalg.matrix_norm(weight - 2 * products[0], 2).item() == pytest.approx(0.8**4, rel=1e-4)


def test_orthogonal_factors_are_not_zero_and_their_product_is(tiny_model: Path) -> None:
    adapted = ours(AutoModelForCausalLM.from_pretrained(tiny_model), "--init_lora_weights", "orthogonal")
    layer = next(module for module in adapted.modules() if isinstance(module, peft.tuners.lora.Linear))
    factor_a, factor_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert min(factor_a.abs().max(), factor_b.abs().max()) > 0.01
    assert (factor_b @ factor_a).abs().max() < 1e-6


def test_what_cannot_begin_so_is_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model_name", "m", "--use_peft"]
    for flags, told in {
        "--quantization 4bit --init_lora_weights pissa": "--quantization: --init_lora_weights pissa takes a part out",
        "--init_lora_weights olora --weight_decay 0.1": "--weight_decay: ",
        "--init_lora_weights pissa --lora_dropout 0.1": "--lora_dropout: ",
        "--init_lora_weights orthogonal --lora_config.r 3": "3 is odd",
    }.items():
        with pytest.raises(ConfigError, match=told):
            parse_flags([*model, *flags.split()])
    assert parse_flags([*model, "--init_lora_weights", "pissa"]).lora_config.lora_dropout == 0
    config = parse_flags([*model, "--init_lora_weights", "pissa", "--lora_config.r", "8"])
    tiny = AutoModelForCausalLM.from_pretrained(tiny_model)
    tiny.model.layers[0].self_attn.q_proj = nn.Linear(tiny.config.hidden_size, 4)
    with pytest.raises(ConfigError, match=r"finds 4 ranks in .*, not 8; give a smaller"):
        apply_adapters(tiny, config, None)


@pytest.mark.parametrize("init", BASE)
def test_the_folder_is_plain_lora_of_twice_the_rank_for_the_untouched_base(
    init: str, tiny_model: Path, tmp_path: Path
) -> None:
    flags = flags_for(tiny_model, tmp_path / "run", batching="packing", num_steps=3)
    done = run_command(*flags, "--use_peft", "--init_lora_weights", init, "--batch_size_training", "8")
    assert done.returncode == 0, done.stderr
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "run/adapter")
    assert loaded.peft_config["default"].r == 16
    *_, last = (event for event in read_metrics(tmp_path / "run") if event["event"] == "eval")
    assert plain_eval_loss(loaded) == pytest.approx(last["loss"], rel=1e-5)
