"""Processors of images, videos and sounds load without torchvision, and keep the settings of what is left out."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from benchmarks.families.image_models import IMAGE_FAMILIES, save_family
from data.processors.processor_loading import read_processor
from data.processors.written_images import ImageWriter

NEEDS_TORCHVISION = Version(transformers.__version__) < Version("5.23")
"""Of Gemma 4's processor: measured with 5.17 and 5.23."""


@pytest.mark.skipif(NEEDS_TORCHVISION, reason="this release of transformers imports torchvision there")
def test_gemma_4_reads_images_alone_and_its_other_settings_are_saved_again(tmp_path: Path) -> None:
    save_family(IMAGE_FAMILIES["gemma4"], tmp_path)
    file = tmp_path / "processor_config.json"
    sounds = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "sampling_rate": 7}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"feature_extractor": sounds}))
    processor = read_processor(str(tmp_path), "--model_name")
    assert processor.get_attributes() == ["image_processor", "tokenizer"]
    pickle.loads(pickle.dumps(processor)).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/processor_config.json").read_text())
    assert saved["feature_extractor"] == sounds
    assert saved["video_processor"] == {"video_processor_type": "Gemma4VideoProcessor"}
    (text,) = ImageWriter.of(processor).texts([(64, 48)])
    assert text.startswith("<|image>")
    assert text.endswith("<image|>")
