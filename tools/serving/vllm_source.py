"""What vLLM takes, by its own source.

From vLLM 0.19.1: `_TEXT_GENERATION_MODELS`, `_MULTIMODAL_MODELS` and `_TRANSFORMERS_SUPPORTED_MODELS` of
vllm/model_executor/models/registry.py, and `MaxLoRARanks` of vllm/config/lora.py. Which experts
take adapters was read in later source: vllm/lora/model_manager.py, and `is_3d_moe_weight` of the models.
"""

from __future__ import annotations

VERSION = "vLLM 0.19.1"

_ARCHITECTURES = """
    AXK1ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AriaForConditionalGeneration
    AudioFlamingo3ForConditionalGeneration AyaVisionForConditionalGeneration BambaForCausalLM
    Blip2ForConditionalGeneration BloomForCausalLM ChameleonForConditionalGeneration Cohere2ForCausalLM
    Cohere2VisionForConditionalGeneration CohereAsrForConditionalGeneration CohereForCausalLM CwmForCausalLM
    DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM Dots1ForCausalLM
    Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration Exaone4ForCausalLM
    FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM FuyuForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Gemma3ForConditionalGeneration Gemma3nForCausalLM Gemma3nForConditionalGeneration Gemma4ForCausalLM
    Gemma4ForConditionalGeneration GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM
    Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmAsrForConditionalGeneration GlmForCausalLM
    GlmMoeDsaForCausalLM GlmOcrForConditionalGeneration GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM GraniteSpeechForConditionalGeneration
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration HyperCLOVAXForCausalLM
    Idefics3ForConditionalGeneration InternVLForConditionalGeneration Jais2ForCausalLM JambaForCausalLM
    KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration Llama4ForCausalLM
    Llama4ForConditionalGeneration LlamaForCausalLM LlavaForConditionalGeneration LlavaNextForConditionalGeneration
    LlavaNextVideoForConditionalGeneration LlavaOnevisionForConditionalGeneration LongcatFlashForCausalLM
    Mamba2ForCausalLM MambaForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxForCausalLM
    MiniMaxM2ForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM MixtralForCausalLM
    Molmo2ForConditionalGeneration MptForCausalLM MusicFlamingoForConditionalGeneration NemotronForCausalLM
    NemotronHForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM
    OlmoeForCausalLM PaddleOCRVLForConditionalGeneration PaliGemmaForConditionalGeneration PersimmonForCausalLM
    Phi3ForCausalLM PhiForCausalLM Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5_VLForConditionalGeneration
    Qwen3ASRForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration SeedOssForCausalLM SmolLM3ForCausalLM
    SmolVLMForConditionalGeneration StableLmForCausalLM Starcoder2ForCausalLM VoxtralForConditionalGeneration
    WhisperForConditionalGeneration Zamba2ForCausalLM
"""
ARCHITECTURES = frozenset(_ARCHITECTURES.split())
"""The classes of transformers that it has a model for."""

STACKED_EXPERTS = frozenset({"GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration"})
"""The classes (of those with `is_3d_moe_weight`) whose experts take peft's factors, [r * experts, in] and [out, r *
experts]. Of others vllm/lora/model_manager.py splits them as gpt-oss's, or looks for factors of single experts."""

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that --max-lora-rank takes."""
