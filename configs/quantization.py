"""Settings of quantization: how the frozen weights under an adapter are stored."""

from dataclasses import dataclass
from typing import Literal

from configs.setting import setting


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantized base weights, by bitsandbytes (MXFP4 aside); need --use_peft."""

    quantization: Literal["4bit", "8bit", "mxfp4"] | None = setting(
        None,
        "store the frozen weights of linear layers and experts in 4 or 8 bits; True means 4bit, False none; mxfp4: "
        "experts alone, in the format of published gpt-oss",
        bare="True",
        default_text="none, the dtype that the model computes in",
    )
    quant_type: Literal["nf4", "fp4"] = setting("nf4", "data type of the 4-bit weights (4bit)")
    use_double_quant: bool = setting(
        False, "store the scales of 4-bit blocks in 8 bits, which saves 0.37 bits per weight (4bit)"
    )
    compute_dtype: Literal["fp32", "bf16", "fp16"] | None = setting(
        None, "dtype in which quantized layers compute", default_text="that of the run's precision"
    )
    quant_storage: Literal["auto", "uint8", "bf16", "fp16", "fp32"] = setting(
        "auto",
        "dtype of the tensors that hold the packed bytes; auto: uint8, or fp32 if this version of torch cannot shard "
        "integers",
    )
