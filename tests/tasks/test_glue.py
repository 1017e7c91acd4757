"""GLUE from ten-line files in the official layouts, from a hub dataset laid out on disk, and from damaged files."""

import datasets
import pytest
from datasets import config as settings

from approx.errors import ApproxError, Exit
from approx.tasks import TASKS, Example, glue, hub, open_task

SST2 = "sentence\tlabel\n" + "".join(f"the film number {row} is fine \t{row % 2}\n" for row in range(10))
FILES = {
    "cola": ("CoLA/dev.tsv", "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tSailors the rode.\n"),
    "sst2": ("SST-2/dev.tsv", SST2),
    "mrpc": (
        "MRPC/dev.tsv",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t"Yes , " he said .\tHe said " yes .\n',
    ),
    "stsb": (
        "STS-B/dev.tsv",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tmain\tMSR\t2012\t0\tnone\tnone\tA man dances.\tA man sings.\t2.750\n",
    ),
    "qqp": ("QQP/dev.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhy?\tWhy not?\t0\n"),
    "mnli": (
        "MNLI/dev_matched.tsv",
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tIt rains.\tIt is dry.\tneutral\tcontradiction\n",
    ),
    "mnli-mm": (
        "MNLI/dev_mismatched.tsv",
        "index\tsentence1\tsentence2\tgold_label\n0\tIt rains.\tIt is wet.\tentailment\n",
    ),
    "qnli": ("QNLI/dev.tsv", "index\tquestion\tsentence\tlabel\n0\tWho?\tHe did.\tnot_entailment\n"),
    "rte": ("RTE/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tShe died.\tShe lived.\tnot_entailment\n"),
    "wnli": ("WNLI/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\tIt broke.\tThe cup broke.\t1\n"),
}
FIRST = {
    "cola": ({"text": "The sailors rode."}, 1),
    "sst2": ({"text": "the film number 0 is fine "}, 0),
    "mrpc": ({"text": '"Yes , " he said .', "text_pair": 'He said " yes .'}, 1),
    "stsb": ({"text": "A man dances.", "text_pair": "A man sings."}, 2.75),
    "qqp": ({"text": "Why?", "text_pair": "Why not?"}, 0),
    "mnli": ({"text": "It rains.", "text_pair": "It is dry."}, 2),
    "mnli-mm": ({"text": "It rains.", "text_pair": "It is wet."}, 0),
    "qnli": ({"text": "Who?", "text_pair": "He did."}, 1),
    "rte": ({"text": "She died.", "text_pair": "She lived."}, 1),
    "wnli": ({"text": "It broke.", "text_pair": "The cup broke."}, 1),
}


@pytest.fixture
def folder(tmp_path):
    for path, text in FILES.values():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(text.encode())
    return tmp_path


@pytest.mark.parametrize("subset", glue.GLUE)
def test_the_official_layout_is_read_from_the_file_its_folder_and_the_folder_above(subset, folder):
    task, file = open_task(f"glue/{subset}"), folder / FILES[subset][0]
    for data in (folder, file.parent, file):
        loaded = task.load(data)
        first = loaded.examples[0]
        assert (first.inputs, first.label) == FIRST[subset]
        assert loaded.name == file.stem
        assert first.id == f"{file.stem}-0"
        assert loaded.subset, "a handful of rows is not the official split"


def test_a_limit_keeps_the_first_rows_and_their_ids(folder):
    task = open_task("glue/sst2")
    assert task.load(folder, limit=3).examples == task.load(folder).examples[:3]
    with pytest.raises(ApproxError, match="--limit 0 leaves no rows"):
        task.load(folder, limit=0)


def test_an_excerpt_keeps_its_own_name(folder):
    (folder / "MNLI/dev_matched.tsv").rename(folder / "MNLI/dev_matched_1k.tsv")
    loaded = open_task("glue/mnli").load(folder)
    assert (loaded.name, loaded.subset) == ("dev_matched_1k", True)


