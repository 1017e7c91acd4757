"""Pages of attention: what they hold, of every kind of model, and what is refused."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
import soundfile
import torch
import transformers
from typer.testing import CliRunner

import approx
from approx.cli import app
from approx.errors import Exit
from approx.looking.inputs import words
from approx.looking.look import look
from approx.planning.plan import Plan, Rule
from tiny_study import tiny_checkpoint
from zoo import error_of, tiny

TEXT = "the film is good " * 4


class Page(HTMLParser):
    """What a browser would load, run or be unable to name."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.unnamed: list[str] = []
        self.tags: list[str] = []
        self.used: list[str] = []
        self.outlines: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        for name in ("src", "href"):
            if (target := given.get(name)) and tag in ("img", "image", "script", "link", "iframe"):
                self.loaded.append(target)
        if tag == "use":
            self.used.append(given["href"])
        if tag == "path" and "id" in given:
            self.outlines.append(given.get("d", "") + given.get("transform", ""))
        if tag == "a":
            self.links.append(given["href"])
        if (tag == "img" and not given.get("alt")) or (tag == "svg" and not {"aria-label", "aria-hidden"} & set(given)):
            self.unnamed.append(tag)


def check_page(folder) -> str:
    """The page of a folder: offline, without scripts, with names for pictures and without dead links."""
    html = (folder / "index.html").read_text("utf-8")
    page = Page(html)
    assert "script" not in page.tags
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert [target[:30] for target in page.loaded if not target.startswith("data:image/")] == []
    assert page.unnamed == []
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in [*page.links, *page.used]} <= set(page.ids)
    letters = [outline for outline in page.outlines if "scale" in outline]
    assert len(letters) == len(set(letters)) > 10
    return html


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base"))


