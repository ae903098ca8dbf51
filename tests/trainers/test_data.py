from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainers.data import DataError, PromptRecord, PromptSampler, load_prompts, read_prompts
from trainers.prompt_inputs import InputError, inputs_of


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(data: str | bytes, name: str = "a.txt") -> str:
        Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
        return name

    return write


def test_text_lines_are_kept_to_the_last_space(write):
    prompts = [r.prompt for r in load_prompts(write(" a\tcat \r\n\tb\u2028\x0bc  d\nlast"))]
    assert prompts == [" a\tcat ", "\tb\u2028\x0bc  d", "last"]


def test_the_last_line_may_or_may_not_end(write):
    assert load_prompts(write("a\nb\n")) == load_prompts(write("a\nb", "b.txt"))


def test_equal_prompts_stay_separate_records(write):
    assert load_prompts(write("a\nb\na\n")) == [
        PromptRecord(prompt="a", id=0, line=1),
        PromptRecord(prompt="b", id=1, line=2),
        PromptRecord(prompt="a", id=2, line=3),
    ]


def test_blank_lines_are_skipped_and_told_once(write):
    message = r"a\.txt: skipped 3 blank lines, the first is line 2"
    with pytest.warns(UserWarning, match=message) as caught:
        records = load_prompts(write("a\n\n  \t\nb\n\r\n"))
    assert len(caught) == 1
    assert [(r.prompt, r.id, r.line) for r in records] == [("a", 0, 1), ("b", 1, 4)]


def test_a_byte_order_mark_is_no_part_of_the_prompt(write):
    assert load_prompts(write(b"\xef\xbb\xbfa\n"))[0].prompt == "a"
    assert load_prompts(write(b'\xef\xbb\xbf{"prompt": "a"}', "a.jsonl"))[0].prompt == "a"


def test_jsonl_keeps_the_prompt_and_free_metadata(write):
    lines = '{"prompt": " a\\n\u00e9 ", "tag": "x", "include": [{"n": 1}]}\n'
    lines += '{"prompt": "b", "n": 1, "metadata": {"target": "T"}}\n'
    first, second = load_prompts(write(lines, "a.jsonl"))
    assert first.prompt == " a\n\u00e9 "
    assert first.metadata == {"tag": "x", "include": [{"n": 1}]}
    assert second.metadata == {"n": 1, "target": "T"}


def test_skipped_lines_are_counted(write):
    with pytest.warns(UserWarning, match="skipped 2 blank lines"):
        file = read_prompts(write("a\n\nb\n\n\n"[:-1]))
    assert (file.source, file.blank_lines, len(file.records)) == ("a.txt", 2, 2)
    assert file.told == "2 prompts (2 blank lines skipped)"
    assert read_prompts(write("a\nb", "b.txt")).told == "2 prompts"


def test_a_row_of_the_geneval_benchmark(write):
    include = [{"class": "bench", "count": 1}, {"class": "tv", "count": 1, "color": "red"}]
    row = {"tag": "two_object", "include": include, "prompt": "a photo of a bench and a red tv"}
    (record,) = load_prompts(write(json.dumps(row), "metadata.jsonl"))
    assert record.prompt == "a photo of a bench and a red tv"
    assert record.metadata == {"tag": "two_object", "include": include}


def test_the_text_may_be_called_input_and_have_its_metadata_nested(write):
    lines = (
        '{"input": "a sign that says \\"NO\\"", "metadata": {"rm_type": "ocr"}}\n{"input": "b"}\n'
    )
    first, second = load_prompts(write(lines, "a.jsonl"))
    assert (first.prompt, first.metadata) == ('a sign that says "NO"', {"rm_type": "ocr"})
    assert (second.prompt, second.metadata) == ("b", {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"prompt": "a", "input": "b"}',
            "a.jsonl:2: has both 'prompt' and 'input', and one of them is the text; got 'prompt' "
            "'a', 'input' 'b'; keep one",
        ),
        ('{"input": 3}', "a.jsonl:2: 'input' must be text that is not blank; got 3"),
        ('{"prompt": "a"', "a.jsonl:2: not valid JSON; got "),
        ("a prompt", "a.jsonl:2: not valid JSON; got "),
        ('{"prompt": "a", "x": NaN}', "a.jsonl:2: not valid JSON; got NaN, which is not JSON"),
        ('{"prompt": "a", "prompt": "b"}', "a.jsonl:2: not valid JSON; got key 'prompt' twice"),
        (
            "[" * 100_000,
            f"a.jsonl:2: not valid JSON; got {'[' * 80}, nested too deeply; write one object a line",
        ),
        ('["a"]', 'a.jsonl:2: must be an object; got ["a"]'),
        ('{"promt": "a", "b": 1}', "a.jsonl:2: has no 'prompt'; got keys ['b', 'promt']; add it"),
        ('{"prompt": 3}', "a.jsonl:2: 'prompt' must be text that is not blank; got 3"),
        ('{"prompt": null}', "a.jsonl:2: 'prompt' must be text that is not blank; got None"),
        (
            '{"prompt": " "}',
            "a.jsonl:2: 'prompt' must be text that is not blank; got ' '; write a prompt",
        ),
        (
            '{"prompt": "\\ud800"}',
            "a.jsonl:2: 'prompt' holds half of a surrogate pair; got '\\ud800'; write the letter",
        ),
        ('{"prompt": "a", "metadata": 3}', "a.jsonl:2: 'metadata' must be an object with"),
        ('{"prompt": "a", "x": 1, "metadata": {"x": 2}}', "a.jsonl:2: 'metadata' must be an"),
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_json_line_is_named(write, line, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        load_prompts(write(f'{{"prompt": "good"}}\n{line}\n', "a.jsonl"))


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        ("", "a.txt", "a.txt: holds no prompt; got only blank lines; write one a line"),
        (" \n\n", "a.txt", "a.txt: holds no prompt; got only blank lines"),
        (b"a\nb\xff\n", "a.txt", "a.txt:2: not UTF-8; got byte 0xff at column 2; save"),
        ("a", "a.csv", "a.csv: unknown kind of file; got '.csv'; name it .txt"),
        ("a", "a", "a: unknown kind of file; got ''"),
    ],
)
def test_a_bad_file_is_named(write, data, name, message):
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        load_prompts(write(data, name))


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"^none\.txt: cannot be read; got No such file"):
        load_prompts("none.txt")


