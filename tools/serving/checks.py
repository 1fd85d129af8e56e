"""Whether llama.cpp's converter and vLLM take a folder, by the rules in their source, and the commands that use it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from checkpointing.exporting.blueprint import load_tokenizer
from tools.serving import llama_cpp_source, vllm_source
from tools.serving.folder import ServedFolder
from utils.errors import ConfigError
from utils.small_files import read_json

# peft saves an adapted embedding's own weight as well; both programs skip it.
_LORA_TENSOR = re.compile(r"\.lora_[AB]\.weight$|\.lora_embedding_[AB]$|\.base_layer\.weight$")
# The factors of all experts of a mixture's layer: peft stores those of the second weight under `base_layer`.
_EXPERT_TENSOR = re.compile(r"\.experts(\.base_layer)?\.lora_[AB]\.weight$")
_MERGE = "merge it: --merge --to DIR"


def check_gguf(folder: ServedFolder) -> list[str]:
    """The commands that make a GGUF file of the folder and run it (convert_hf_to_gguf.py, convert_lora_to_gguf.py).

    Raises:
        ConfigError: if the converter does not take it.
    """
    version, name = llama_cpp_source.VERSION, _name(folder)
    if folder.architecture not in llama_cpp_source.ARCHITECTURES:
        serves = folder.architecture in vllm_source.ARCHITECTURES
        remedy = "serve it by --check vllm" if serves else "load it with transformers"
        raise _refused("gguf", version, f"its converter knows no {folder.architecture}", remedy)
    if not folder.is_adapter:
        _check_vocabulary(folder)
        return [
            f"python convert_hf_to_gguf.py {shlex.quote(str(folder.path))} --outfile {name}.gguf",
            f"llama-cli -m {name}.gguf",
        ]
    _check_lora("gguf", version, folder)
    if any(map(_EXPERT_TENSOR.search, folder.adapter_tensors)):
        raise _refused("gguf", version, "it knows no factors of all experts in one matrix", _MERGE)
    if folder.rope:
        raise _refused("gguf", version, "its base's GGUF would have other positions than the adapter's", _MERGE)
    for setting, why in (
        ("use_rslora", "it scales by alpha / r, and rsLoRA by alpha / sqrt(r)"),
        ("alpha_pattern", "it knows one alpha for all layers"),
    ):
        if folder.adapter.get(setting):
            raise _refused("gguf", version, why, _MERGE)
    if any("lm_head." in tensor for tensor in folder.adapter_tensors):
        raise _refused("gguf", version, "it takes no adapter of lm_head where the head is tied", _MERGE)
    base = f"--base {shlex.quote(folder.base)} " if Path(folder.base).is_dir() else ""
    return [
        f"python convert_lora_to_gguf.py {shlex.quote(str(folder.path))} {base}--outfile {name}.gguf",
        f"llama-cli -m BASE.gguf --lora {name}.gguf",
    ]


def check_vllm(folder: ServedFolder) -> list[str]:
    """The commands that serve the folder and ask it.

    Raises:
        ConfigError: if vLLM does not take it.
    """
    version, name = vllm_source.VERSION, _name(folder)
    if folder.architecture not in vllm_source.ARCHITECTURES:
        why = f"it has no model for {folder.architecture}"
        raise _refused(
            "vllm", version, why, "its Transformers backend may take it: vllm serve --model-impl transformers"
        )
    path = shlex.quote(str(folder.path))
    serve = f"vllm serve {path} --served-model-name {name}"
    if folder.is_adapter:
        _check_lora("vllm", version, folder)
        _check_experts(folder)
        ranks = [folder.adapter.get("r"), *dict(folder.adapter.get("rank_pattern") or {}).values()]
        rank = max((value for value in ranks if isinstance(value, int)), default=0)
        allowed = next((most for most in vllm_source.MAX_LORA_RANKS if most >= rank), None)
        if allowed is None:
            raise _refused(
                "vllm", version, f"it takes ranks up to {vllm_source.MAX_LORA_RANKS[-1]}, not {rank}", _MERGE
            )
        lora = f"--enable-lora --max-lora-rank {allowed} --lora-modules {name}={path}"
        rope = f" --hf-overrides {shlex.quote(json.dumps(folder.rope))}" if folder.rope else ""
        serve = f"vllm serve {shlex.quote(folder.base)} {lora}{rope}"
    asked = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    header = "Content-Type: application/json"
    return [serve, f"curl http://localhost:8000/v1/chat/completions -H '{header}' -d {shlex.quote(asked)}"]


CHECKS: dict[str, tuple[str, Callable[[ServedFolder], list[str]]]] = {
    "gguf": (llama_cpp_source.VERSION, check_gguf),
    "vllm": (vllm_source.VERSION, check_vllm),
}
"""The version whose rules are checked, and the check, by the values of --check."""


def _check_lora(program: str, version: str, folder: ServedFolder) -> None:
    kind = folder.adapter.get("peft_type")
    if kind != "LORA":
        raise _refused(program, version, f"it takes LoRA alone, not {kind}", "export the whole model of another run")
    for setting, name in (("use_dora", "DoRA"), ("modules_to_save", "modules_to_save")):
        if folder.adapter.get(setting):
            raise _refused(program, version, f"it takes no {name}", _MERGE)
    if folder.adapter.get("bias") not in (None, "none"):
        raise _refused(program, version, "it takes no trained biases", _MERGE)
    if others := [name for name in folder.adapter_tensors if not _LORA_TENSOR.search(name)]:
        raise _refused(program, version, f"it takes factors of layers alone, not {others[0]}", _MERGE)


def _check_experts(folder: ServedFolder) -> None:
    """Whether vLLM reads the factors of a mixture's experts as peft stores them."""
    version = vllm_source.VERSION
    holders = {found[1] for found in map(_EXPERT_TENSOR.search, folder.adapter_tensors) if found}
    if holders and folder.architecture not in vllm_source.STACKED_EXPERTS:
        why = f"it does not read the factors of {folder.architecture}'s experts as peft stores them"
        raise _refused("vllm", version, why, _MERGE)
    if len(holders) == 1:
        raise _refused("vllm", version, "it takes adapters on both weights of experts, and this has one", _MERGE)


