"""Small damages to a file: to its bytes, to its lines, to the tree of a JSON or YAML text, to the header of safetensors.

`OUTSIDE` is a folder beside every folder that is damaged; `HERE` in a damaged file stands for the folder of both.
"""

import copy
import hashlib
import io
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

Mutation = Callable[[Random, bytes], bytes]
HERE, OUTSIDE = "/place", "outside"
CANARY = "approx_canary"
SECRET = b'{"secret": 1}'
# Names that leave a folder, or seem to; what they lead to exists.
PATHS = (
    *(f"{way}{OUTSIDE}/{name}" for name in ("secret.json", "model.safetensors", "config.json", "folder") for way in ("../", f"{HERE}/")),
    *(f"{way}{CANARY}.py" for way in ("", "sub/", f"../{OUTSIDE}/", f"x/../../{OUTSIDE}/", f"..\\{OUTSIDE}\\", f"file://{HERE}/{OUTSIDE}/")),
    *("..", ".", "/", "~", "", "./config.json", "config.json/", "sub//x", "C:\\x", "C:x", "\uff0e\uff0e/x", "../..", "//x/y", "-x"),
)  # fmt: skip  # a table, read by rows
# Names of a class that only foreign code has.
CLASSES = (
    *(f"{way}{CANARY}.Canary" for way in ("", "sub.", ".", "..", "sub/", f"../{OUTSIDE}/", f"{OUTSIDE}.", f"..{OUTSIDE}.")),
    *(f"{way}--{CANARY}.Canary" for way in ("me/other", OUTSIDE, f"../{OUTSIDE}", f"{HERE}/{OUTSIDE}", "", "bert", "me/other--x")),
    *(f"{CANARY}.Canary.x", f"{CANARY}", f"{CANARY}:Canary", f"torch.nn.{CANARY}.Canary", f"sentence_transformers.models.{CANARY}"),
)  # fmt: skip  # a table, read by rows
# Settings that make a library import what they name.
_NAMING: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("auto_map", lambda named: {"AutoConfig": named, "AutoModel": named, "AutoModelForSequenceClassification": named}),
    ("auto_map", lambda named: {"AutoTokenizer": [named, named], "AutoProcessor": named, "AutoImageProcessor": named}),
    ("auto_map", lambda named: named),
    ("custom_pipelines", lambda named: {"x": {"impl": named, "pt": [named], "type": "text"}}),
    ("auto_mapping", lambda named: {"base_model_class": "Canary", "parent_library": named.rpartition(".")[0] or named}),
    *(
        (key, str)
        for key in (
            "type", "tokenizer_class", "processor_class", "feature_extractor_type", "image_processor_type", "hidden_act",
            "activation_fn", "activation_function", "sbert_ce_default_activation_function", "attn_implementation",
            "_attn_implementation", "experts_implementation", "architectures", "model_type", "custom_generate", "quant_method",
        )
    ),
)  # fmt: skip  # a table, read by rows


def _layers(count: int, text: str, first: str = "x") -> str:
    """`text` within itself, so many times, where it says `@`."""
    before, after = text.split("@")
    return before * count + first + after * count


def _doubled(count: int, first: str, text: str) -> str:
    """A list whose items each hold, by aliases, the one before as often as `text` says `@`."""
    items = [f"&a{number + 1} {text.replace('@', f'*a{number}')}" for number in range(count)]
    return f"[{', '.join([f'&a0 {first}', *items])}]"


# YAML whose aliases and merges stand for far more than is written, or for themselves, and deep nesting; each is one
# value.
_GROWING = (
    *(_doubled(depth, "[x, x]", "[@, @, @, @, @, @, @, @, @]") for depth in (3, 9, 60)),
    *(_doubled(30, "{k: 1}", text) for text in ("{<<: @, a: @, b: @}", "{<<: [@, @]}", "{a: @, b: @}", "{? @ : @}")),
    *("&a [*a]", "&a {x: *a}", "&a {<<: *a}", "&a {<<: [*a, *a]}", "[&a [&b [*a, *b]]]", "*a", "{<<: 1}", "{<<: [1]}", "{? [x]: 1}"),
    *(_layers(depth, text) for depth in (90, 110, 3000) for text in ("[@]", "{a: @}", "[{a: @}]")),
    *("!!set {a, a}", "!!omap [a: 1]", "!!binary x", "!!timestamp x", "!!merge x", "0o7", "1_000", "1:30", "=", "<<", "2024-01-01"),
)  # fmt: skip  # a table, read by rows
# The same without what only YAML has.
_DEEP = tuple(_layers(depth, text, "1") for depth in (90, 110, 3000, 100_000) for text in ("[@]", '{"a": @}'))

