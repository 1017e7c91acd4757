"""Calibrate mechanisms on a text or recording during one forward pass."""

import hashlib
import io
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from approx.checkpoints import checkpoint
from approx.errors import ApproxError, Exit
from approx.mechanisms.exact_part import ExactPart
from approx.mechanisms.mechanism import Mechanism
from approx.planning import positions
from approx.planning.positions import example_inputs, samples
from approx.seam.observe import Call, observe
from approx.text_file import decoded

TEXT = (
    "The harbour was quiet when the first boats came back. A clerk wrote down what each of them had caught, the "
    "weight, the price and the name of the buyer, and nobody asked why the northern grounds had given so little this "
    "year. In the office above the market two engineers compared the figures with those of the last ten summers. The "
    "water had grown warmer by half a degree, they said, but the fish had left before that; it was the current that "
    "had moved. Their report would be short. It would say what had been measured, how, and how sure one could be of "
    "it, and it would leave the question of what to do to those who had to live with the answer. "
    "Maria, the younger of the two, had grown up in the house behind the church. Her grandfather still kept a notebook "
    "in which he had written, every morning for forty years, the temperature of the sea and the direction of the wind. "
    "When she asked to borrow it he shook his head, then changed his mind and handed it over, wrapped in a newspaper. "
    "\"Don't "
    'trust the first three winters," he told her. "The thermometer was broken and I was too proud to buy another one." '
    "She copied the numbers into a table that evening. It took her until two o'clock, because some pages had been wet "
    "and the ink had run. In the end there were 14,231 readings. She drew one line through all of them and another "
    "through those that her grandfather trusted, and the second line told a different story from the first. "
    "The next day the council met. Mr Olsen, who owned the cold store and had paid for the new lights along the quay, "
    "wanted to hear about jobs. How many people would be without work by spring? Could the smaller boats be refitted "
    "for mussels, as they had been on the west coast? What would a refit cost, and who was going to pay for it? The "
    "mayor answered each question with another one, as he usually did, until a woman at the back stood up and said "
    "that her sons had already left for the city, that they were not coming home, and that the meeting could please be "
    "quick. Nobody laughed. The minutes record that the engineers were then asked to speak. They showed four charts. "
    "The first was the catch of each year; the second, the temperature; the third, the speed of the current at three "
    "depths. The fourth chart was Maria's. It showed that the current had started to move eleven years ago, in the "
    "same autumn in which the power station upriver had opened its new channel, and that it had moved a little farther "
    "every year since. A coincidence does not become a cause because it is convenient, the older engineer warned. They "
    "had not looked at the sand. Rivers carry sand, and where the sand settles the bottom rises, and a current goes "
    "round what it cannot go over. To find out they would need a boat, an echo sounder and six dry days in a row. "
    "They were given the boat. It was called the Constance, it was painted green, and its engine stopped whenever it "
    "was asked to go slowly. On the first day they measured the channel from the lighthouse to the second buoy. On the "
    "second day it rained, and they repaired the pump and played cards with the captain, who won. From the third day "
    "on the sea was as flat as a table. Line after line they went north and south, forty metres apart, while the paper "
    "came out of the machine and folded itself into a basket. By Saturday the shape was plain to everybody on board: a "
    "bank two miles long and as high as a house, exactly where the old maps had promised deep water. "
    "What followed was slower than the children of the town had hoped and faster than their parents had feared. A "
    "judge listened to the power company, which said that no law had been broken, and to the fishermen, who said that "
    "no law had been needed until now. Both were right. The company agreed to close its channel during the months of "
    "the spawning and to pay for a survey in every second year; the council agreed to move the mussel lines out of the "
    "new current. Three summers later the northern grounds gave a catch that was worth writing down. It was no more "
    "than a third of what the old men remembered, but memory, as the clerk liked to say, is an excellent fisherman. "
    "Maria's report lies in the library, on the second shelf to the left of the window. On its last page she thanks "
    "her grandfather for 14,231 mornings, and for the three winters that he had the honesty to cross out. "
    "The library itself had been a school until the year of the great flood. Its walls still bear a line of blue "
    "tiles that shows how high the water stood, a little above the desks, and visitors measure their children against "
    "it. Ten thousand books came later, most of them from a retired ship's doctor named Emil Harding, who had read in "
    "every port between Lisbon and Valparaíso and could not throw anything away. He left his collection to the town "
    "on one condition: nobody was ever to be asked why they wanted to read something. The first librarian had that "
    "sentence carved over the door. The second had it explained in four languages. The third, a cheerful young man "
    "called Joseph Adeyemi, simply unlocked the place at seven each morning, put a kettle on the stove, and let "
    "people in before the opening hours. It was there that the argument about the bridge began. For a hundred and "
    "sixty years a ferry had crossed the river mouth, twelve minutes each way, with room for six carts or, nowadays, "
    "nine small cars. Then an insurance firm offered to build its headquarters on the far side, provided that a road "
    "led to it. A bridge would cost eighty million, of which the government promised half. Supporters pointed to the "
    "ambulance: last winter it had waited forty minutes for the ice to clear while a carpenter with a broken hip lay "
    "shivering under three coats. Opponents pointed at everything else. Geese nested on the sandbanks; tankers needed "
    "thirty metres of free height; and who, asked the baker, would still stop for bread if the traffic flew past "
    "above the roofs? Joseph suggested that both camps write down what they would accept as proof that they were "
    "wrong. People laughed at first. Yet on Tuesday evening twenty-three of them sat at the long table with pencils, "
    "and the answers, when he read them aloud without names, turned out to be surprisingly short. If fewer than fifty "
    "ambulances a year had to wait, wrote one, I would keep the ferry. If the geese have other places, build it. If "
    "my rent rises, stop. Somebody had drawn a tunnel. Somebody else confessed that she was against the bridge "
    "chiefly because her former husband was for it, which, she added, was not an argument and would not change. So "
    "they counted. A nurse copied the logbook of the emergency service, leaving out every name: in five years the "
    "boat had been late thirty-one times, nine of them at night. Two students followed the geese with binoculars and "
    "a borrowed drone until the birds lost patience and chased it into a hedge. The harbour pilot lent his tables of "
    "tides. A surveyor explained, using a bread roll and two forks, why a low bridge that opens is cheaper than a "
    "high one that does not, and why it breaks down more often. By November the wall behind the stove was covered "
    "with paper, and the kettle had been replaced by a larger one. None of this decided anything, of course. What "
    "decided it was an accountant from the ministry, a grey lady with excellent shoes, who spent a weekend reading "
    "the wall from left to right. She asked only one thing: how many of the people who crossed on an ordinary Monday "
    "would also cross if it took three minutes instead of twelve? No one knew. They had counted ambulances, geese, "
    "ships, nails and rolls, but not themselves. The ferryman, who had said nothing all autumn, took a bundle of "
    "ticket stubs out of his jacket. He had kept them since his father died, he said, because it seemed wrong to burn "
    "them. There were a quarter of a million, sorted by weekday and tied with fishing line. It took the students "
    "until Easter to type them in. Mondays were busy, as everybody had supposed, but not with commuters. Nearly half "
    "of the passengers travelled in the morning with empty baskets and came back before lunch with full ones, and "
    "most of these were over seventy. They went to the market across the water since it was cheaper, and, as one of "
    "them remarked when she was shown her own dot on the chart, because one meets people on a boat. A bridge would "
    "have carried the cars of the insurance firm. It would not have carried that conversation. The firm, meanwhile, "
    "had found a site with a railway station and politely withdrew its plans. In the end a second ferry was bought, "
    "used, from an island that no longer needed it. It has a heated cabin, a stretcher that folds out of the wall, "
    "and a hull that breaks ice as thick as a hand. Since then the ambulance has waited twice, both times for a flock "
    "of geese. The drawings for the bridge hang in the reading room beside the tide tables, where engineers on "
    "holiday sometimes stop, frown, and take out a pencil. Joseph lets them. He keeps an eraser ready in the drawer "
    "under the dictionary, together with spare fuses, a tin of peppermints and a very old thermometer that somebody, "
    "years ago, had labelled broken in a proud and careful hand. The green boat, too, has found its way here, at "
    'least on paper: its old log lies open under glass at the page for the sixth dry day. "Engine stopped," it says, '
    '"wind nil, bank two miles long, captain owes the ladies four biscuits and an apology." Below it, in another ink, '
    "a child has added a whale, a compass and the words please turn over, and whoever does so, which the glass makes "
    "difficult, finds nothing but the name of the printer and the price of a dozen sheets."
)


