"""From the images that a row names to the text of its samples: sizes are read from the files' headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.images.opening import ImageSource, image_source, name_of, read_size
from data.processors.written_images import ImageWriter
from data.tokens.spans import BadExample, ChatSamples, TextSpan
from utils.errors import in_one_line


@dataclass(frozen=True)
class ImageReader:
    """Finds images, and writes them into texts as the processor does."""

    writer: ImageWriter
    folder: Path | None  # that relative paths start from

    def sources(self, values: Sequence[Any]) -> list[ImageSource]:
        """Where the images are that a row names.

        Raises:
            BadExample: if one is nowhere.
        """
        return [image_source(value, f"image {number}", self.folder) for number, value in enumerate(values, 1)]

    def written(self, samples: ChatSamples, values: Sequence[Any]) -> ChatSamples:
        """The samples with each placeholder as the text that the processor writes for its image.

        Raises:
            BadExample: if an image is missing or broken, or the processor refuses its size.
        """
        sources = self.sources(values)
        texts: list[tuple[str, ...]] = [()] * len(samples.spans)
        sizes = [read_size(source) for source in sources]
        for place, number in enumerate(samples.num_images):
            try:
                texts[place] = self.writer.texts(sizes[:number]) if number else ()
            except Exception as error:  # each processor has its own
                raise BadExample(self._refusal(sources[:number], sizes, error)) from error
        spans = [[*self._spans(of, iter(written))] for of, written in zip(samples.spans, texts, strict=True)]
        counts = tuple(self.writer.num_tokens(text) for written in texts for text in written)
        return samples._replace(spans=spans, image_tokens=counts, images=tuple(sources))

    def _spans(self, spans: Sequence[TextSpan], texts: Iterator[str]) -> Iterator[TextSpan]:
        """The spans with images written out; an image is never learned."""
        for span in spans:
            for number, part in enumerate(span.text.split(self.writer.placeholder)):
                if number:
                    yield TextSpan(next(texts), False)
                yield span._replace(text=part)

    def _refusal(self, sources: Sequence[ImageSource], sizes: Sequence[tuple[int, int]], error: Exception) -> str:
        for source, size in zip(sources, sizes, strict=False):
            if reason := self.writer.refusal_of(size):
                return f"the processor refuses image {name_of(source)}, {size[0]} x {size[1]} pixels ({reason})"
        return f"the processor refuses its {len(sources)} images ({in_one_line(error)})"
