"""What is private, by every form that it has, and what only looks like it."""

import base64
import json

import pytest

from approx.pushing import privacy
from approx.pushing.privacy import Private, findings, is_private, private_here, scrubbed, without_origins

HOME = "/home"
NOTHING = Private((), (), ())
LETTERS = "aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD2fG4hJ6k"
DIGITS = "0123456789abcdef" * 3
# Put together here, so that no scanner takes this file for a leak.
FORMS = [
    *("hf" + "_" + LETTERS[:20], "api" + "_org_" + LETTERS[:20], "github" + "_pat_" + LETTERS[:30]),
    *("gh" + kind + "_" + LETTERS[:30] for kind in "opsur"),
    *("gl" + kind + "-" + LETTERS[:20] for kind in ("pat", "dt", "rt", "cbt", "ptt", "soat", "ft", "imt", "agent")),
    *("xox" + kind + "-" + LETTERS[:10] for kind in "abeoprs"),
    *("xapp" + "-1-" + LETTERS[:10], "hooks.slack.com/" + "workflows/" + LETTERS[:20]),
    *(
        "sk" + "-" + LETTERS[:20],
        "rk" + "_test_" + LETTERS[:10],
        "sk" + "_live_" + LETTERS[:10],
        "whsec" + "_" + LETTERS[:20],
    ),
    *(start + "0123456789ABCDEF" for start in ("AKIA", "ASIA", "ABIA", "ACCA")),
    *("AWS my secret: " + LETTERS, "AIza" + LETTERS[:35], "ya29" + "." + LETTERS[:20], "GOCSPX" + "-" + LETTERS[:20]),
    *(
        "AccountKey" + "=" + LETTERS[:20],
        "SharedAccessKey" + "=" + LETTERS[:20],
        "SharedAccessSignature" + "=" + LETTERS[:20],
    ),
    *("?sig" + "=" + LETTERS[:30], "&sig" + "=" + LETTERS[:30], (LETTERS * 3)[:86] + "==", "npm" + "_" + LETTERS[:30]),
    *(
        "pypi" + "-AgE" + LETTERS[:10],
        "pypi" + "-" + (LETTERS * 2)[:50],
        "SG" + "." + LETTERS[:16] + "." + LETTERS[:16],
    ),
    *("12345678" + ":AA" + LETTERS[:33], "dop" + "_v1_" + DIGITS[:40], "dapi" + DIGITS[:32]),
    *(
        "eyJ" + LETTERS[:8] + ".eyJ" + LETTERS[:8] + ".",
        "-----BEGIN " + "PRIVATE KEY-----",
        "PuTTY-User-Key-File" + "-3",
    ),
    *("mysql://ada" + ":x@example.org", LETTERS),
]


def found_in(tmp_path, text, name="some.json", here=NOTHING, known=""):
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return findings(file, name, here, known)


@pytest.mark.parametrize("secret", FORMS)
def test_recognises_secrets_by_their_form(tmp_path, secret):
    for text in (secret, f'{{"a": "{secret}"}}', f"by {secret}, since"):
        assert found_in(tmp_path, f"\n{text}") == ["some.json, line 2: a secret"]
    assert is_private(f"by {secret}", NOTHING)
    assert found_in(tmp_path, json.dumps(scrubbed([{"a": secret}], NOTHING))) == []
    if "/" not in secret:
        assert found_in(tmp_path, "fine", f"{secret}.txt")[0] == "a file whose name holds a secret"


@pytest.mark.parametrize(
    "text",
    [
        "hf" + "_" + LETTERS[:19],
        "xox" + "c-" + LETTERS,
        "sk" + "-" + LETTERS[:19],
        "XAKIA0123456789ABCDEF",
        "AKIA0123456789ABCDEFG",
        "task-" + "sk" + "-" + LETTERS,
        LETTERS[:39],
        LETTERS.lower(),
        "https://example.org/a:b@c",
        "http://example.org",
        "an aBcD " * 9,
        "dapi" + DIGITS[:31],
        "https://example.org/home/ada/x",
        "owner/name/file",
        "1/2/3",
        "and/or/both",
    ],
)
def test_ignores_texts_that_resemble_secrets_or_paths(tmp_path, text):
    assert found_in(tmp_path, text) == []
    assert not is_private(text, NOTHING)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json"]
)
def test_a_vocabulary_may_hold_any_word_but_no_secret(tmp_path, name):
    here = Private(("password", "a-token-of-16-let"), (), ("mallory",))
    for place in (name, f"sub/{name}"):
        text = json.dumps({"mallory": 0, "password": 1, f"{HOME}/ada": 2, LETTERS: 3, "command": "approx"})
        assert found_in(tmp_path, text, place, here) == []
        assert found_in(tmp_path, f'"a-token-of-16-let" {FORMS[0]}', place, here) == [f"{place}, line 1: a secret"]
    assert len(found_in(tmp_path, text, f"no {name}", here)) > 2


