"""Which layers of a model an adapter takes, how it begins, and which models and saved adapters are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.families.published import read_published
from configs.peft import LoraConfig
from policies.activations.checkpointing import Checkpointing, checkpointing_mode
from policies.adapters.dora import set_magnitudes
from policies.adapters.folder import find_saved_adapter
from policies.adapters.targets import choose_targets
from policies.experts.finding import find_experts
from resolving.lengths import resolve_lengths
from tasks.causal_lm import CausalLM
from tests.helpers.adapter_kinds import LINEAR, adapt, config_of, notes_on
from tests.helpers.families import FAMILIES, LLAMA_LIKE, make_model
from utils.errors import ConfigError

TASK = CausalLM()

# Target modules


class PackedLinear(nn.Linear):
    """As a quantized layer is: true sizes, a weight of another shape, and its value on request."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__(whole.shape[1], whole.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(torch.zeros(whole.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.W_q, self.whole = self.weight, whole

    def dequantize(self) -> torch.Tensor:
        return self.whole


def quantized() -> Any:
    model = make_model("llama").bfloat16()
    for layer in model.model.layers:
        for owner, name in ((layer.self_attn, "q_proj"), (layer.mlp, "down_proj")):
            setattr(owner, name, PackedLinear(getattr(owner, name).weight.detach()))
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "quantized"])
def test_all_linear_is_every_linear_layer_but_the_head(name: str) -> None:
    model = quantized() if name == "quantized" else make_model(name)
    adapted = adapt(model, config_of("--lora_config.target_modules", "all-linear"))
    found = {path.rpartition(".")[2] for path, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    assert found == ({"c_attn", "c_proj", "c_fc"} if name == "gpt2" else set(LINEAR))
    assert len([m for m in adapted.modules() if isinstance(m, LoraLayer)]) == 2 * (4 if name == "gpt2" else 7)


def test_all_linear_takes_experts_in_with_the_rank_of_all_and_linear_layers_keep_their_dropout() -> None:
    """peft's own keyword gives experts another rank, and cannot under the default dropout."""
    model, config = make_model("mixtral"), config_of("--lora_config.target_modules", "all-linear")
    weights = sum(p.numel() for n, p in model.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))) / 1e6
    assert notes_on(model, config) == [
        f"target_modules: experts of 2 layers, {weights:,.1f} million weights",
        "lora_dropout 0.05: of linear layers' inputs alone; peft has none for experts",
    ]
    adapted = adapt(model, config)
    layers = {path: module for path, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    found = {path.rpartition(".")[2] for path in layers}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "base_layer"}
    assert {layer.r["default"] for layer in layers.values()} == {8}
    dropout = {path: getattr(layer.lora_dropout["default"], "p", 0.0) for path, layer in layers.items()}
    assert all(p == (0.05 if "attn" in path else 0) for path, p in dropout.items())
    settings = adapted.peft_config["default"]
    assert sorted(settings.target_parameters) == ["experts.down_proj", "experts.gate_up_proj"]
    assert settings.lora_dropout == 0  # else peft would not load it


def test_linear_layers_of_a_family_s_own_are_adapted_if_they_are_that() -> None:
    """DeepSeek-V4's o_a_proj multiplies each group of its input by another part of the weight."""
    config = transformers.DeepseekV4Config(
        **LLAMA_LIKE | {"num_key_value_heads": 1},
        head_dim=16,
        moe_intermediate_size=32,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        layer_types=["sliding_attention"] * 2,
        mlp_layer_types=["moe"] * 2,
        o_groups=2,
        o_lora_rank=8,
    )
    groups = AutoModelForCausalLM.from_config(config)
    names = {name.rpartition(".")[2] for name, module in groups.named_modules() if isinstance(module, nn.Linear)}
    found = choose_targets(groups, LoraConfig(target_modules=("q_b_proj", "o_b_proj"))).modules
    assert found == ["q_b_proj", "o_b_proj"]
    assert "o_a_proj" in names
    with pytest.raises(ConfigError, match="o_a_proj: LoRA takes linear layers and embeddings only"):
        choose_targets(groups, LoraConfig(target_modules=("o_a_proj",)))
    with torch.device("meta"):  # FalconLinear is a class of its own, too, and multiplies as nn.Linear does
        falcon = AutoModelForCausalLM.from_config(
            transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        )
    found = choose_targets(falcon, LoraConfig(target_modules=("all-linear",))).modules
    assert {name.rpartition(".")[2] for name in found} == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