def converted(base, *rules: Rule):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    sample = {"input_ids": torch.tensor([transformers.AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"]])}
    approx.convert(model, Plan(rules), calibration=sample)
    return model


def test_a_page_shows_every_head_and_draws_those_large_that_keep_least(base, tmp_path):
    model = converted(base, Rule("clustered", "0", {"clusters": 3}), Rule("local", "1", {"left": 1, "right": 1}))
    out = tmp_path / "look"
    made = look(model, out, text=TEXT, processor=str(base))
    html = check_page(out)
    assert {(one.layer, one.mechanism) for one in made.layers} == {(0, "clustered"), (1, "local")}
    for layer, name in ((0, "clustered"), (1, "local")):
        least = min(range(len(made.layers[layer].kept)), key=lambda head: made.layers[layer].kept[head])
        (why,) = (one.why for one in made.large if (one.layer, one.head) == (layer, least))
        assert name in why
        assert f"layer-{layer}-head-{least}-difference.svg" in {path.name for path in out.iterdir()}
        assert f"layer-{layer}-head-{least}-difference.png" in {path.name for path in out.iterdir()}
        assert f'id="small-{layer}-head-{least}"' in html
    assert made.layers[0].captured == [None] * len(made.layers[0].kept)
    assert made.kept == pytest.approx(np.mean([share for one in made.layers for share in one.kept]))
    assert "Clusters" in html
    assert "Pattern" in html
    assert ">film<" in html
    # In the lines view each query can be chosen by keyboard.
    assert len(re.findall(r'<input type="radio"', html)) >= len(made.large) * 10
    assert all((tmp_path / "look" / file.rpartition("/")[2]).is_file() for file in made.files)


def test_a_stock_checkpoint_shows_exact_attention_alone(base, tmp_path):
    made = look(str(base), tmp_path / "look", text=TEXT, offline=True)
    html = check_page(tmp_path / "look")
    assert made.kept is None
    assert all("focused" in one.why for one in made.large)
    assert "nothing to compare" in html
    assert ">Difference<" not in html


def test_the_chosen_head_is_drawn_and_minus_one_is_the_last(base, tmp_path):
    model = converted(base, Rule("local", "all", {"left": 1, "right": 1}))
    made = look(model, tmp_path / "look", text=TEXT, processor=str(base), layer=-1, head=0)
    assert [(one.layer, one.head) for one in made.large] == [(1, 0)]
    assert "asked for" in made.large[0].why


@pytest.mark.slow
def test_another_checkpoint_is_the_exact_side(base, tmp_path):
    other = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    same = look(other, tmp_path / "same", text=TEXT, processor=str(base), against=str(base), offline=True)
    assert same.kept == pytest.approx(1, abs=1e-4)
    with torch.no_grad():
        for parameter in other.base_model.encoder.layer[0].parameters():
            parameter.mul_(3)
    changed = look(other, tmp_path / "changed", text=TEXT, processor=str(base), against=str(base), offline=True)
    assert changed.kept is not None
    assert changed.kept < 0.999
    assert max(changed.layers[0].error) > 0.01


class Sounds:
    """Features of the size that a tiny Whisper takes, and its vocabulary as numbers."""

    all_special_ids = (0, 2)
    sampling_rate, n_samples = 16_000, 16_000

    def __init__(self) -> None:
        self.feature_extractor = self
        self.tokenizer = self
        self.model_input_names = ("input_features",)

    def __call__(self, sound, **kwargs):
        return {"input_features": torch.linspace(-1, 1, 8 * 48).view(1, 8, 48)}

    def decode(self, ids):
        return "".join(f" {token}" for token in ids)


def test_a_decoder_is_aligned_with_the_recording(tmp_path):
    model = tiny("WhisperForConditionalGeneration")
    model.generation_config.update(decoder_start_token_id=3, eos_token_id=2, pad_token_id=0, max_length=12)
    approx.convert(model, Plan((Rule("clustered", "0-1", {"clusters": 4}),)))
    soundfile.write(tmp_path / "a.wav", np.zeros(8_000, np.float32), 16_000)
    made = look(model, tmp_path / "look", audio=tmp_path / "a.wav", processor=Sounds())
    html = check_page(tmp_path / "look")
    assert made.input == "recording a.wav of 0.5 seconds"
    assert 'id="alignment1"' in html
    assert (tmp_path / "look" / "alignment-difference.svg").is_file()
    assert [one.mechanism for one in made.layers] == ["clustered", "clustered", "exact", "exact"]
    assert [one.name for one in made.layers][2] == "Layer 2 (decoder)"


def test_tokens_are_joined_to_words():
    assert words((" St", "uff", "ered", " into", ",", "<|endoftext|>")) == [
        ("Stuffered", [0, 1, 2]),
        ("into,", [3, 4]),
        ("<|endoftext|>", [5]),
    ]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), Exit.USAGE, "An input is needed, and none was given"),
        (("--text", "a", "--image", "b.png"), Exit.USAGE, "--text and --image were given"),
        (("--audio", "a.flac"), Exit.USAGE, "reads text: give one with --text|Give one with --text"),
        (("--text", "a", "--layer", "2"), Exit.USAGE, "has the layers 0-1"),
        (("--text", "a", "--head", "-9"), Exit.USAGE, "has the heads 0-"),
        (("--text", ""), Exit.USAGE, "text is empty"),
        (("--text", "film " * 600), Exit.USAGE, "the limit is"),
        (("--text", "a", "--force"), Exit.REFUSED, "was not written by approx"),
    ],
)
def test_mistakes_are_named_in_one_line(base, tmp_path, options, code, said):
    out = tmp_path / "look"
    if "--force" in options:
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    done = CliRunner().invoke(app, ["look", str(base), "-o", str(out), "--offline", *options])
    assert done.exit_code == code
    assert re.search(said, " ".join(done.output.split()))
    assert not (out / "index.html").exists()


def test_an_existing_folder_is_replaced_only_with_force(base, tmp_path):
    out = tmp_path / "look"
    out.mkdir()
    (out / "index.html").write_text("mine")
    error = error_of(lambda: look(str(base), out, text=TEXT, offline=True))
    assert error is not None
    assert error.exit_code == Exit.REFUSED


def test_a_model_whose_attention_cannot_be_observed_is_refused(tmp_path):
    config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
    model = transformers.T5ForConditionalGeneration(config)
    error = error_of(lambda: look(model, tmp_path / "look", text="a", processor=lambda text: {}))
    assert error is not None
    assert error.exit_code == Exit.UNSUPPORTED