# Precedes the text where the question is exact, which would otherwise be all of it.
QUESTION = "On which shelf does Maria's report lie, and for how many mornings does she thank her grandfather?"


def mechanisms(model: Any, paths: Iterable[str] | None = None) -> list[Mechanism]:
    """The mechanisms of a converted model in layer order, including those of groups of heads; or those at some paths."""
    return [
        mechanism
        for path in (model.config.approx["sites"] if paths is None else paths)
        for mechanism in model.base_model.get_submodule(path).mechanism.modules()
        if isinstance(mechanism, Mechanism)
    ]


def calibrate(model: Any, inputs: dict[str, Tensor] | None, only: Collection[Mechanism] | None = None) -> None:
    """Fit each mechanism that takes calibration, just before it runs, so that it sees the outputs of fitted layers.

    Args:
        model: A converted model.
        inputs: A calibration batch; may be None if no mechanism needs one.
        only: Fit only these mechanisms.

    Raises:
        ApproxError: if a mechanism needs a batch and there is none, or the batch does not reach it.
    """
    chosen = mechanisms(model) if only is None else only
    waiting = {mechanism for mechanism in chosen if mechanism.takes_calibration}
    if not waiting:
        return
    if inputs is None:
        names = ", ".join(sorted({type(each).__name__ for each in waiting if each.needs_calibration}))
        if not names:
            return
        raise ApproxError(
            f"{names} must be fitted to inputs, but there are none. Pass a batch of the model's inputs as "
            "'calibration', or choose settings that do not need one."
        )

    def fit(call: Call) -> None:
        for part in call.members():
            if part.mechanism in waiting:
                waiting.remove(part.mechanism)
                tokens = {"tokens": call.tokens} if part.mechanism.reads_tokens else {}
                part.mechanism.calibrate(part.q, part.k, part.v, part.mask, **tokens)

    with observe(model, before=fit), all_open(model), torch.no_grad(), evaluating(model):
        model(**inputs)
    if waiting:
        raise ApproxError(
            f"The calibration batch did not reach {len(waiting)} layers. Pass inputs that use the whole model."
        )
    fitted = [each for each in chosen if isinstance(each, ExactPart) and each.has_exact_part and each.takes_calibration]
    # Encoders also read inputs much shorter than the batch: weakened together, MiniLM's performer loses 5.6 points on SST-2.
    _fit_together(model, inputs, [each for each in fitted if each.causal])