def test_another_files_rows_are_not_called_a_subset(folder):
    (folder / "mine.tsv").write_text(SST2)
    assert not open_task("glue/sst2").load(folder / "mine.tsv").subset
    assert open_task("glue/sst2").load(folder / "mine.tsv", limit=10).subset


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sentence\tlabel\nfine\t1\nno label here\ngood\t1\n", r"dev.tsv, line 3: 1 columns where 2 are expected"),
        ("sentence\tlabel\nfine\t1\ttoo many\n", r"dev.tsv, line 2: 3 columns"),
        (
            "sentence\tlabel\nfine\t2\n",
            r"dev.tsv, line 2: unknown label '2'. glue/sst2 has negative or 0, positive or 1",
        ),
        ("sentence\tlabel\nfine\t-1\n", r"line 2: unknown label '-1'"),
        ("sentence\tlabel\n", r"glue/sst2: 0 rows in .*dev.tsv"),
        ("", r"glue/sst2: 0 rows in .*dev.tsv"),
        ("index\tsentence\n0\tfine\n", r"no column label in its first line \(index, sentence\).*test files have none"),
    ],
)
def test_damaged_files_are_named_with_the_line(text, message, tmp_path):
    (tmp_path / "dev.tsv").write_text(text)
    with pytest.raises(ApproxError, match=message) as caught:
        open_task("glue/sst2").load(tmp_path)
    assert caught.value.exit_code == Exit.UNAVAILABLE


@pytest.mark.parametrize("score", ["nan", "", "high"])
def test_a_score_that_is_no_number_is_refused(score, tmp_path):
    (tmp_path / "dev.tsv").write_text(f"sentence1\tsentence2\tscore\na\tb\t{score}\n")
    with pytest.raises(ApproxError, match=r"dev.tsv, line 2: "):
        open_task("glue/stsb").load(tmp_path)


def test_rejects_invalid_utf_8(tmp_path):
    (tmp_path / "dev.tsv").write_bytes(b"sentence\tlabel\n\xff\xfe\t1\n")
    with pytest.raises(ApproxError, match=r"dev\.tsv, line 2: byte 0xff is not UTF-8"):
        open_task("glue/sst2").load(tmp_path)


def test_a_missing_file_names_expected_and_present_files(folder):
    with pytest.raises(ApproxError, match=r"looked for SST-2/train.tsv and train.tsv in .*found dev.tsv") as caught:
        open_task("glue/sst2").load(folder, split="train")
    assert caught.value.exit_code == Exit.UNAVAILABLE
    with pytest.raises(ApproxError, match="does not exist"):
        open_task("glue/sst2").load(folder / "nowhere")
    with pytest.raises(ApproxError, match="Leave --split out"):
        open_task("glue/sst2").load(folder / "SST-2/dev.tsv", split="train")
    (folder / "MNLI/dev_matched.tsv").rename(folder / "MNLI/dev_matched_a.tsv")
    (folder / "MNLI/dev_matched_b.tsv").write_text("")
    with pytest.raises(ApproxError, match=r"found dev_matched_a.tsv, dev_matched_b.tsv"):
        open_task("glue/mnli").load(folder)


# The configuration, split and text columns of each task on the hub.
HUB = {
    "cola": ("cola", "validation", "sentence"),
    "sst2": ("sst2", "validation", "sentence"),
    "mrpc": ("mrpc", "validation", "sentence1", "sentence2"),
    "stsb": ("stsb", "validation", "sentence1", "sentence2"),
    "qqp": ("qqp", "validation", "question1", "question2"),
    "mnli": ("mnli", "validation_matched", "premise", "hypothesis"),
    "mnli-mm": ("mnli", "validation_mismatched", "premise", "hypothesis"),
    "qnli": ("qnli", "validation", "question", "sentence"),
    "rte": ("rte", "validation", "sentence1", "sentence2"),
    "wnli": ("wnli", "validation", "sentence1", "sentence2"),
}


@pytest.fixture
def hub_on_disk(tmp_path, monkeypatch):
    """Write rows to a folder in the layout of the hub, so that `datasets` loads them as from the hub."""
    monkeypatch.setattr(glue, "HUB_DATASET", str(tmp_path / "hub"))
    monkeypatch.setattr(settings, "HF_DATASETS_CACHE", tmp_path / "cache")

    def store(subset, split, examples):
        config, _, *columns = HUB[subset]
        texts = [[example.inputs[name] for name in ("text", "text_pair")[: len(columns)]] for example in examples]
        rows = dict(zip(columns, map(list, zip(*texts, strict=True)), strict=True))
        rows |= {"label": [example.label for example in examples], "idx": list(range(len(examples)))}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "hub" / f"{split}.parquet")
        files = f"  - split: {split}\n    path: {split}.parquet\n"
        (tmp_path / "hub/README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")

    return store


