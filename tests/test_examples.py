"""The scripts that train models for reports: their output can be opened, and held-out data was not trained on."""

import gzip
import json
import math
import struct
import sys
from collections import Counter

import pytest
import soundfile
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from approx.checkpoints import checkpoint
from approx.evaluation.evaluate import Subject, evaluate
from approx.planning import positions
from approx.tasks import open_task
from examples import bert_model, gpt2_model, long_documents_model, roberta_model, speech_model
from examples.real import smollm2, whisper
from tiny_speech import some_utterances, sound, write_utterances
from tiny_study import tiny_checkpoint
from zoo import tiny

PHASES = (long_documents_model.Phase(8, 2, 2), long_documents_model.Phase(40, 1, 2))


@pytest.fixture
def documents(tmp_path, monkeypatch):
    """Run the script for long documents on a few texts and a tiny BERT; return the start and its folder."""
    words = ["the", "film", "is", "not", "very", "good", "bad", "dull", "fine", "long"]
    start = tiny_checkpoint(tmp_path / "start", positions=32)

    def write(name: str, rows: int, length: int) -> None:
        texts = [" ".join(words[(row + place) % len(words)] for place in range(length)) for row in range(rows)]
        with gzip.open(tmp_path / name, "wt") as file:
            file.writelines(
                json.dumps({"id": f"{name[:3]}/{row}", "text": text, "label": row % 2, "rating": 3}) + "\n"
                for row, text in enumerate(texts)
            )

    write("reviews.jsonl.gz", 40, 50)
    write("train.jsonl.gz", 3, 701)
    write("test_part.jsonl.gz", 2, 701)
    write("test_short.jsonl.gz", 2, 700)
    monkeypatch.setitem(long_documents_model.PHASES, "reviews", PHASES)
    arguments = ["--start", str(start), "--reviews", str(tmp_path / "reviews.jsonl.gz"), "--imdb", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["long_documents_model.py", "reviews", "-o", str(tmp_path / "out"), *arguments])
    long_documents_model.main()
    return start, tmp_path / "out"


def test_long_documents_are_learnt_by_the_upper_layers_on_longer_positions(documents):
    start, out = documents
    old, new = (AutoModelForSequenceClassification.from_pretrained(folder) for folder in (start, out / "model"))
    assert positions.limit(new.config) == 2048
    table = old.bert.embeddings.position_embeddings.weight
    assert torch.equal(new.bert.embeddings.position_embeddings.weight, table.repeat(64, 1))
    unchanged = [
        torch.equal(*pair)
        for pair in zip(old.parameters(), new.parameters(), strict=True)
        if pair[0].shape == pair[1].shape
    ]
    lower = len(list(old.bert.embeddings.parameters())) - 1 + len(list(old.bert.encoder.layer[0].parameters()))
    assert all(unchanged[:lower])
    assert not any(unchanged[lower:])


def test_long_documents_to_measure_are_those_not_trained_on(documents):
    _, out = documents
    ids = [json.loads(line)["id"] for line in (out / "movie-reviews.jsonl").read_text().splitlines()]
    assert 0 < len(ids) < 20
    assert all(long_documents_model.held_out(name, "reviews") for name in ids)
    split = open_task("documents").load(out / "imdb.jsonl")
    assert [example.id for example in split.examples] == ["imdb-0", "imdb-1"]


