"""How the frozen weights under an adapter are stored."""

from dataclasses import dataclass
from typing import Literal

from configs.setting import setting


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantized base weights; need --use_peft."""

    quantization: Literal["4bit", "8bit"] | None = setting(
        None,
        "bits per frozen weight; True means 4bit, False none",
        later="leave it out; --use_peft --pure_bf16 needs the least memory now",
        bare="True",
    )
