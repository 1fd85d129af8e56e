"""Features that are given with a batch are those of its pictures, and of no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from data.images.vision_features import as_bits
from data.processors.written_images import ImageWriter
from policies.vision_features import SeenImages
from tests.helpers.image_chats import chat_processor, save_chat_model
from tests.helpers.image_models import captioned


@torch.no_grad()
def test_a_picture_that_is_asked_about_after_a_batch_is_not_one_of_the_batch(tmp_path: Path) -> None:
    """Generation calls the encoder before the model. The pictures are of one size, so no shape would tell."""
    model: Any = AutoModelForImageTextToText.from_pretrained(save_chat_model("qwen2_vl", tmp_path / "model")).eval()
    writer = ImageWriter.of(chat_processor("qwen2_vl"))
    one, other = (writer.pixel_inputs([picture])[0] for picture, _ in captioned(2))
    text = writer.processor.tokenizer(writer.texts([(32, 32)])[0], add_special_tokens=False, return_tensors="pt")
    prompt = {"input_ids": text["input_ids"], "mm_token_type_ids": (text["input_ids"] == writer.token_id).long()}
    expected = model.get_image_features(**other).pooler_output
    asked = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    scores = torch.stack(model.generate(**prompt, **other, **asked).scores)
    seen = SeenImages(model, model)
    features = [seen.outputs_of(pixels) for pixels in (one, other)]
    seen.learn_layout(*features, seen.outputs_of({name: torch.cat([one[name], other[name]]) for name in one}))
    given = {name: as_bits(value) for name, value in seen.stored(features[0]).items()}
    of_batch = model(**prompt, **one, **given).logits
    assert torch.equal(model.get_image_features(**other).pooler_output[0], expected[0])
    model(**prompt, **one, **given)
    assert torch.equal(torch.stack(model.generate(**prompt, **other, **asked).scores), scores)
    assert torch.equal(model(**prompt, **one).logits, of_batch)