def test_genres_are_learnt_from_one_half_of_the_documents_and_measured_on_the_other(tmp_path, monkeypatch):
    start = tiny_checkpoint(tmp_path / "start", positions=32)
    genres = ["news", "humor", "lore"]
    with gzip.open(tmp_path / "brown.jsonl.gz", "wt") as file:
        file.writelines(
            json.dumps({"id": f"c{row}", "text": f"film {row} " * 300, "genre": genres[row % 3]}) + "\n"
            for row in range(24)
        )
    monkeypatch.setitem(long_documents_model.PHASES, "genres", PHASES)
    arguments = ["--start", str(start), "--brown", str(tmp_path / "brown.jsonl.gz")]
    monkeypatch.setattr(sys, "argv", ["long_documents_model.py", "genres", "-o", str(tmp_path / "out"), *arguments])
    learnt = []
    train = long_documents_model.train
    monkeypatch.setattr(
        long_documents_model, "train", lambda *arguments: (learnt.extend(arguments[2]), train(*arguments))
    )
    long_documents_model.main()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    assert model.config.id2label == {0: "press", 1: "general", 2: "learned", 3: "fiction"}
    split = open_task("documents", labels=["press", "general", "learned", "fiction"]).load(
        tmp_path / "out" / "brown.jsonl"
    )
    # A text names its row: "film 7 film 7 …".
    assert all(example.label == (0, 3, 1)[int(example.inputs["text"].split()[1]) % 3] for example in split.examples)
    tested = {f"c{example.inputs['text'].split()[1]}" for example in split.examples}
    # The other documents are read from words 0 and 250 on (of 600, at least 250 at the end).
    words = Counter(row["id"] for row in learnt)
    assert set(words) | tested == {f"c{row}" for row in range(24)}
    assert not set(words) & tested
    assert set(words.values()) == {2}
    assert {len(row["text"].split()) for row in learnt} == {600, 350}


def test_the_speech_model_transcribes_voices_and_speakers_it_was_not_trained_on(tmp_path, monkeypatch):
    texts = ["This is a film. It was good, and I saw it!", "I saw this film. It is 3 hours long. A film it is."]
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    utterances = some_utterances()
    for split, speakers in (("test-other", "10 11"), ("test-clean", "12"), ("dev-clean", "13")):
        chosen = {name: said for name, said in utterances.items() if name.split("-")[0] in speakers.split()}
        write_utterances(tmp_path / "librispeech" / split, chosen)
    for name, value in {"STEPS": 3, "UTTERANCES": 2, "NEW_UTTERANCES": 1, "NEW_SPEAKERS": ("11",)}.items():
        monkeypatch.setattr(speech_model, name, value)
    # espeak-ng is not a Python package, so it may be missing here.
    monkeypatch.setattr(
        speech_model, "_say", lambda one, file: soundfile.write(file, sound(0.5, tone=len(one.text)), 16_000)
    )
    arguments = ["--reviews", str(tmp_path / "train.jsonl.gz"), "--librispeech", str(tmp_path / "librispeech")]
    monkeypatch.setattr(sys, "argv", ["speech_model.py", "-o", str(tmp_path / "out"), *arguments])
    speech_model.main()
    loaded = {
        name: open_task("librispeech/train-clean-100").load(tmp_path / "out" / name).examples
        for name in ("train", "new-voices", "new-speakers")
    }
    assert len({example.label for name in ("train", "new-voices") for example in loaded[name]}) == 2 + 1 + 3
    assert {example.group for example in loaded["new-speakers"]} == {"11", "12"}
    trained, new = ({example.group for example in loaded[name]} for name in ("train", "new-voices"))
    assert not trained & new
    opened = checkpoint.load(tmp_path / "out" / "model")
    subject = Subject("exact", opened.model, checkpoint.processor(opened.source))
    entry = evaluate({"exact": subject}, open_task("librispeech/test-other"), data=tmp_path / "out" / "new-speakers")
    assert entry.base.scores["wer"] > 0


def test_the_first_filters_of_the_speech_model_separate_tones():
    seconds = torch.arange(speech_model.WINDOW) / speech_model.RATE
    filters = speech_model.sinusoids()
    for hertz in (200.0, 1000.0, 5000.0):
        heard = filters @ torch.sin(2 * torch.pi * hertz * seconds)
        loudness = heard.view(speech_model.FREQUENCIES, speech_model.PHASES).square().sum(1)
        mel = 2595 * math.log10(1 + hertz / 700)
        low, high = (2595 * math.log10(1 + end / 700) for end in (80, 7600))
        expected = (mel - low) / (high - low) * (speech_model.FREQUENCIES - 1)
        assert abs(int(loudness.argmax()) - expected) <= 1


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForQuestionAnswering"])
def test_a_roberta_with_the_weights_of_a_bert_gives_its_outputs(head):
    bert = tiny(f"Bert{head}")
    roberta = roberta_model.to_roberta(bert)
    assert type(roberta).__name__ == f"Roberta{head}"
    assert roberta_model.largest_difference(bert, roberta) == 0
    with torch.no_grad():
        roberta.base_model.get_parameter("embeddings.position_embeddings.weight")[1].add_(1.0)
    assert roberta_model.largest_difference(bert, roberta) > 0