_PIECES = (
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r\n", b"\t", b'"', b"'", b"{", b"}", b"[" * 50, b"[" * 5000,
    b"{" * 50, b":", b",", b"&a ", b"*a", b"<<: ", b"!!python/name:os ", b"- ", b"null", b"NaN", b"-Infinity", b"1e999", b"-0",
    b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x05", b"PAR1", b"fLaC", b"RIFF", b"\x1f\x8b", b"\xe2\x80\xa8", b"\x85",
    # What texts of users hold: line and paragraph separators, spaces that are none, quotes in and around cells, empty
    # cells.
    b"\xe2\x80\xa9", b"\xc2\x85", b"\xc2\xa0", b"\xe3\x80\x80", b"\xe2\x80\x8b", b"\x0b", b"\x0c", b"\x1c", b"\r", b"\r\r\n", b'""',
    b'"a ""quoted"" cell"', b'"a', b'a"b', b'"two\nlines"', b'"a\tb"', b"\t\t", b"\t\r\n", b"''", b",,", b"\\", b"#", b"-DOCSTART- -X- O O",
    b"\xe9\x80", b"\x93quoted\x94", b"e\xcc\x81", b"\xd7\xa9\xd7\x9c", b"\xf0\x9f\x91\x8d\xf0\x9f\x8f\xbd",
)  # fmt: skip  # a table, read by rows
_NUMBERS = (0, 1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 31, 1000, 10**6, 2**31, 2**63, 2**64, -(2**63), 10**40, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "0", "1", "-1", "nan", "all", "auto", "none", "é文", "\0", "\ud800", "\n",
    "../x", "/", "~", ".", "x" * 300, "x" * 20_000, "%s{}{0}", "<b>&", "__class__", "1e5", "2024-01-01", "0x10", [], {}, [[]],
    [None], [0], [-1], ["x"], {"": ""}, {"x": None}, {"rules": []}, [1, 2, 3], [1e308, 1e308], list(range(200)),
    hashlib.sha256(SECRET).hexdigest(), 2**53 + 1, "\u2028", "a\u00a0b", "\u0085", "\ufeffx", "(a+)+$", "(x+x+)+y", ["(a|a)*$"],
)  # fmt: skip  # a table, read by rows
_WORDS = (
    "bert", "gpt2", "wav2vec2", "roberta", "vit", "whisper", "relu", "gelu", "silu", "linear", "local", "clustered", "performer",
    "lsh", "sdpa", "full", "bigbird", "longformer", "improved-clustered", "float16", "bfloat16", "float64", "int8", "eager",
    "BertModel", "GPT2LMHeadModel", "BertForSequenceClassification", "glue/sst2", "squad", "lm", "cpu", "cuda", "relative_key",
)  # fmt: skip  # a table, read by rows

# What describes the tensors of a call.
_DESCRIBED: dict[str, tuple[str, ...]] = {
    "shape": (),
    "dtype": (
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "bool",
        "complex64",
        "float8_e5m2",
        "uint8",
    ),
    "fill": ("normal", "zeros", "nan", "inf", "large", "mask", "draws", "negative"),
    "layout": ("whole", "transposed", "apart", "expanded", "sparse"),
    "device": ("cpu", "meta"),
}
_SIZES = (-1, 0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 21, 33, 65, 100, 200)
_FEW: tuple[Any, ...] = (
    -1, 0, 1, 2, True, False, None, 0.5, 1.0, float("nan"), [], [0], [3], [1, 2], [None], [-1, 1], {"always": -2}, {"always": 0},
    {"always": 1}, {"always": 2.5}, {"always": None}, {"always": 10**30}, {"root": True}, 2**31 - 1, -(2**31), 2**62, "past", "shared",
)  # fmt: skip  # a table, read by rows


def of_bytes(random: Random, content: bytes) -> bytes:
    """Flip, cut, repeat, move, insert; one to four times."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(len(data) + 1)
        until = min(len(data), at + random.choice((1, 2, 4, 8, 64, 1024)))
        match random.randrange(9):
            case 0 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 1 if data:
                data[at % len(data)] = random.randrange(256)
            case 2:
                data[at:at] = random.choice(_PIECES)
            case 3:
                del data[at:until]
            case 4:
                del data[at:]
            case 5:
                data[at:at] = data[at:until]
            case 6:
                number = struct.pack(random.choice(("<Q", ">Q")), random.choice(_NUMBERS))
                data[at : at + 8] = number if random.random() < 0.5 else number[: random.choice((1, 2, 4))]
            case 7:
                other = random.randrange(len(data) + 1)
                data[at:until] = data[other : other + until - at]
            case 8:
                data[at:until] = random.randbytes(until - at)
    return bytes(data)


def of_lines(random: Random, content: bytes) -> bytes:
    """Remove, repeat, swap and join lines; put pieces into their cells."""
    lines = content.split(b"\n")
    for _ in range(random.choice((1, 1, 2, 4))):
        at, other = random.randrange(len(lines)), random.randrange(len(lines))
        match random.randrange(9):
            case 0 if len(lines) > 1:
                del lines[at]
            case 1:
                lines.insert(at, lines[other])
            case 2:
                lines[at], lines[other] = lines[other], lines[at]
            case 3:
                cells = lines[at].split(b"\t") if b"\t" in lines[at] else lines[at].split(b" ")
                cells[random.randrange(len(cells))] = random.choice((*_PIECES, *map(_plain, _VALUES)))
                lines[at] = (b"\t" if b"\t" in lines[at] else b" ").join(cells)
            case 4:
                lines[at] += lines[other]
            case 5:
                lines[at] = random.choice((b" ", b"  ", b"\t", b"- ")) + lines[at]
            case 6:
                lines.insert(at, random.choice(_PIECES))
            case 7 if lines[at]:
                within = random.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:within] + random.choice(_PIECES) + lines[at][within:]
            case 8 if len(lines) > 1 and not lines[-1]:
                del lines[-1]
    text = b"\n".join(lines)
    return _rewritten(random, text) if random.random() < 0.15 else text


def _rewritten(random: Random, content: bytes) -> bytes:
    """The same text as another program writes it: its line ends and its encoding, with or without a mark."""
    if random.random() < 0.5:
        content = content.replace(b"\n", random.choice((b"\r\n", b"\r", b"\n\n")))
    text = content.decode("utf-8", "replace")
    encoding = random.choice(
        ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252", "utf-7", "cp037")
    )
    return text.encode(encoding, "replace")


def of_tree(random: Random, data: Any) -> Any:
    """A copy of plain data in which one to four values, keys or items were changed."""
    root = [json.loads(json.dumps(data))]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        places = list(_places(root))
        # The first place is the whole tree, which is seldom the most telling one.
        holder, key = random.choice(places if random.random() < 0.05 else places[1:] or places)
        value, (far, name) = holder[key], random.choice(places)
        match random.randrange(13):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(random.choice(_VALUES))
            case 3:
                holder[key] = random.choice(_WORDS)
            case 4 if holder is not root:
                del holder[key]
            case 5:
                holder[key] = random.choice(([value], [value, value], {"x": value}, str(value), [[value]]))
            case 6:
                holder[key] = json.loads(json.dumps(far[name]))
            case 7 if isinstance(value, int | float):
                holder[key] = value + random.choice((-1, 1, 0.5)) if random.random() < 0.5 else value * -1000
            case 8 if isinstance(holder, dict):
                holder[random.choice((*_WORDS, *PATHS, "x", "\0", f"{key}s", key[:-1], key.upper()))] = holder.pop(key)
            case 9 if isinstance(value, dict):
                value[random.choice((*_WORDS, "x", ""))] = copy.deepcopy(random.choice(_VALUES))
            case 10 if isinstance(value, list):
                value.insert(random.randrange(len(value) + 1), copy.deepcopy(random.choice(_VALUES)))
            case 11:
                if isinstance(value, dict) and random.random() < 0.5:
                    value[random.choice(PATHS)] = copy.deepcopy(random.choice((*value.values(), *_VALUES)))
                else:
                    holder[key] = random.choice((*PATHS, *CLASSES))
            case 12:
                # Where the top of the file has settings, these are read.
                inner = random.choice([one for one in (root[0], value, holder) if isinstance(one, dict)] or [{}])
                name, made = random.choice(_NAMING)
                inner[name] = made(random.choice(CLASSES))
            case _:
                holder[key] = copy.deepcopy(random.choice(_VALUES))
    return root[0]


def of_json(random: Random, content: bytes) -> bytes:
    """Change the tree of a JSON text, or its bytes where that is chosen or it has none."""
    if random.random() < 0.2:
        return of_bytes(random, content)
    if random.random() < 0.05:
        return _with(random, json.loads(content), _DEEP)
    return json.dumps(of_tree(random, json.loads(content)), indent=random.choice((None, 1))).encode()


def _with(random: Random, tree: Any, texts: tuple[str, ...]) -> bytes:
    """A JSON text with one of the texts in place of a value."""
    root = [tree]
    holder, key = random.choice([*_places(root)][1:] or [*_places(root)])
    holder[key] = "@"
    return json.dumps(root[0]).replace('"@"', random.choice(texts), 1).encode()


def of_jsonl(random: Random, content: bytes) -> bytes:
    """Change the tree of one line, or the lines."""
    if random.random() < 0.3:
        return of_lines(random, content) if random.random() < 0.5 else of_bytes(random, content)
    lines = content.splitlines()
    at = random.randrange(len(lines))
    lines[at] = json.dumps(of_tree(random, json.loads(lines[at]))).encode()
    return b"\n".join(lines)


def of_yaml(random: Random, content: bytes) -> bytes:
    """Change the tree of a YAML text, its lines or its bytes."""
    chosen = random.random()
    if chosen < 0.3:
        return of_lines(random, content) if chosen < 0.15 else of_bytes(random, content)
    if chosen < 0.4:
        return _with(random, yaml.safe_load(content), _GROWING)
    changed = of_tree(random, yaml.safe_load(content))
    if chosen < 0.5:
        return json.dumps(changed).encode()
    return yaml.safe_dump(changed, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")


def of_any(random: Random, content: bytes) -> bytes:
    """Change the tree where there is one, else the bytes."""
    try:
        json.loads(content)
    except ValueError:
        return of_bytes(random, content)
    return of_json(random, content)


def of_call(random: Random, content: bytes) -> bytes:
    """Change one to three arguments of a call: their values, or the shapes, dtypes and numbers of tensors; or the whole tree."""
    call = json.loads(content)
    if random.random() < 0.2:
        return json.dumps(of_tree(random, call)).encode()
    for _ in range(random.choice((1, 1, 2, 3))):
        holder, key = random.choice([place for place in _places(call["arguments"]) if place[1] not in _DESCRIBED])
        value = holder[key]
        if isinstance(value, dict) and "shape" in value and random.random() < 0.85:
            detail = random.choice((*_DESCRIBED, "shape", "shape"))
            if detail == "shape" and value["shape"] and random.random() < 0.8:
                value["shape"][random.randrange(len(value["shape"]))] = random.choice((*_SIZES, 2**30, 2**31))
            elif detail == "shape":
                value["shape"] = random.choice(
                    (value["shape"][1:], [1, *value["shape"]], value["shape"][::-1], [], [0])
                )
            else:
                value[detail] = random.choice(_DESCRIBED[detail])
        else:
            holder[key] = copy.deepcopy(random.choice((random.choice(_VALUES), random.choice(_SIZES), *_FEW)))
    return json.dumps(call).encode()


def added(random: Random, name: str) -> bytes:
    """The content of a file that a folder should not have: settings that name foreign code, or that code."""
    if not name.endswith(".json"):
        return canary()
    named, (key, made) = random.choice(CLASSES), random.choice(_NAMING)
    module = {"idx": 0, "name": "0", "path": random.choice(("", *PATHS)), "type": named}
    return json.dumps(random.choice(([module], {key: made(named)}))).encode()


def canary() -> bytes:
    """Code that leaves a file in the place, in whichever process it runs."""
    return b"""import os
with open(os.path.join(os.environ["APPROX_FUZZ_PLACE"], "ran.txt"), "a") as file:
    file.write(__file__)
class Canary:
    pass
"""


def of_parquet(random: Random, content: bytes) -> bytes:
    """Change the rows, as far as parquet holds what they become, or the bytes."""
    rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    try:
        made = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(of_tree(random, rows)), made)
    except (pyarrow.ArrowException, ValueError, TypeError, AttributeError, LookupError, OverflowError):
        return of_bytes(random, content)
    return made.getvalue() if random.random() < 0.7 else of_bytes(random, content)


def of_adapter(random: Random, content: bytes) -> bytes:
    """Change a config, or the weights."""
    return (of_json if content.startswith(b"{") else of_safetensors)(random, content)


def of_safetensors(random: Random, content: bytes) -> bytes:
    """Change the header, its length, the bytes of the tensors or those of the whole file."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = content[8 : 8 + length], content[8 + length :]
    match random.randrange(4):
        case 0:
            header = json.dumps(of_tree(random, json.loads(header))).encode()
        case 1:
            header = of_bytes(random, header)
        case 2:
            body = of_bytes(random, body)
        case _:
            return of_bytes(random, content)
    claimed = len(header) if random.random() < 0.9 else random.choice(_NUMBERS)
    return struct.pack("<Q", claimed) + header + body


def _places(node: Any) -> Any:
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _plain(value: Any) -> bytes:
    return str(value).encode("utf-8", "surrogatepass")
