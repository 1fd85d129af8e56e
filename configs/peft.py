"""Settings of the adapter that --use_peft trains: one section for each --peft_method."""

from dataclasses import dataclass
from typing import Literal

from configs.setting import setting

ALL_LINEAR = "all-linear"
"""Means every linear layer but the output head, as in peft, and every expert of a mixture."""

DEFAULT_ADAPTER_LAYERS = 30


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685); need --use_peft."""

    r: int = setting(8, "rank of the two matrices", minimum=1)
    lora_alpha: int = setting(
        32,
        "scale: the adapter's output is multiplied by lora_alpha / r, or by lora_alpha / sqrt(r) with use_rslora",
        minimum=1,
    )
    target_modules: tuple[str, ...] = setting(
        ("q_proj", "v_proj"),
        "names of the linear layers, or experts, that get an adapter; all-linear: all but the output head",
    )
    lora_dropout: float = setting(0.05, "dropout probability of the adapter's inputs", minimum=0, exclusive_maximum=1)
    use_rslora: bool = setting(
        False, "scale by lora_alpha / sqrt(r), so that a large r learns as fast as a small one (arXiv 2312.03732)"
    )
    use_dora: bool = setting(
        False, "train the magnitude and the direction of weights separately; slower (arXiv 2402.09353)"
    )
    init_lora_weights: Literal["default", "orthogonal", "pissa", "pissa_niter_16", "olora"] = setting(
        "default",
        "how the matrices begin: without an effect (default, orthogonal), or with the largest part of the weights, "
        "which is taken out of them (pissa, arXiv 2404.02948, pissa_niter_16, which finds it sooner, olora, arXiv "
        "2406.01775); then the saved adapter has twice the rank",
    )
    lr_ratio: float = setting(
        1.0,
        "learning rate of the matrices B as a multiple of lr, often 16 (LoRA+, arXiv 2402.12354)",
        exclusive_minimum=0,
    )

    @property
    def begins_in_base(self) -> bool:
        """Whether the first factors are taken out of the base's weights."""
        return self.init_lora_weights in ("pissa", "pissa_niter_16", "olora")


@dataclass(frozen=True)
class LlamaAdapterConfig:
    """Gated prompts (https://arxiv.org/abs/2303.16199); need --peft_method llama_adapter."""

    adapter_len: int = setting(10, "prompt tokens per adapted layer", unit="tokens", minimum=1)
    adapter_layers: int | None = setting(
        None,
        "number of layers that get a prompt, counted from the top",
        unit="layers",
        minimum=1,
        stands_for=DEFAULT_ADAPTER_LAYERS,
        default_text=f"{DEFAULT_ADAPTER_LAYERS}, or fewer if the model has fewer",
    )


@dataclass(frozen=True)
class PrefixConfig:
    """Prefix tuning (https://arxiv.org/abs/2101.00190); needs --peft_method prefix."""

    num_virtual_tokens: int = setting(30, "length of the prefix", unit="tokens", minimum=1)