# Logarithms of a factor of all far parts that are tried in turn; after the last nothing of them is left, within rounding.
_TOGETHER = (0.0, -1.0, -2.0, -4.0, -16.0)


@torch.no_grad()
def _fit_together(model: Any, inputs: dict[str, Tensor], parts: Sequence[ExactPart]) -> None:
    """Weaken the far parts of all layers by one factor as long as that brings the model's outputs closer to exact ones.

    What is best for each layer may be too much for all of them, since their errors add up.
    """
    if not parts:
        return
    with all_open(model), evaluating(model):
        with exactly(model):
            exact = _hidden(model, inputs)
        least, factor = math.inf, 0.0
        for log in _TOGETHER:
            for part in parts:
                weaken(part, log - factor)
            apart = _apart(_hidden(model, inputs), exact, inputs.get("attention_mask"))
            if not apart < least:
                for part in parts:
                    weaken(part, factor - log)
                return
            least, factor = apart, log


@torch.no_grad()
def weaken(part: ExactPart, log: float) -> None:
    """Multiply the far part of every head by `exp(log)`."""
    # Where queries have a gate, its last number stands for the factor.
    gate = getattr(part, "query_gate", None)
    (part.far_weight if gate is None else gate[:, -1]).add_(log)


def _hidden(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The last hidden states of a model, [B, L, D], or the first outputs of one without a base."""
    seen: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda module, given, outputs: seen.append(outputs[0]))
    try:
        model(**inputs)
    finally:
        hook.remove()
    return seen[-1].float()


def _apart(outputs: Tensor, exact: Tensor, mask: Tensor | None) -> float:
    """The squared error of outputs, relative to their variance over the real tokens."""
    if mask is not None and mask.shape == exact.shape[:2]:
        outputs, exact = outputs[mask.bool()], exact[mask.bool()]
    outputs, exact = (x.flatten(0, -2) for x in (outputs, exact))
    return float((outputs - exact).square().sum() / (exact - exact.mean(0)).square().sum().clamp(min=1e-30))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set evaluation mode inside the context, and restore the mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def all_open(model: Any) -> AbstractContextManager[None]:
    """Ignore `exact_below` inside the context, to fit or check mechanisms on shorter inputs than they will run on."""
    return exact_below(model, 0)


# Longer than any input.
_ALWAYS_EXACT = 2**62


def exactly(model: Any, but: Collection[Mechanism] = ()) -> AbstractContextManager[None]:
    """Run exact attention inside the context, in every layer but those of some mechanisms."""
    return exact_below(model, _ALWAYS_EXACT, but)


@contextmanager
def exact_below(model: Any, tokens: int, but: Collection[Mechanism] = ()) -> Iterator[None]:
    """Set `exact_below` of every mechanism inside the context, but for some."""
    limits = {mechanism: mechanism.exact_below for mechanism in mechanisms(model) if mechanism not in but}
    for mechanism in limits:
        mechanism.exact_below = tokens
    try:
        yield
    finally:
        for mechanism, limit in limits.items():
            mechanism.exact_below = limit


# Long enough for most mechanisms to approximate, and fast.
_USUAL_TOKENS, _USUAL_FRAMES = 1024, 512
_SOUND = ("input_values", "input_features")
# Limits memory, since the dense attention weights of every layer are computed.
_MOST_TOKENS = 2048
# Of this many tokens of English at least a quarter are distinct.
_FIRST_WORDS = 256
# Samples beyond it are no sound in numbers between -1 and 1.
_LOUDEST = 16.0


class CalibrationBatch(NamedTuple):
    """Inputs for fitting mechanisms and measuring layer errors.

    Attributes:
        inputs: Keyword arguments of the model's forward.
        description: The name of a file, or of its substitute.
    """

    inputs: dict[str, Tensor]
    description: str


@dataclass(frozen=True)
class CalibrationFile:
    """A text of the user, or a recording for speech models.

    Attributes:
        name: File name without its path, which may be private.
        sha256: Hash of its bytes.
        data: Its bytes.
    """

    name: str
    sha256: str
    data: bytes

    @classmethod
    def read(cls, path: Path, kind: str) -> "CalibrationFile":
        """Read a file.

        Args:
            path: Path of the file.
            kind: The main input of the model: `input_ids` for text, `input_values` or `input_features` for sound.

        Raises:
            ApproxError: if it cannot be read, is empty, or the model does not take such input.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ApproxError(f"{path} cannot be read: {error.strerror}. {_wanted(kind)}", Exit.UNAVAILABLE) from None
        file = cls(path.name, hashlib.sha256(data).hexdigest(), data)
        if kind in _SOUND:
            file.sound()
        elif kind == "input_ids":
            file.text()
        else:
            raise ApproxError(
                f"A model that takes {kind} cannot be calibrated on {path}. Leave out --calibrate to use random "
                "numbers."
            )
        return file

    def text(self) -> str:
        """The content as text.

        Raises:
            ApproxError: if it is not UTF-8 text, or empty.
        """
        text = decoded(self.data, self.name, settable=False)
        if not text.strip():
            raise ApproxError(f"{self.name} cannot be read: it is empty. {_wanted('input_ids')}", Exit.UNAVAILABLE)
        return text

    def sound(self) -> tuple[Any, int]:
        """The content as samples of one channel, [n] between -1 and 1, and the sampling rate.

        Raises:
            ApproxError: if it is not a recording, has several channels, or samples far beyond -1 and 1.
        """
        import soundfile

        try:
            sound, rate = soundfile.read(io.BytesIO(self.data), dtype="float32")
        except soundfile.SoundFileError as error:
            # The whole message names the object in memory that was read.
            reason = str(getattr(error, "error_string", error)).rstrip(".")
            raise ApproxError(
                f"{self.name} is not a readable recording ({reason}). {_wanted('input_values')}",
                Exit.UNAVAILABLE,
            ) from None
        if sound.ndim != 1 or not len(sound):
            problem = f"has {sound.shape[1]} channels" if sound.ndim != 1 else "is empty"
            raise ApproxError(f"{self.name} {problem}. {_wanted('input_values')}", Exit.UNAVAILABLE)
        # Samples that are stored as floats may be anything.
        if not abs(sound).max() <= _LOUDEST:
            raise ApproxError(
                f"{self.name} holds samples that are not between -1 and 1. {_wanted('input_values')}", Exit.UNAVAILABLE
            )
        return sound, rate


def _wanted(kind: str) -> str:
    return {
        "input_ids": "Give a plain text file with a few paragraphs like those the model reads.",
        **dict.fromkeys(
            _SOUND, "Give a single-channel WAV or FLAC file with a few seconds of speech like the model's inputs."
        ),
    }.get(kind, "Leave out --calibrate.")


def calibration_length(model: Any) -> int:
    """Tokens per calibration row: enough for all layers to approximate, if positions and memory allow.

    1,024 tokens, or 512 frames of speech, or twice the length from which all layers approximate if that is more; 2,048 if
    decoders weigh far keys, since a weight that is fitted to short texts is too much for long ones; at most 2,048 and at most
    the model's positions.

    Args:
        model: A converted model, fitted or not.
    """
    wanted = _USUAL_FRAMES if model.main_input_name in _SOUND else _USUAL_TOKENS
    for mechanism in mechanisms(model):
        start = mechanism.approximates_from()
        if isinstance(mechanism, ExactPart) and mechanism.causal and mechanism.takes_calibration:
            wanted = _MOST_TOKENS
        if start is not None:
            wanted = max(wanted, 2 * max(start, mechanism.exact_below))
    return min(wanted, _MOST_TOKENS, positions.limit(model.config) or wanted)


def calibration_batch(
    source: checkpoint.Source, model: Any, length: int, file: CalibrationFile | None = None
) -> CalibrationBatch:
    """Inputs without padding: rows of up to `length` tokens, 2,048 in all, or one row of up to `length` frames.

    Args:
        source: The checkpoint, for its tokenizer or feature extractor.
        model: The model, stock or converted.
        length: Most tokens per row; see `calibration_length`.
        file: Provides as many rows as fit from the start of its text, or the start of its sound, resampled to the
            model's rate. Without it the batch is one row of English, or of random tokens if the tokenizer is missing or
            not for English; for speech and images it is random numbers.

    Raises:
        ApproxError: if the model cannot read the file.
    """
    kind = model.main_input_name
    if kind in _SOUND and file is not None:
        return CalibrationBatch(_heard(source, model, file, length), file.name)
    noise = "random tokens" if kind == "input_ids" else "random numbers"
    random = CalibrationBatch(example_inputs(model, length, device=model.device), noise)
    if kind != "input_ids":
        return random
    try:
        tokenizer = checkpoint.processor(source)
    except ApproxError:
        if file is not None:
            raise
        return random
    asks = any(mechanism.settings.get("global_tokens") == "question" for mechanism in _made(model))
    question = QUESTION if asks else None
    most = max(1, _MOST_TOKENS // length)
    # Tokens rarely exceed twenty letters; tokenising a whole book for its first pages would be slow.
    written = file.text()[: 20 * length * most] if file is not None else TEXT
    rows = _rows(tokenizer, question, written, length)
    repeated = file is None and bool(rows) and len(rows[0]) < length
    if repeated:
        rows = _rows(tokenizer, question, TEXT * -(-length // len(rows[0])), length)
    rows = [row for row in rows[: 1 if file is None else most] if len(row) == len(rows[0])]
    tokens = {token for row in rows for token in row}
    known = bool(tokens) and max(tokens) < model.config.get_text_config().vocab_size
    if file is not None and not known:
        raise ApproxError(
            f"The tokenizer does not match {type(model).__name__}: it gives {max(tokens, default='no tokens')}, but "
            f"the vocabulary has {model.config.get_text_config().vocab_size} entries. Use the tokenizer that the model "
            "was trained with.",
            Exit.UNAVAILABLE,
        )
    # With a vocabulary of another language, the built-in text would be all unknown tokens.
    if not known or (file is None and len(tokens) < min(length, _FIRST_WORDS) // 4):
        return random
    description = file.name if file is not None else f"built-in English text{', repeated' if repeated else ''}"
    return CalibrationBatch({"input_ids": torch.tensor(rows, device=model.device)}, description)


def _made(model: Any) -> list[Mechanism]:
    """The mechanisms of a model; none if it is stock."""
    return mechanisms(model) if hasattr(model.config, "approx") else []


def _rows(tokenizer: Any, question: str | None, text: str, length: int) -> list[list[int]]:
    """Token ids of pieces of a text, each after the question if there is one."""
    how = {"max_length": length, "return_overflowing_tokens": True}
    if question is None:
        return tokenizer(text, truncation=True, **how)["input_ids"]
    return tokenizer(question, text, truncation="only_second", **how)["input_ids"]


def _heard(source: checkpoint.Source, model: Any, file: CalibrationFile, length: int) -> dict[str, Tensor]:
    from scipy.signal import resample_poly

    processor = checkpoint.processor(source)
    extractor = getattr(processor, "feature_extractor", processor)
    sound, rate = file.sound()
    wanted = extractor.sampling_rate
    if rate != wanted:
        common = math.gcd(rate, wanted)
        sound = resample_poly(sound, wanted // common, rate // common)
    kind = model.main_input_name
    if kind == "input_features":
        # All recordings have one length for such a model, and its decoder needs tokens.
        heard = example_inputs(model, length, device=model.device)
    else:
        sound, heard = sound[: samples(model, length)], {}
        if len(sound) < samples(model, 1):
            raise ApproxError(
                f"{file.name} holds {len(sound)} samples, fewer than the {samples(model, 1)} of one frame of "
                f"{type(model).__name__}. {_wanted(kind)}",
                Exit.UNAVAILABLE,
            )
    features = extractor(sound, sampling_rate=wanted, return_tensors="pt")[kind]
    return {**heard, kind: features.to(model.device, model.dtype)}