@pytest.mark.parametrize(
    ("variable", "secret"),
    [
        ("MY_TOKEN", True),
        ("my_token", True),
        ("CLIENT_SECRET", True),
        ("DB_PASSWORD", True),
        ("PASSWD", True),
        ("API_KEY", True),
        ("MYAPIKEY", True),
        ("AWS_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("EDITOR", False),
    ],
)
def test_values_of_secret_variables_are_secrets(monkeypatch, variable, secret):
    monkeypatch.setenv(variable, "12345678")
    assert ("12345678" in private_here().secrets) is secret
    # What is shorter may be a word.
    monkeypatch.setenv(variable, "1234567")
    assert "1234567" not in private_here().secrets


@pytest.mark.parametrize(
    ("user", "host", "home", "names", "folders"),
    [
        ("mallory", "laptop.local", f"{HOME}/mallory", ("laptop", "mallory"), (f"{HOME}/mallory",)),
        ("ada", "localhost", "/srv/people/lovelace", ("ada", "lovelace"), ("/srv/people/lovelace",)),
        # Names that everybody has say nothing, nor do letters; `/root` is no folder of one user.
        ("root", "app", "/root", (), ()),
        ("Ubuntu", "ab", f"{HOME}/ubuntu", (), (f"{HOME}/ubuntu",)),
        *(
            (name, name, f"{HOME}/{name}", (), (f"{HOME}/{name}",))
            for name in ("user", "users", "admin", "debian", "runner", "nobody", "docker", "jovyan")
        ),
    ],
)
def test_names_and_the_home_of_this_user_are_private(monkeypatch, user, host, home, names, folders):
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: user)
    monkeypatch.setattr(privacy.socket, "gethostname", lambda: host)
    monkeypatch.setenv("HOME", home)
    here = private_here()
    assert (here.names, here.folders) == (names, folders)
    # Secrets are not shown with the rest.
    assert "secrets" not in repr(here)


def test_a_user_without_a_name_is_no_error(monkeypatch):
    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(privacy.getpass, "getuser", nobody)
    private_here()


@pytest.mark.parametrize(
    "path",
    [
        *(
            f"/{folder}/ada/x"
            for folder in [
                "home",
                "Users",
                "Volumes",
                "root",
                "mnt",
                "media",
                "opt",
                "private",
                "scratch",
                "srv",
                "tmp",
                "var",
                "work",
                "workspace",
            ]
        ),
        "file:///data/x",
        "file:/data/x",
        "D:/Users/ada/x",
        "c:/home/ada",
        "~/data/x",
        "C:\\data\\my model",
    ],
)
def test_paths_of_a_machine_are_found_and_keep_their_last_part(tmp_path, path):
    for text in (path, f"see {path}", f"({path})"):
        (found,) = found_in(tmp_path, text, "some.md")
        assert found.startswith(f"some.md, line 1: the local path {path}")
        assert is_private(text, NOTHING)
    (clean,) = scrubbed([path], NOTHING)
    assert clean == path.replace("\\", "/").split("/")[-1]


def test_home_is_found_wherever_it_is(tmp_path):
    here = Private((), ("/data/people/ada",), ())
    assert found_in(tmp_path, "in /data/people/ada/models", here=here) == [
        "some.json, line 1: the local path /data/people/ada/models"
    ]
    assert scrubbed("a:/data/people/ada", here) == "a:…"
    assert is_private("x:/data/people/ada", here)