@pytest.mark.parametrize("subset", glue.GLUE)
@pytest.mark.sample(8)
def test_the_hub_layout_gives_the_same_examples_as_the_files(subset, folder, hub_on_disk):
    task = open_task(f"glue/{subset}")
    files = task.load(folder)
    hub_on_disk(subset, HUB[subset][1], files.examples)
    assert task.load() == files
    assert task.load(split=HUB[subset][1]) == files


def test_a_split_without_labels_is_refused(hub_on_disk):
    hub_on_disk("sst2", "test", [Example("test-0", {"text": "?"}, -1)])
    with pytest.raises(ApproxError, match=r"the split 'test' of .* has no labels; use dev or train") as caught:
        open_task("glue/sst2").load(split="test")
    assert caught.value.exit_code == Exit.UNAVAILABLE


def test_without_a_network_the_remedy_is_local_files(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
    with pytest.raises(ApproxError, match=r"offline mode is on.*--data DIR") as caught:
        open_task("glue/sst2").load()
    assert caught.value.exit_code == Exit.UNAVAILABLE
    # A closed port fails at once, like a machine without a network.
    monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(settings, "HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ApproxError, match=r"127.0.0.1:9 cannot be reached"):
        hub.load_rows("nyu-mll/glue", "sst2", "validation")
    assert settings.HF_HUB_OFFLINE is False


# Rows of train and dev in the configurations of nyu-mll/glue.
ROWS = {
    "cola": (8551, 1043),
    "sst2": (67349, 872),
    "mrpc": (3668, 408),
    "stsb": (5749, 1500),
    "qqp": (363846, 40430),
    "mnli": (392702, 9815),
    "mnli-mm": (392702, 9832),
    "qnli": (104743, 5463),
    "rte": (2490, 277),
    "wnli": (635, 71),
}


@pytest.mark.parametrize("subset", glue.GLUE)
def test_a_split_is_whole_with_its_official_rows(subset):
    task = glue.Glue(subset)
    for name, rows in zip(("train", HUB[subset][1].replace("validation", "dev")), ROWS[subset], strict=True):
        assert not task._is_subset(name, rows, None)
        assert task._is_subset(name, rows - 1, None)
        assert task._is_subset(name, rows - 1, rows - 1)


@pytest.mark.network
@pytest.mark.parametrize("subset", ["sst2", "mnli-mm", "stsb"])
def test_the_hub_dataset_has_the_official_rows(subset):
    assert not open_task(f"glue/{subset}").load().subset


@pytest.mark.parametrize("subset", ["cola", "sst2", "mrpc", "stsb", "rte"])
@pytest.mark.parametrize("split", ["train", "dev"])
@pytest.mark.sample(6)
def test_real_files_have_the_official_rows(subset, split, shared_data):
    loaded = open_task(f"glue/{subset}").load(shared_data / "glue", split)
    assert (loaded.name, len(loaded.examples), loaded.subset) == (
        split,
        ROWS[subset][split == "dev"],
        False,
    )


def test_names_real_excerpts(shared_data):
    matched = open_task("glue/mnli").load(shared_data / "glue")
    assert (matched.name, len(matched.examples), matched.subset) == ("dev_matched_1k", 1000, True)
    questions = open_task("glue/qqp").load(shared_data / "glue" / "QQP" / "train_subset_a.tsv")
    assert (questions.name, len(questions.examples), questions.subset) == ("train_subset_a", 18000, True)


def test_all_ten_are_registered():
    assert {f"glue/{subset}" for subset in FILES} <= TASKS.keys()


def test_each_subset_is_scored_as_the_benchmark_scores_it():
    """Wang et al. 2019, table 1; models are compared by the first metric."""
    special = {
        "cola": ("matthews",),
        "mrpc": ("f1", "accuracy"),
        "qqp": ("f1", "accuracy"),
        "stsb": ("pearson", "spearman"),
    }
    for subset in glue.GLUE:
        assert open_task(f"glue/{subset}").metrics == special.get(subset, ("accuracy",)), subset
