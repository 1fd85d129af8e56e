"""Settings of the data: datasets, rows and batches."""

from dataclasses import dataclass
from typing import Literal

from configs.datasets import FORMATS
from configs.setting import setting

DEFAULT_CONTEXT_LENGTH = 4096
DEFAULT_SOURCE_LENGTH = 1024
DEFAULT_TARGET_LENGTH = 128


@dataclass(frozen=True)
class DataSettings:
    """The datasets, and how their examples become rows and batches."""

    # Data
    dataset: str = setting(
        "samsum_dataset",
        f"training data: {', '.join(f'{name}_dataset' for name in FORMATS)}, custom_dataset, or FILE.py:FUNCTION in "
        "short; several as a,b",
    )
    dataset_weights: tuple[float, ...] = setting(
        (),
        "share of the examples for each dataset of --dataset, or for each of several files in the data_path of one; "
        "empty: all examples once per epoch",
        exclusive_minimum=0,
    )
    shuffle_buffer_size: int = setting(
        10_000, "examples of a stream kept in host memory to shuffle (streaming)", unit="examples", minimum=1
    )
    split_slice: str | None = setting(
        None, "use only the start of both splits: a percentage (1%) or a number (10)", unit="% or examples"
    )
    batching_strategy: Literal["packing", "padding"] = setting(
        "packing", "fill each row of context_length with several sequences, or pad one sequence per row"
    )
    context_length: int | None = setting(
        None,
        "length of the longest row; longer sequences are cut off (see truncation)",
        unit="tokens",
        minimum=8,
        stands_for=DEFAULT_CONTEXT_LENGTH,
        default_text=f"{DEFAULT_CONTEXT_LENGTH}, or less if the model has fewer positions",
    )
    max_source_length: int | None = setting(
        None,
        "length of the longest source of an encoder-decoder",
        unit="tokens",
        minimum=8,
        stands_for=DEFAULT_SOURCE_LENGTH,
        default_text=f"{DEFAULT_SOURCE_LENGTH}, or less if the model has fewer positions",
    )
    max_target_length: int | None = setting(
        None,
        "length of the longest target of an encoder-decoder",
        unit="tokens",
        minimum=2,
        stands_for=DEFAULT_TARGET_LENGTH,
        default_text=f"{DEFAULT_TARGET_LENGTH}, or less if the model has fewer positions",
    )
    source_prefix: str = setting(
        "", "text before every source of an encoder-decoder, such as 'summarize: ' for T5 (its task prefix)"
    )
    truncation: Literal["right", "left", "drop", "error", "split"] | None = setting(
        None,
        "what to do with a sequence longer than context_length (a source or target longer than its own limit): keep "
        "its first tokens (right) or its last (left), skip it (drop), end the run (error), or make several of it "
        "(split)",
        stands_for="right",
        default_text="split for text_dataset, right for others",
    )
    max_text_length: int = setting(
        50, "longest caption, its end token counted; the rest is cut off (caption_dataset)", unit="tokens", minimum=2
    )
    max_pixels: int | None = setting(
        None, "scale images down to so many pixels, of models that limit them (Qwen-VL)", unit="pixels", minimum=1
    )
    min_pixels: int | None = setting(
        None, "scale images up to so many pixels, of models that limit them (Qwen-VL)", unit="pixels", minimum=1
    )
    image_processor: tuple[str, ...] = setting(
        (), "other settings of the model's image processor, as in size.longest_edge=1024,do_image_splitting=False"
    )
    pad_to_multiple_of: int = setting(
        8,
        "pad the width of a batch to a multiple of this, but never beyond context_length; 16 under float8",
        unit="tokens",
        minimum=1,
    )
    show_sample: bool = setting(
        True, "print the first training example, its label tokens marked, and keep it in run.yaml; False: do neither"
    )
    num_workers_dataloader: int = setting(
        1, "data loading processes per rank; 0: load in the training process", unit="processes", minimum=0
    )

    # Batches
    batch_size_training: int = setting(4, "rows per rank per micro-batch", unit="rows", minimum=1)
    gradient_accumulation_steps: int = setting(1, "micro-batches per optimizer step", unit="micro-batches", minimum=1)
    global_batch_size: int | None = setting(
        None,
        "rows per optimizer step over all ranks; sets gradient_accumulation_steps",
        unit="rows",
        minimum=1,
    )

    min_steps: int = setting(
        0,
        "at least so many optimizer steps in the run: if the data makes fewer, a step takes fewer rows and then, when "
        "they are packed, shorter ones, until one sample per rank is left; 0: batches are as large as the flags say",
        unit="steps",
        minimum=0,
    )

    @property
    def datasets(self) -> tuple[str, ...]:
        """The dataset names in `dataset`."""
        return tuple(name.strip() for name in self.dataset.split(","))
