"""The adapter that --use_peft trains."""

from dataclasses import dataclass

from configs.setting import setting


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685); need --use_peft."""

    r: int = setting(8, "rank of the two factors", minimum=1)
    lora_alpha: int = setting(32, "scale of the adapter: its output is multiplied by lora_alpha / r", minimum=1)
    target_modules: tuple[str, ...] = setting(
        ("q_proj", "v_proj"), "names of the linear layers that get an adapter, separated by commas"
    )
    lora_dropout: float = setting(
        0.05, "share of the adapter's inputs dropped in training", minimum=0, exclusive_maximum=1
    )