def test_a_roberta_gets_a_new_task_head(tmp_path, monkeypatch):
    start = tiny_checkpoint(tmp_path / "start", positions=32)
    arguments = ["roberta_model.py", str(start), "-o", str(tmp_path / "out"), "--task-head", "classification"]
    monkeypatch.setattr(sys, "argv", arguments)
    roberta_model.main()
    old = AutoModelForSequenceClassification.from_pretrained(start)
    new = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert roberta_model.largest_difference(old.bert, new.roberta) == 0
    assert not torch.equal(new.classifier.dense.weight, old.bert.pooler.dense.weight)


def test_a_bert_learns_to_predict_hidden_tokens_and_gets_longer_positions(tmp_path, monkeypatch):
    start = tiny_checkpoint(tmp_path / "start", positions=32)
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.mask_token = "[UNK]"
    tokenizer.save_pretrained(start)
    text = tmp_path / "text.txt"
    text.write_text("the film is not very good , the film is dull . " * 40)
    for name, value in {"STEPS": 30, "BATCH": 4, "LENGTH": 16, "LEARNING": 1e-2}.items():
        monkeypatch.setattr(bert_model, name, value)
    arguments = [str(start), "-o", str(tmp_path / "out"), "--text", str(text), "--positions", "64"]
    monkeypatch.setattr(sys, "argv", ["bert_model.py", *arguments])
    bert_model.main()
    opened = checkpoint.load(tmp_path / "out")
    assert positions.limit(opened.model.config) == 64
    table = opened.model.bert.embeddings.position_embeddings.weight
    assert torch.equal(table[:32], table[32:])
    subject = Subject("exact", opened.model, checkpoint.processor(opened.source))
    entry = evaluate({"exact": subject}, open_task("mlm"), data=text)
    assert entry.base.scores["masked_loss"] < math.log(opened.model.config.vocab_size)


