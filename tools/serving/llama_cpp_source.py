"""What llama.cpp's converter takes, by its own source.

From ggml-org/llama.cpp at commit 0c1e57098, the one in llama-cpp-python 0.3.36: `TEXT_MODEL_MAP` of
conversion/__init__.py, and `get_vocab_base_pre` of conversion/base.py.
"""

from __future__ import annotations

VERSION = "llama.cpp 0c1e57098"

_ARCHITECTURES = """
    AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM AudioFlamingo3ForConditionalGeneration BambaForCausalLM
    BitNetForCausalLM BloomForCausalLM ChameleonForConditionalGeneration Cohere2ForCausalLM Cohere2MoeForCausalLM
    CohereForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM
    DeepseekV4ForCausalLM Dots1ForCausalLM Dots3NoteForCausalLM Dots3NoteForConditionalGeneration
    Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration
    ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration
    Gemma3nForCausalLM Gemma3nForConditionalGeneration Gemma4AssistantForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedAssistantForCausalLM Gemma4UnifiedForConditionalGeneration
    GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4vForConditionalGeneration
    Glm4vMoeForConditionalGeneration Glm5NextForConditionalGeneration GlmForCausalLM GlmMoeDsaForCausalLM
    GlmOcrForConditionalGeneration GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM
    GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration HYV3ForCausalLM HYV4ForCausalLM
    HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration
    Jais2ForCausalLM JambaForCausalLM JanusForConditionalGeneration KimiLinearForCausalLM LagunaForCausalLM
    Lfm2ForCausalLM Lfm2MoeForCausalLM Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM
    LlavaForConditionalGeneration MT5ForConditionalGeneration Mamba2ForCausalLM MambaForCausalLM MellumForCausalLM
    MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniCPMV4_6ForConditionalGeneration MiniMaxM2ForCausalLM
    MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM Mistral3ForConditionalGeneration
    MistralForCausalLM MixtralForCausalLM MuseGlimmerForConditionalGeneration NemotronForCausalLM
    NemotronHForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM
    PaddleOCRVLForConditionalGeneration Phi3ForCausalLM PhiForCausalLM Qwen2AudioForConditionalGeneration
    Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration
    Qwen3ASRForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
    Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
    Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration
    Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration SeedOssForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM Step3p7ForConditionalGeneration T5ForConditionalGeneration
    UMT5ForConditionalGeneration VoxtralForConditionalGeneration YoutuForCausalLM
"""
ARCHITECTURES = frozenset(_ARCHITECTURES.split())
"""The classes of transformers that convert_hf_to_gguf.py reads."""

PRE_TOKENIZER_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n    "
    " \n\U0001f680 (normal) \U0001f636\u200d\U0001f32b\ufe0f (multiple emoj"
    "is concatenated) \u2705 \U0001f999\U0001f999 3 33 333 3"
    "333 33333 333333 3333333 3333333"
    "3 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601"
    " ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------===="
    "=== \u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 ''''''````"
    '```""""......!!!!!!?????? I\'ve b'
    "een 'told he's there, 'RE you su"
    "re? 'M not sure I'll make it, 'D"
    " you like some tea? We'Ve a'lL"
)
"""The text whose tokens tell the converter which pre-tokenizer a BPE tokenizer has."""

_PRE_TOKENIZERS = """
    049ecf7629871e30 0876d13b50744004 0a766d034107bc73 0e9433cbbb161f89 0ef9807a4087ebef 0fe1cf6eda062318
    1431a23e583c9743 1444df51289cfa80 16389f0a1f51ee53 169bf0296a13c4d9 171aeeedd6fb548d 1994ffd01900cfb3
    2085e1638f6c377a 27949a2493fc4a9f 32d85c31273f8019 347715f544604f91 35d91631860c815f 36f3066e97b7f399
    3c30d3ad1d6b6420 3ce83efda5659b07 3eda48b4c4dc7de7 48f8e02c0359c0bb 49fc0303c9e0d2c2 4a2e2abae11ca2b8
    4e2b24cc4770243d 52df12b4c8d4176e 53e325976a6e1423 60476e1243776c4f 60824e3c0d9401f8 6221ad2852e85ce9
    62f6fb0a6fd5098c 63b97e4253352e6f 653660222fb704f6 66b8d4e19ab16c3b 6c81ce329e080288 789696f5946cc0fc
    7967bfa498ade6b7 7b3e7548e4308f52 7dec86086fcc38b6 7e57df22b1fe23a7 7fc505bd3104ca10 81212dc7cdb7e0c1
    81d72c7348a9f0eb 846deafc5b0fa786 855059429035d75a 862f827721df9560 877081d19cf6996e 8aeee3860c56296a
    8b5a93ed70405748 8e62295832751ca1 96a5f08be6259352 972da7b59cec44d1 9b1be57e70d20d95 9c2227e4dd922002
    9ca2dd618e8afaf0 9d032fcbd5501f4a 9d70134b369a70e5 9dcf830ee9990cdb 9e454714343b69b9 a023e9fdc5a11f03
    a0b64b4385f12366 a1336059768a55c9 a1e163ecab2e718a a6b57017d60e6edb a8594e3edff7c29c ad851be1dba641f2
    b0a6b1c0bd5998eb b3d1dd861f1d4c5c b3f499bb4255f8ca b4b8ca1f9769494f b53802fb28e26d64 b6dc8df998e1cfbd
    b6e8e1518dc4305b bba3b3366b646dbd bc01ce58980e1db4 bc5108ee1eb6a3d6 c136ed14d01c2745 c7699093ba4255a9
    c7ea5862a53e4272 ccc2ef013c104be7 cdf5f35325780597 d30d75d9059f1aa2 d353350c764d8c3b d4540891389ea895
    d4c8f286ea6b520b d5f1dd6f980fec56 d772b220ace2baec e4d54df1ebc1f2b9 e636dc30a262dcc0 e6ddf9c6686791c1
    f241072145675bf8 f4f37b6c8eb9ea29 f6791d196f87ce6b f728162c1315c26e fcace8b9cac38ce8
"""
PRE_TOKENIZERS = frozenset(_PRE_TOKENIZERS.split())
"""The first 16 digits of the SHA-256 of that text's token ids, written as a Python list, by known pre-tokenizers."""

LLAMA_VOCABULARIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"})
"""The classes for which it also reads a SentencePiece vocabulary out of tokenizer.json."""

NEED_TOKENIZER_MODEL = frozenset(
    {
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "T5ForConditionalGeneration",
        "MT5ForConditionalGeneration",
        "UMT5ForConditionalGeneration",
    }
)
"""The classes for which it reads tokenizer.model (of T5 also spiece.model), and no tokenizer.json."""