sizes = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.integers(0, 2**62), st.integers(1, 40))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_prompts_are_used_equally_often_and_never_twice_at_once(sizes, seed, iterations):
    num_records, per_iteration = sizes
    sampler = PromptSampler(num_records, per_iteration, seed)
    drawn = [sampler.indices(i) for i in range(iterations)]
    assert all(len(set(indices)) == per_iteration for indices in drawn)
    flat = [index for indices in drawn for index in indices]
    for start in range(0, len(flat) - num_records + 1, num_records):
        assert sorted(flat[start : start + num_records]) == list(range(num_records))
    counts = Counter(flat)
    assert max(counts.values()) - min(counts[i] for i in range(num_records)) <= 1


@given(sizes, st.lists(st.integers(0, 60), max_size=10))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_iteration_alone_is_what_the_sequence_gives(sizes, wanted):
    sequence = PromptSampler(*sizes, seed=1)
    drawn = [sequence.indices(i) for i in range(61)]
    jumping = PromptSampler(*sizes, seed=1)
    assert [jumping.indices(i) for i in wanted] == [drawn[i] for i in wanted]
    for iteration in wanted:
        assert PromptSampler(*sizes, seed=1).indices(iteration) == drawn[iteration]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {PromptSampler(8, 8, seed).indices(epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_does_not_depend_on_hash_seed_or_global_rng():
    code = (
        "import random, sys\n"
        "from trainers.data import PromptSampler\n"
        "random.seed(int(sys.argv[1]))\n"
        "state = random.getstate()\n"
        "print([PromptSampler(10, 4, 7).indices(i) for i in range(6)])\n"
        "assert random.getstate() == state"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "1"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    sampler = PromptSampler(10, 4, 7)
    assert done.stdout == f"{[sampler.indices(i) for i in range(6)]}\n"


def test_a_batch_that_the_data_cannot_fill_is_refused():
    with pytest.raises(DataError, match="got 5 for 4 prompts; set at most 4 or add prompts"):
        PromptSampler(4, 5, 0)
    with pytest.raises(DataError, match="prompts_per_iteration: must be positive; got 0"):
        PromptSampler(4, 0, 0)
    with pytest.raises(DataError, match="must not be negative; got -1; count from 0"):
        PromptSampler(4, 2, 0).indices(-1)


def test_pictures_are_read_from_beside_the_file(write, tmp_path):
    for name, colour in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGBA", (4, 4), colour).save(tmp_path / name)
    line = '{"prompt": "a", "inputs": {"image": "a.png", "references": ["a.png", "b.png"]}}\n'
    first, second = load_prompts(write(line + '{"prompt": "b"}\n', "a.jsonl"))
    image, references = first.inputs["image"], first.inputs["references"]
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 0, 0))
    assert [picture.getpixel((0, 0)) for picture in references] == [(255, 0, 0), (0, 0, 255)]
    assert second.inputs == {}
    # Rewards of edits may look at them, too.
    assert first.metadata == {"inputs": {"image": "a.png", "references": ["a.png", "b.png"]}}
    assert inputs_of([first, second]) == [first.inputs, {}]
    assert inputs_of([second]) is None


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ('"a.png"', "a.jsonl:1: 'inputs' must be an object of paths; got 'a.png'; write"),
        ('{"image": 3}', "a.jsonl:1: inputs.image: must be a path or a list of them; got 3"),
        ('{"image": ["x.png"]}', "a.jsonl:1: inputs.image: no picture can be read; got '"),
        ('{"image": "a.jsonl"}', "a.jsonl:1: inputs.image: no picture can be read; got '"),
    ],
)
def test_inputs_that_cannot_be_read_are_named(write, inputs, message):
    with pytest.raises(InputError, match=re.escape(message)):
        load_prompts(write(f'{{"prompt": "a", "inputs": {inputs}}}', "a.jsonl"))