def test_shares_of_a_network_are_found_in_plain_text(tmp_path):
    for name in ("some.md", "some.txt"):
        assert found_in(tmp_path, "on \\\\server\\share$\\x", name) == [
            f"{name}, line 1: the local path \\\\server\\share$\\x"
        ]
    # In code two backslashes are one.
    assert found_in(tmp_path, '"\\\\server\\share"', "some.py") == []


def test_secrets_of_this_machine_are_found_in_any_disguise(tmp_path):
    here = Private(("correct horse",), (), ())
    hidden = base64.b64encode(b"a note: correct horse battery").decode()
    for text in ("correct horse", "correct%20horse", "correct\\u0020horse", "correct\\x20horse", hidden):
        assert found_in(tmp_path, text, here=here) == ["some.json, line 1: a secret"]
        assert "horse" not in json.dumps(scrubbed([text], here))
        assert hidden not in json.dumps(scrubbed([text], here))
    assert found_in(tmp_path, base64.b64encode(b"a note about a correct hose, and more").decode(), here=here) == []


@pytest.mark.parametrize("key", ["command", "argv", "cmd"])
def test_finds_and_removes_typed_commands_at_any_depth(tmp_path, key):
    data = {"a": [{key: "approx convert x"}], "b": {key: 3}, "c": {key: ""}}
    assert found_in(tmp_path, json.dumps(data)) == ["some.json, line 1: the typed command approx convert x"]
    assert scrubbed(data, NOTHING) == {"a": [{key: ""}], "b": {key: 3}, "c": {key: ""}}
    # Elsewhere it is a word.
    assert found_in(tmp_path, json.dumps(data), "some.txt") == []


@pytest.mark.parametrize(
    "key", ["_name_or_path", "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"]
)
def test_removes_origins_that_are_local_paths(key):
    for place in ("/data/bert", "~/bert", "./bert", "../bert", "C:/Users/ada/bert"):
        assert without_origins({key: place, "a": place}) == {"a": place}
    for harmless in ({key: "owner/bert"}, {key: None}, {key: 3}, [key], "text", None):
        assert without_origins(harmless) == harmless


def test_names_are_found_as_words_only(tmp_path):
    here = Private((), (), ("ada",))
    for text in ("ADA wrote", "by ada.", "ada_notes", "\\u0061da"):
        assert len(found_in(tmp_path, text, "some.md", here)) == 1
        assert "da" not in scrubbed(text, here).lower() or "\\" in text
    for text in ("adamant", "canada", "ada-like", "re-ada"):
        assert found_in(tmp_path, text, "some.md", here) == []
        assert scrubbed(text, here) == text
    # Code of this package, and what a model id says anyway.
    assert found_in(tmp_path, "ada", "some.py", here) == []
    assert found_in(tmp_path, "ada", "some.md", here, known="Ada/m") == []
    assert found_in(tmp_path, "ada", "NOTICE", here) == ["NOTICE, line 1: the name ada"]


def test_a_find_names_its_line_and_each_once(tmp_path):
    here = Private((), (), ("mallory",))
    text = f"one\nby mallory and mallory\n{FORMS[0]} {FORMS[1]}\n"
    assert found_in(tmp_path, text, "a/some.md", here) == [
        "a/some.md, line 2: the name mallory",
        "a/some.md, line 3: a secret",
    ]
    # A name of a file is as public as what it holds.
    assert found_in(tmp_path, "fine", "of-mallory/%6dallory.md", here) == [
        "of-mallory/%6dallory.md: its name holds the name mallory"
    ]


def test_a_file_keeps_its_bytes_where_nothing_changes(tmp_path):
    file = tmp_path / "a.json"
    for text in ('{"a":   1}', "no json"):
        file.write_text(text)
        privacy.rewritten(file, lambda data: data)
        assert file.read_text() == text
    file.write_text('{"a": 1, "b": "ö"}')
    privacy.rewritten(file, lambda data: data | {"a": 2})
    assert json.loads(file.read_text(encoding="utf-8")) == {"a": 2, "b": "ö"}
    assert "ö" in file.read_text(encoding="utf-8")


def test_published_records_hold_no_examples_of_the_data():
    assert scrubbed({"variants": [{"name": "a", "worst": [{"input": "a letter"}]}]}, NOTHING) == {
        "variants": [{"name": "a"}]
    }
