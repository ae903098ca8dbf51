"""Prompts of parquet files and of folders, as `datasets` reads them, without a network."""

import datetime
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.tiny_run import tiny_config, train, trainer_of
from trainers.data import DataError, load_prompts, read_prompts

NAN = math.nan
ROWS = [
    {"prompt": " a cat ", "tag": "x", "include": [{"class": "cat", "count": 2}], "exclude": None},
    {"prompt": "a dog", "tag": "y", "include": [{"class": "dog", "count": 1}], "exclude": ["red"]},
]


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    schema = None if rows else pa.schema([("prompt", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_parquet_file(tmp_path: Path) -> None:
    first, second = load_prompts(parquet(tmp_path / "a.parquet", ROWS))
    assert (first.prompt, first.id, first.line) == (" a cat ", 0, 1)
    assert first.metadata == {"tag": "x", "include": [{"class": "cat", "count": 2}]}
    assert (second.prompt, second.id, second.line) == ("a dog", 1, 2)
    assert second.metadata["exclude"] == ["red"]


def test_a_folder_has_splits(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", [{"input": "a", "metadata": {"rm": "ocr"}}, {"input": "b"}])
    jsonl(tmp_path / "test.jsonl", [{"input": "c"}])
    first, second = load_prompts(f"hf://{tmp_path}")
    assert (first.prompt, first.metadata) == ("a", {"rm": "ocr"})
    assert (second.prompt, second.metadata) == ("b", {})
    assert [r.prompt for r in load_prompts(f"hf://{tmp_path}?split=test")] == ["c"]


def test_a_folder_has_subsets(tmp_path: Path) -> None:
    card = "---\nconfigs:\n"
    for name in ("ocr", "pick"):
        parquet(tmp_path / name / "train.parquet", [{"prompt": name}])
        card += f"- config_name: {name}\n  data_files: {name}/train.parquet\n"
    (tmp_path / "README.md").write_text(card + "---\n")
    for name in ("ocr", "pick"):
        (record,) = load_prompts(f"hf://{tmp_path}?subset={name}&split=train")
        assert record.prompt == name


def test_the_column_can_be_named(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet", [{"caption": "a cat", "prompt": "unused", "n": 3}])
    (record,) = load_prompts(f"hf://{tmp_path}?column=caption")
    assert (record.prompt, record.metadata) == ("a cat", {"prompt": "unused", "n": 3})


def test_a_column_that_is_empty_in_a_row_is_not_given_there(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "input": None}, {"prompt": None, "input": "b"}]
    records = load_prompts(parquet(tmp_path / "a.parquet", rows))
    assert [(r.prompt, r.metadata) for r in records] == [("a", {}), ("b", {})]


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_rows_with_other_keys_are_read_as_their_lines_would_be(tmp_path: Path, kind: str) -> None:
    """In a table each row has every key, and None for those that it lacks."""
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "target": "A", "metadata": {"rm": "ocr", "more": [{"x": 1}, {"y": 2}]}},
        {"prompt": "b", "n": 3, "metadata": {"seed": 5}},
        {"prompt": "c"},
    ]
    jsonl(tmp_path / "lines" / "train.jsonl", rows)
    wanted = [(r.prompt, r.metadata) for r in load_prompts(tmp_path / "lines" / "train.jsonl")]
    every = [{"target": None, "n": None, "metadata": None, **row} for row in rows]
    name = f"hf://{tmp_path}/lines"
    if kind == "parquet":
        name = parquet(tmp_path / "a.parquet", every)
    assert [(r.prompt, r.metadata) for r in load_prompts(name)] == wanted
    assert wanted[0][1]["more"] == [{"x": 1}, {"y": 2}]


def test_columns_that_json_cannot_hold_are_left_out_with_one_warning(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "n": 1, "raw": None, "when": None, "part": 0.5},
        {"prompt": "b", "n": 2, "raw": b"1", "when": datetime.datetime(2026, 1, 1), "part": NAN},
    ]
    path = parquet(tmp_path / "a.parquet", rows)
    with pytest.warns(UserWarning, match="left out") as warned:
        records = load_prompts(path)
    assert [r.metadata for r in records] == [{"n": 1}, {"n": 2}]
    (message,) = [str(w.message) for w in warned]
    assert message.startswith(f"{path}: left out columns that JSON cannot hold, so rewards do not")
    assert all(f"'{name}' (" in message for name in ("part", "raw", "when"))


def test_pictures_of_a_data_set_are_left_out(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    row = {"prompt": ["a"], "image": [Image.new("RGB", (4, 4))]}
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict(row, features=features).to_parquet(path)
    with pytest.warns(UserWarning, match=r"rewards do not see them: 'image' \(pictures or sound\)"):
        (record,) = load_prompts(path)
    assert (record.prompt, record.metadata) == ("a", {})


@pytest.mark.parametrize("folder", ["a", "b[1]*?"])
def test_a_name_is_no_pattern(tmp_path: Path, folder: str) -> None:
    path = parquet(tmp_path / folder / "x[1]*.parquet", [{"prompt": "a"}])
    parquet(tmp_path / folder / "x1.parquet", [{"prompt": "another"}])
    assert [r.prompt for r in load_prompts(path)] == ["a"]


def test_blank_rows_are_skipped_and_told_once(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": None}, {"prompt": " "}, {"prompt": "b"}]
    path = parquet(tmp_path / "a.parquet", rows)
    with pytest.warns(UserWarning, match=r"a\.parquet: skipped 2 blank rows, the first is row 2"):
        file = read_prompts(path)
    assert [(r.prompt, r.id, r.line) for r in file.records] == [("a", 0, 1), ("b", 1, 4)]
    assert (file.blank_lines, file.told) == (2, "2 prompts (2 blank rows skipped)")


def test_pictures_lie_beside_the_table(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    rows = [{"prompt": "a", "inputs": {"image": "a.png"}}, {"prompt": "b", "inputs": None}]
    first, second = load_prompts(parquet(tmp_path / "a.parquet", rows))
    assert first.inputs["image"].getpixel((0, 0)) == (255, 0, 0)
    assert second.inputs == {}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "input": "b"}], "row 1: has both 'prompt' and 'input'"),
        ([{"text": "a"}], "row 1: has no 'prompt'; got keys ['text']; add it"),
        ([{"prompt": 3}], "row 1: 'prompt' must be text that is not blank; got 3"),
        ([{"prompt": b"a"}], "row 1: 'prompt' must be text that is not blank; got b'a'"),
        ([{"prompt": " "}, {"prompt": None}], "holds no prompt; got only blank rows; write one a"),
        ([], "holds no prompt; got a table without rows; write one a row"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    path = parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}: {message}')}"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?split=tst", "cannot be read; got ValueError: Bad split: tst"),
        ("?slit=test", "no such option of a data set; got 'slit'; did you mean split?; known are"),
        ("?split=a&split=b", "not the name of a data set; got 'split=a&split=b' behind"),
        ("?split=", "not the name of a data set"),
        ("?split", "not the name of a data set"),
        ("?column=text", "row 1: has no 'text'; got keys ['prompt']; name another column"),
        ("?revision=main", "revision has no effect on a folder; got 'main'; leave it out"),
    ],
)
def test_a_bad_name_is_told(tmp_path: Path, query: str, message: str) -> None:
    jsonl(tmp_path / "train.jsonl", [{"prompt": "a"}])
    with pytest.raises(DataError, match=f"^{re.escape(f'hf://{tmp_path}{query}: {message}')}"):
        load_prompts(f"hf://{tmp_path}{query}")


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read: no such file; set another"):
        load_prompts(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"^hf://: not the name of a data set"):
        load_prompts("hf://")
    (tmp_path / "b.parquet").write_text("no table")
    with pytest.raises(DataError, match=r"b\.parquet: cannot be read; got \w+: "):
        load_prompts(tmp_path / "b.parquet")


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"hf://x/y: needs datasets, .*miles-rollout\[datasets\]"):
        load_prompts("hf://x/y")


def test_the_hub_is_asked_with_all_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        asked.append((args, kwargs))
        return [{"input": "a", "inputs": "a.png"}] if len(asked) == 2 else [{"input": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (record,) = load_prompts("hf://owner/name?subset=ocr&split=test&revision=v1")
    assert record.prompt == "a"
    assert asked == [(("owner/name", "ocr"), {"split": "test", "revision": "v1"})]
    with pytest.raises(DataError, match="row 1: 'inputs' names pictures beside the file, and a"):
        load_prompts("hf://owner/name")


def test_a_run_trains_on_a_table(tmp_path: Path) -> None:
    rows = [{"input": f"a {colour} circle"} for colour in ("red", "green", "blue")]
    path = parquet(tmp_path / "a.parquet", rows)
    config = tiny_config(tmp_path / "run", f"data.train={path}", "iterations=1")
    metrics = train(trainer_of(config))
    assert metrics[0]["train/ratio_abs_minus_1"] == 0