_MAMBA_HEADS = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
MAMBA_LIKE = {
    "mamba": transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
    "falcon_h1": transformers.FalconH1Config(**LLAMA_LIKE, **_MAMBA_HEADS),
    "jamba": transformers.JambaConfig(
        **LLAMA_LIKE, num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4
    ),
}


@pytest.mark.parametrize("name", MAMBA_LIKE)
def test_all_linear_leaves_out_layers_whose_weights_a_mamba_layer_passes_to_a_kernel(name: str) -> None:
    """peft refuses out_proj of some families; an adapter of dt_proj would never be used."""
    model, config = (
        AutoModelForCausalLM.from_config(MAMBA_LIKE[name]),
        config_of("--lora_config.target_modules", "all-linear"),
    )
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    left_out = {path for path in linear if path.endswith(("x_proj", "dt_proj", "out_proj"))}
    (note,) = notes_on(model, config)
    assert note.startswith(f"target_modules all-linear: leaves out {len(left_out)} of {len(linear)} linear layers, ")
    adapted = adapt(model, config)
    adapted(input_ids=torch.arange(8)[None]).logits.sum().backward()
    layers = {path for path, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    assert {path.removeprefix("base_model.model.") for path in layers} == linear - left_out
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)


def test_all_linear_leaves_out_a_router_that_multiplies_its_weights_itself() -> None:
    """And says how many weights of experts have no adapter."""
    with torch.device("meta"):
        longcat = AutoModelForCausalLM.from_config(read_published()["longcat_flash"].tiny_config(64))
    of_router, of_experts = notes_on(longcat, config_of("--lora_config.target_modules", "all-linear"))
    assert "those called classifier, since other modules multiply their weights" in of_router
    assert re.search(r"leaves out experts with \d+\.\d million weights, \S+experts\.gate_up_proj", of_experts)
    found = choose_targets(longcat, LoraConfig(target_modules=("all-linear",))).modules
    assert not any(name.endswith("classifier") for name in found)


EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
HEADS = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
GROUPS = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LINEAR_HEADS: dict[str, Any] = {
    f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
}
LINEAR_HEADS |= {"layer_types": ["linear_attention", "full_attention"]}
WITH_DENSE_LAYERS_CALLED_LIKE_EXPERTS = {
    "deepseek_v3": transformers.DeepseekV3Config(
        **LLAMA_LIKE | {"num_key_value_heads": 4}, **HEADS, **EXPERTS, **GROUPS
    ),
    "glm4_moe": transformers.Glm4MoeConfig(**LLAMA_LIKE, head_dim=8, **EXPERTS, **GROUPS),
    "qwen3_next": transformers.Qwen3NextConfig(
        **LLAMA_LIKE, head_dim=8, num_experts=2, shared_expert_intermediate_size=16, **EXPERTS, **LINEAR_HEADS
    ),
}


