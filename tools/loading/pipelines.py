"""What `pipeline()` answers with a converted folder, beside what the model itself computes; runs where approx cannot be imported."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image


class Complaints(logging.Handler):
    """What transformers logs of a model that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "not supported" in record.getMessage():
            self.listed.append(record.getMessage()[:120])

    def __enter__(self) -> "Complaints":
        logging.getLogger("transformers").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("transformers").removeHandler(self)


TEXT = "the film is not very good"


def classified(head: Any, pipe: Any, inputs: Any, given: Any) -> None:
    with torch.no_grad():
        expected = pipe.model(**inputs).logits[0].softmax(-1)
    answer = pipe(given, top_k=1)[0]
    assert abs(answer["score"] - float(expected.max())) < 1e-5, (answer, expected)
    assert answer["label"] == pipe.model.config.id2label[int(expected.argmax())]


def texts(head: Any, pipe: Any) -> None:
    classified(head, pipe, pipe.tokenizer(TEXT, return_tensors="pt"), TEXT)


def recordings(head: Any, pipe: Any) -> None:
    classified(head, pipe, pipe.feature_extractor(sound(head), sampling_rate=16_000, return_tensors="pt"), sound(head))


def images(head: Any, pipe: Any) -> None:
    classified(head, pipe, pipe.image_processor(image(head), return_tensors="pt"), image(head))


def tokens(head: Any, pipe: Any) -> None:
    inputs = pipe.tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        expected = pipe.model(**inputs).logits[0].softmax(-1).max(-1).values[1:-1]
    scores = torch.tensor([float(one["score"]) for one in pipe(TEXT, ignore_labels=[])])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


def masked(head: Any, pipe: Any) -> None:
    text = TEXT.replace("good", pipe.tokenizer.mask_token)
    inputs = pipe.tokenizer(text, return_tensors="pt")
    (place,) = (inputs["input_ids"][0] == pipe.tokenizer.mask_token_id).nonzero()[0].tolist()
    with torch.no_grad():
        expected = pipe.model(**inputs).logits[0, place].softmax(-1).max()
    assert abs(pipe(text)[0]["score"] - float(expected)) < 1e-5


def generated(head: Any, pipe: Any) -> None:
    inputs = pipe.tokenizer(TEXT, return_tensors="pt")
    expected = pipe.model.generate(**inputs, max_new_tokens=6, do_sample=False)[0].tolist()
    (answer,) = pipe(TEXT, max_new_tokens=6, do_sample=False, return_tensors=True)
    assert answer["generated_token_ids"] == expected
    assert len(expected) > inputs["input_ids"].shape[1]


def features(head: Any, pipe: Any) -> None:
    given, reader = (image(head), pipe.image_processor) if "ViT" in head.name else (TEXT, pipe.tokenizer)
    inputs = reader(given, return_tensors="pt")
    with torch.no_grad():
        expected = pipe.model(**inputs)[0]
    torch.testing.assert_close(torch.tensor(pipe(given)), expected, rtol=1e-4, atol=1e-5)


def transcribed(head: Any, pipe: Any) -> None:
    inputs = pipe.feature_extractor(sound(head), sampling_rate=16_000, return_tensors="pt")
    if "Whisper" in head.name:
        expected = pipe.model.generate(**inputs, max_new_tokens=6, num_beams=1)[0]
        answer = pipe(sound(head), generate_kwargs={"max_new_tokens": 6, "num_beams": 1})
        assert answer["text"] == pipe.tokenizer.decode(expected, skip_special_tokens=True) != ""
        return
    with torch.no_grad():
        expected = pipe.model(**inputs).logits.argmax(-1)[0]
    assert pipe(sound(head))["text"] == pipe.tokenizer.decode(expected)


def sound(head: Any) -> Any:
    return np.load(head.folder / "sound.npy")


def image(head: Any) -> Any:
    return Image.open(head.folder / "image.png")


PIPELINES: dict[str, Callable[[Any, Any], None]] = {
    "text-classification": texts,
    "token-classification": tokens,
    "fill-mask": masked,
    "text-generation": generated,
    "feature-extraction": features,
    "image-feature-extraction": features,
    "image-classification": images,
    "audio-classification": recordings,
    "automatic-speech-recognition": transcribed,
}