def test_the_probabilities_of_an_ngram_model_sum_to_one():
    trained = torch.randint(0, 7, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    for context in ([3, 5, 1], [6, 0, 7]):
        before = gpt2_model.ngram_perplexities(trained, context, 8)
        found = [gpt2_model.ngram_perplexities(trained, [*context, token], 8) for token in range(8)]
        for order, perplexity in before.items():
            assert sum(each[order] ** -4 / perplexity**-3 for each in found) == pytest.approx(1)


def test_an_ngram_model_prefers_what_it_has_read():
    trained = [1, 2, 3] * 50
    perplexities = gpt2_model.ngram_perplexities(trained, [1, 2, 3] * 5, 8)
    assert perplexities["1-gram"] == pytest.approx(3, rel=0.05)
    assert perplexities["3-gram"] < perplexities["2-gram"] < 1.5


def test_the_language_model_is_trained_on_spaced_texts(tmp_path, monkeypatch):
    data = tmp_path / "data"
    texts = [f"The lobster no. {row} is well-known, and it is (very) blue.<br /><br />It grows!" for row in range(40)]
    for name in ("longdocs/brown/train", "longdocs/state_union/docs_a", "imdb/train"):
        (data / name).parent.mkdir(parents=True)
        with gzip.open(data / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    (data / "squad").mkdir()
    paragraphs = [{"context": "Oxygen is an element."}]
    (data / "squad" / "dev-v2.0.a.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (data / "lm" / "wikitext-2").mkdir(parents=True)
    (data / "lm" / "wikitext-2" / "valid.raw.txt").write_text("The lobster is blue . It grows .")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=400, special_tokens=["<|endoftext|>"])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save_model(str(tmp_path / "tokenizer"))
    sizes = {"LAYERS": 1, "HEADS": 2, "HIDDEN": 8, "POSITIONS": 32, "STEPS": 3, "BATCH": 2, "LENGTH": 16}
    for name, value in sizes.items():
        monkeypatch.setattr(gpt2_model, name, value)
    start = tiny_checkpoint(tmp_path / "start", positions=32)
    arguments = ["--encoder", str(start), "--tokenizer", str(tmp_path / "tokenizer"), "--data", str(data)]
    monkeypatch.setattr(sys, "argv", ["gpt2_model.py", "-o", str(tmp_path / "out"), *arguments])
    gpt2_model.main()
    lines = (tmp_path / "out" / "text.txt").read_text().splitlines()
    assert len(lines) == 3 * 40 + 1
    assert "The lobster no . 7 is well @-@ known , and it is ( very ) blue . It grows !" in lines
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert set(figures) == {"1-gram", "2-gram", "3-gram", "model"}
    opened = checkpoint.load(tmp_path / "out" / "model")
    subject = Subject("exact", opened.model, checkpoint.processor(opened.source))
    entry = evaluate({"exact": subject}, open_task("lm"), data=data / "lm" / "wikitext-2" / "valid.raw.txt")
    assert entry.base.scores["perplexity"] > 1


def text(name: str) -> bytes:
    return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"


def ctranslate2(model) -> bytes:
    """A Whisper in CTranslate2's format, with stacked projections and a zero bias of keys."""
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    variables = {"decoder/embeddings/weight": state["decoder.embed_tokens.weight"]}

    def norm(old, new):
        variables[f"{new}/gamma"], variables[f"{new}/beta"] = state[f"{old}.weight"], state[f"{old}.bias"]

    def attention(old, new, stacks):
        norm(f"{old}_layer_norm", f"{new}/layer_norm")
        bias = torch.zeros_like(state[f"{old}.q_proj.bias"])
        for number, names in enumerate(stacks):
            where = f"{new}/linear_{number}"
            variables[f"{where}/weight"] = torch.cat([state[f"{old}.{name}_proj.weight"] for name in names])
            variables[f"{where}/bias"] = torch.cat([state.get(f"{old}.{name}_proj.bias", bias) for name in names])
        for part in ("weight", "bias"):
            variables[f"{new}/linear_{len(stacks)}/{part}"] = state[f"{old}.out_proj.{part}"]

    for number in (1, 2):
        for part in ("weight", "bias"):
            variables[f"encoder/conv{number}/{part}"] = state[f"encoder.conv{number}.{part}"]
    for side in ("encoder", "decoder"):
        variables[f"{side}/position_encodings/encodings"] = state[f"{side}.embed_positions.weight"]
        norm(f"{side}.layer_norm", f"{side}/layer_norm")
        for layer in range(2):
            old, new = f"{side}.layers.{layer}", f"{side}/layer_{layer}"
            attention(f"{old}.self_attn", f"{new}/self_attention", ["qkv"])
            if side == "decoder":
                attention(f"{old}.encoder_attn", f"{new}/attention", ["q", "kv"])
            norm(f"{old}.final_layer_norm", f"{new}/ffn/layer_norm")
            for number in (0, 1):
                for part in ("weight", "bias"):
                    variables[f"{new}/ffn/linear_{number}/{part}"] = state[f"{old}.fc{number + 1}.{part}"]
    data = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, tensor in variables.items():
        raw = tensor.half().numpy().tobytes()
        data += text(name) + struct.pack(f"<B{tensor.ndim}IBI", tensor.ndim, *tensor.shape, 4, len(raw)) + raw
    return data + struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")


def test_reads_a_whisper_of_ctranslate2_to_the_bit():
    torch.manual_seed(1)
    model = tiny("WhisperForConditionalGeneration").half()
    for parameter in model.parameters():
        parameter.data.normal_()
    data = ctranslate2(model)
    state = whisper.state_of(whisper.read_ctranslate2(data))
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="damaged, or a part is missing"):
        whisper.read_ctranslate2(data[: len(data) // 2])
    with pytest.raises(ValueError, match="version 5"):
        whisper.read_ctranslate2(struct.pack("<I", 5) + data[4:])


def test_refuses_a_decoder_that_does_not_know_the_capital(tmp_path):
    class Tokens:
        def __call__(self, text, return_tensors):
            return type("Encoded", (), {"input_ids": torch.tensor([[1, 2, 3, len(text) % 7]])})

        def decode(self, token):
            return f" word{int(token)}"

    with pytest.raises(SystemExit, match=r"goes on with ' word\d+' \(expected ' Paris'\)"):
        smollm2.check(tiny("LlamaForCausalLM"), Tokens())
