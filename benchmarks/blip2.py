"""BLIP-2's 2.7B shape captions generated pictures: memory of every phase, training time and peak, by layout.

    python -m benchmarks.blip2 --out FOLDER --layout single|ddp|fsdp [--ranks 4] [--shape 2.7b|tiny] [-- MORE FLAGS]

The folder gets config.json, a processor and 512 pictures; weights are random and never written. Settings are those of
the captioning lab: micro-batches of 16, 4 of them, lr 2e-5, weights in bf16. `ddp` scales lr by the ranks. With more
ranks than GPUs, several share each, which changes the time and not the memory of a rank. Pillow draws the pictures;
nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.runs.launch import launch
from data.images.opening import import_pillow
from utils.errors import ConfigError

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 220), "yellow": (235, 215, 40)}
SHAPES = ("circle", "square")
NUM_QUERIES = 32
MICRO_BATCH, ACCUMULATION, LR = 16, 4, 2e-5
WRAP = "Blip2EncoderLayer,Blip2QFormerLayer,OPTDecoderLayer"


def make_config(shape: str, image_id: int, vocab_size: int) -> transformers.Blip2Config:
    """ViT-g, the Q-Former and OPT-2.7b as in Salesforce/blip2-opt-2.7b (Li et al., 2023), or all of them tiny."""
    # Random queries are zeros, whose norm multiplies their gradients by the inverse root of eps: 1e6 with BLIP-2's own.
    qformer = {"layer_norm_eps": 1e-5}
    if shape == "tiny":
        sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        text = transformers.OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=32, vocab_size=vocab_size)
        return transformers.Blip2Config(
            vision_config=sizes | {"intermediate_size": 64, "image_size": 28, "patch_size": 14},
            qformer_config=qformer | sizes | {"intermediate_size": 64, "encoder_hidden_size": 32},
            text_config=text.to_dict(),
            num_query_tokens=NUM_QUERIES,
            image_token_index=image_id,
        )
    text = transformers.OPTConfig(
        hidden_size=2560,
        num_hidden_layers=32,
        num_attention_heads=32,
        ffn_dim=10240,
        word_embed_proj_dim=2560,
        vocab_size=50272,
    )
    # The vision tower and the Q-Former of every BLIP-2 are transformers' defaults.
    return transformers.Blip2Config(
        qformer_config=qformer, text_config=text.to_dict(), num_query_tokens=NUM_QUERIES, image_token_index=image_id
    )


def make_folder(folder: Path, shape: str) -> None:
    """config.json and a processor whose tokenizer knows the captions' words, but no weights."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{colour} {shape}s" for colour in COLOURS for shape in SHAPES], trainer)
    special = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    size = 28 if shape == "tiny" else 224
    processor = transformers.Blip2Processor(
        transformers.BlipImageProcessorPil(size={"height": size, "width": size}), fast, num_query_tokens=NUM_QUERIES
    )
    image_id = fast.get_vocab()["<image>"]
    make_config(shape, image_id, len(fast)).save_pretrained(folder)
    processor.save_pretrained(folder)


def draw_pictures(folder: Path, number: int) -> None:
    """So many pictures of up to three shapes, and train.jsonl with their captions."""
    image_module = import_pillow()
    from PIL import ImageDraw

    folder.mkdir(parents=True, exist_ok=True)
    generator, lines = np.random.default_rng(0), []
    for index in range(number):
        count, colour, shape = int(generator.integers(1, 4)), *map(str, map(generator.choice, (list(COLOURS), SHAPES)))
        image = image_module.new("RGB", (224, 224))
        canvas = ImageDraw.Draw(image)
        for place in range(count):
            x, y, radius = (place + 0.5) * 224 / count, generator.uniform(60, 164), generator.uniform(20, 34)
            paint = canvas.ellipse if shape == "circle" else canvas.rectangle
            paint((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
        image.save(folder / f"{index}.png")
        words = ("one", "two", "three")[count - 1], colour, shape + "s" * (count > 1)
        lines.append(json.dumps({"image": f"{index}.png", "text": " ".join(words)}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def run_flags(out: Path, layout: str, more: Sequence[str]) -> list[str]:
    """The lab's settings for one layout, less those that `more` replaces."""
    settings = {
        "--model_name": str(out / "model"),
        "--output_dir": str(out / layout),
        "--dataset": "caption_dataset",
        "--caption_dataset.data_path": str(out / "pictures"),
        "--batch_size_training": str(MICRO_BATCH),
        "--gradient_accumulation_steps": str(ACCUMULATION),
        "--lr": str(LR),
        "--lr_scale_with_world_size": "linear" if layout == "ddp" else "none",
        "--num_epochs": "3",
        "--activation_checkpointing": "off",
        "--run_validation": "False",
        "--save_model": "False",
        "--save_every_steps": "0",
        "--save_every_minutes": "0",
    }
    switches = ["--random_weights", "--pure_bf16", "--overwrite", "--print_memory"]
    switches += ["--enable_fsdp", "--wrap", WRAP] if layout == "fsdp" else []
    return [*(word for flag, value in settings.items() if flag not in more for word in (flag, value)), *switches, *more]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.blip2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layout", choices=("single", "ddp", "fsdp"), required=True)
    parser.add_argument("--ranks", type=int, default=4, help="of ddp and fsdp (4)")
    parser.add_argument("--shape", choices=("2.7b", "tiny"), default="2.7b")
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("flags", nargs="*", help="more flags of finetuning.py, after --")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    try:
        draw_pictures(out / "pictures", given.pictures)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    make_folder(out / "model", given.shape)
    ranks = 1 if given.layout == "single" else given.ranks
    failure = launch(run_flags(out, given.layout, given.flags), ranks, show_output=True)
    print(failure, end="", file=sys.stderr)
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