def _check_vocabulary(folder: ServedFolder) -> None:
    """Whether the converter finds a vocabulary: tokenizer.model, or a tokenizer.json that it knows."""
    has_model = any((folder.path / name).is_file() for name in ("tokenizer.model", "spiece.model"))
    copy = "copy tokenizer.model from the base model's folder into this one"
    if has_model:
        return
    if folder.architecture in llama_cpp_source.NEED_TOKENIZER_MODEL:
        why = f"its converter reads tokenizer.model for {folder.architecture}, and there is none"
        raise _refused("gguf", llama_cpp_source.VERSION, why, copy)
    tokenizer: Any = load_tokenizer(str(folder.path))
    ids = tokenizer.encode(llama_cpp_source.PRE_TOKENIZER_TEXT)
    if sha256(str(ids).encode()).hexdigest()[:16] in llama_cpp_source.PRE_TOKENIZERS:
        return
    if folder.architecture in llama_cpp_source.LLAMA_VOCABULARIES and _is_sentencepiece(folder.path):
        return
    why = "its converter does not know this tokenizer.json's pre-tokenizer"
    raise _refused("gguf", llama_cpp_source.VERSION, why, f"{copy}, or take a base model whose GGUF others have made")


def _is_sentencepiece(folder: Path) -> bool:
    """Whether tokenizer.json is one of SentencePiece, as gguf-py's LlamaHfVocab asks."""
    try:
        values = read_json(folder / "tokenizer.json")
        model, decoder = values["model"], values["decoder"] or {}
        return model["type"] == "BPE" and bool(model.get("byte_fallback")) and decoder.get("type") == "Sequence"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _refused(program: str, version: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"--check {program}: {version} does not take this folder: {why}; {remedy}")


def _name(folder: ServedFolder) -> str:
    """A name for a file and a served model: the folder's, or the run's if that is model/ or adapter/."""
    path = folder.path.absolute()
    name = path.parent.name if path.name in ("model", "adapter") else path.name
    return re.sub(r"[^\w.-]+", "-", name)