@pytest.mark.parametrize("name", WITH_DENSE_LAYERS_CALLED_LIKE_EXPERTS)
def test_all_linear_names_layers_called_like_experts_so_that_peft_loads_them(name: str, tmp_path: Path) -> None:
    """By their parameters: peft would move the names of the layers to the experts."""
    of = WITH_DENSE_LAYERS_CALLED_LIKE_EXPERTS[name]
    model, untouched = (AutoModelForCausalLM.from_config(of, experts_implementation="eager") for _ in "ab")
    untouched.load_state_dict(model.state_dict())
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    experts = set(find_experts(model))
    config = config_of("--lora_config.target_modules", "all-linear")
    adapted = adapt(model, config)
    layers = {path for path, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    found = {path.removeprefix("base_model.model.") for path in layers}
    assert found == linear | experts | {f"{path}.base_layer" for path in experts}

    with torch.no_grad():
        for path, parameter in adapted.named_parameters():
            if "lora_" in path:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(str(tmp_path), save_embedding_layers=False)
    ids = torch.arange(12).reshape(2, 6)
    before = untouched.eval()(ids).logits
    expected = adapted.eval()(ids).logits
    loaded = peft.PeftModel.from_pretrained(untouched, str(tmp_path)).eval()
    assert not torch.allclose(before, expected, atol=1e-2)
    assert torch.equal(loaded(ids).logits, expected)
    loaded.double()  # rounding of fp32 grows to 6e-5 in some of these random models
    expected = loaded(ids).logits
    assert torch.allclose(loaded.merge_and_unload()(ids).logits, expected, atol=1e-5)


def with_a_dense_layer() -> Any:
    """Layer 0 is dense, layer 1 has experts."""
    config = transformers.Qwen3MoeConfig(
        **LLAMA_LIKE, head_dim=8, num_experts=2, num_experts_per_tok=1, mlp_only_layers=[0]
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("targets", "modules", "parameters"),
    [
        ("q_proj,down_proj", ["q_proj"], ["down_proj.weight", "experts.down_proj"]),
        ("up_proj,gate_proj", [], ["gate_proj.weight", "up_proj.weight"]),
        ("model.layers.0.mlp.down_proj", [], ["down_proj.weight"]),
        ("o_proj,experts", ["o_proj"], ["experts.gate_up_proj", "experts.down_proj"]),
        ("layers.1.mlp.experts.gate_up_proj", [], ["experts.gate_up_proj"]),
        ("o_proj", ["o_proj"], []),
    ],
)
def test_names_mean_dense_layers_and_experts_of_that_name(
    targets: str, modules: list[str], parameters: list[str]
) -> None:
    found = choose_targets(with_a_dense_layer(), LoraConfig(target_modules=tuple(targets.split(","))))
    assert (found.modules, found.parameters) == (modules, parameters)


def test_dora_takes_no_experts() -> None:
    """Nor layers of their names: peft has no DoRA for parameters."""
    model, flags = with_a_dense_layer(), ["--use_dora", "--lora_config.target_modules"]
    for targets in ("gate_up_proj", "down_proj"):
        with pytest.raises(ConfigError, match=f"{targets}: DoRA takes linear layers only; name some of "):
            adapt(model, config_of(*flags, targets))
    with pytest.raises(ConfigError, match="peft takes gate_proj of qwen3_moe models for the experts"):
        adapt(model, config_of(*flags, "gate_proj"))
    assert notes_on(model, config_of(*flags, "all-linear")) == [
        "target_modules all-linear: leaves out 3 of 11 linear layers, those called down_proj, gate_proj, up_proj, "
        "since peft takes these names of qwen3_moe models for the experts",
        "target_modules all-linear: leaves out the experts, since DoRA takes linear layers only",
    ]
    adapted = adapt(model, config_of(*flags, "all-linear"))
    assert not any("mlp" in path for path, module in adapted.named_modules() if isinstance(module, LoraLayer))


@pytest.mark.parametrize(
    ("targets", "start"),
    [
        ("q_porj", "q_porj match nothing in this model; did you mean q_proj? name some of down_proj, embed_tokens, "),
        ("dwon_proj,v_porj,k_proj", "dwon_proj, v_porj match nothing in this model; did you mean down_proj, v_proj?"),
        ("all_linear", "all_linear match nothing in this model; did you mean all-linear? name some of down_proj, "),
        (
            "all",
            "all match nothing in this model; name some of down_proj, embed_tokens, gate_proj, k_proj, lm_head, "
            "o_proj, q_proj, up_proj, v_proj, or all-linear",
        ),
        ("query,v_porj", "query, v_porj match nothing in this model; name some of down_proj, embed_tokens, gate_proj"),
        ("mlp", "mlp: LoRA takes linear layers and embeddings only; name some of down_proj"),
        ("norm,q_proj", "norm: LoRA takes linear layers and embeddings only; name some of down_proj"),
    ],
)
@pytest.mark.parametrize("make", [lambda: make_model("llama"), quantized], ids=["plain", "quantized"])
def test_a_name_that_cannot_be_adapted_is_refused_with_near_names(make: Any, targets: str, start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_targets(make(), LoraConfig(target_modules=tuple(targets.split(","))))
    assert str(caught.value).startswith(f"--lora_config.target_modules: {start}")


def test_a_near_name_that_was_given_too_is_no_guess() -> None:
    """A mixture's experts have gate and up in one, and v_proj is near to up_proj."""
    said = r"gate_proj, up_proj match nothing in this model; did you mean gate_up_proj\? name some of "
    with pytest.raises(ConfigError, match=said):
        choose_targets(make_model("mixtral"), LoraConfig(target_modules=tuple(LINEAR)))


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_on_one_of_two_that_share_a_weight_is_said(tied: bool) -> None:
    settings = FAMILIES["llama"].config.to_dict() | {"tie_word_embeddings": tied}
    model = AutoModelForCausalLM.from_config(type(FAMILIES["llama"].config)(**settings))
    for targets, said in (
        ("embed_tokens,q_proj", "LoRA on model.embed_tokens: lm_head shares its weight"),
        ("q_proj", ""),
    ):
        notes = notes_on(model, config_of("--lora_config.target_modules", targets))
        assert [note.startswith(said) for note in notes] == ([True] if tied and said else [])


def test_dora_takes_no_embeddings() -> None:
    targets = ("embed_tokens", "q_proj")
    assert choose_targets(make_model("llama"), LoraConfig(target_modules=targets)).modules == [*targets]
    with pytest.raises(ConfigError, match="embed_tokens: DoRA takes linear layers only"):
        choose_targets(make_model("llama"), LoraConfig(target_modules=targets, use_dora=True))


@pytest.mark.parametrize("name", ["llama", "gpt2", "quantized"])
def test_dora_begins_as_the_base_does_with_the_norms_of_its_rows(name: str) -> None:
    model = quantized() if name == "quantized" else make_model(name).bfloat16()
    flags = ["--lora_config.target_modules", "all-linear", "--use_dora"]
    rows = {n: p.detach() for n, p in model.named_parameters()}
    adapted = adapt(model, config_of(*flags))
    layers = {n: m for n, m in adapted.named_modules() if isinstance(m, LoraLayer)}
    assert all(layer.lora_magnitude_vector.default.weight.isnan().all() for layer in layers.values())
    set_magnitudes(adapted)
    for path, layer in layers.items():
        base = layer.get_base_layer()
        weight = (
            base.whole if isinstance(base, PackedLinear) else rows[path.removeprefix("base_model.model.") + ".weight"]
        )
        wanted = (weight.T if name == "gpt2" else weight).float().norm(dim=1)
        assert torch.allclose(layer.lora_magnitude_vector.default.weight, wanted, rtol=1e-6)
        assert layer.lora_magnitude_vector.default.weight.dtype == torch.float32


# Refusals that need the model


@pytest.mark.parametrize(
    ("family", "flags", "reason"),
    [
        (
            "qwen2",
            "--peft_method llama_adapter",
            "peft has LLaMA-Adapter for gpt2, llama, mistral models, not for qwen2",
        ),
        (
            "llama",
            "--peft_method llama_adapter --adapter_layers 3",
            "--adapter_layers: 3 layers to adapt, but this model has 2",
        ),
        (
            "mixtral",
            "--peft_method prefix --batching_strategy padding",
            "whether mixtral models take peft's prefix is not",
        ),
    ],
)
def test_a_model_that_does_not_take_the_adapter_is_refused(family: str, flags: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        adapt(make_model(family), config_of(*flags.split()))
    assert reason in str(caught.value)


def test_a_prefix_is_refused_where_generating_would_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 passes the cache by another name than peft 0.21.2, and takes its own of the two."""
    model = make_model("llama")

    def forward(self: Any, input_ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> None: ...

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ConfigError, match=r"renamed to `cache`.*pip install 'transformers<5\.24'"):
        adapt(model, config_of("--peft_method", "prefix", "--batching_strategy", "padding"))


def test_llama_adapter_is_refused_where_heads_are_wider_than_the_model() -> None:
    config = type(FAMILIES["mistral"].config)(**FAMILIES["mistral"].config.to_dict() | {"head_dim": 16})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="4 heads of 16 are not 32"):
        adapt(model, config_of("--peft_method", "llama_adapter"))


def test_the_default_number_of_adapted_layers_shrinks_to_the_models() -> None:
    model, config = make_model("llama"), config_of("--peft_method", "llama_adapter")
    assert notes_on(model, config) == ["adapter_layers: 2, all that this model has"]
    adapted = adapt(model, config)
    assert sum("adaption_gate" in name for name, _ in adapted.named_parameters()) == 2


def test_under_a_prefix_the_default_of_checkpointing_activations_is_off_and_said() -> None:
    def mode_with(*flags: str) -> tuple[Checkpointing, list[str]]:
        config = config_of("--peft_method", "prefix", "--batching_strategy", "padding", *flags)
        return checkpointing_mode(make_model("llama"), config.train_config, config.fsdp_config, quantized=False)

    assert mode_with() == (Checkpointing("off"), [])
    for flags in ([], ["--enable_fsdp"]):
        mode, notes = mode_with(*flags, "--activation_checkpointing", "auto")  # the default on GPUs
        assert mode == Checkpointing("off")
        assert notes[0].startswith("activation_checkpointing: off, ")


def test_a_prefix_takes_positions_from_the_rows() -> None:
    prefix = ["--peft_method", "prefix", "--batching_strategy", "padding"]
    model_config = FAMILIES["gpt2"].config  # 128 positions, and an error beyond them

    def length(num_virtual_tokens: str, *flags: str) -> int:
        config = config_of(*prefix, "--num_virtual_tokens", num_virtual_tokens, *flags)
        return resolve_lengths(config.train_config, config.prefix_config, model_config, TASK.LENGTHS)[0][0]

    assert length("8") == 120
    with pytest.raises(ConfigError, match=r"--context_length: 121 is more than .* give at most 120"):
        length("8", "--context_length", "121")
    with pytest.raises(ConfigError, match="--num_virtual_tokens: a prefix of 128 leaves no room"):
        length("128")


SAVED: dict[str, tuple[Any, str]] = {
    "IA3": (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "of the kind IA3; LoRA"),
    "prefix": (peft.PrefixTuningConfig(num_virtual_tokens=3), "another method; give --peft_method prefix"),
    "norms": (peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]), "was made with modules_to_save"),
    "biases": (peft.LoraConfig(target_modules=["q_proj"], bias="all"), "was made with bias"),
    "tied": (peft.LoraConfig(target_modules=["q_proj"], ensure_weight_tying=True), "made with ensure_weight_tying"),
    "pissa": (peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "began as pissa"),
    "wider": (peft.LoraConfig(target_modules=["q_proj"], r=3), "does not fit this model"),
    "dora": (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "it lacks base_model"),
}


def test_a_run_folder_in_place_of_its_adapter_is_told_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"^--from_peft_checkpoint: .*; give {tmp_path}/adapter$"):
        find_saved_adapter(str(tmp_path))


@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_adapter_that_cannot_be_trained_on_is_refused(kind: str, tmp_path: Path) -> None:
    settings, reason = SAVED[kind]
    plain = peft.get_peft_model(make_model("llama"), peft.LoraConfig(target_modules=["q_proj"], r=8))
    plain.save_pretrained(str(tmp_path), save_embedding_layers=False)
    settings.save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        adapt(make_model("llama"), config_of("--from_peft_checkpoint", str(tmp_path)))
    assert str(caught.value).startswith("--from_peft_checkpoint: ")
    assert reason in str(caught.value)
