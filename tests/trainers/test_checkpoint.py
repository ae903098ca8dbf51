import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainers import checkpoint
from trainers.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    prune,
    save_checkpoint,
)

TENSORS = {
    "adapter": {"a.lora_A": torch.arange(6.0).reshape(2, 3), "a.lora_B": torch.ones(3, 2)},
    "optimizer": {"a:step": torch.tensor(3.0), "count": torch.tensor([2**60])},
}
STATE = {"iteration": 3, "lr": 0.1 + 0.2, "name": "x", "nested": {"list": [1, None, True]}}


def _same_tensors(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        one[g].keys() == other[g].keys()
        and all(
            one[g][n].dtype == other[g][n].dtype
            and one[g][n].contiguous().view(torch.uint8).equal(other[g][n].view(torch.uint8))
            if one[g][n].ndim
            else one[g][n].dtype == other[g][n].dtype and one[g][n].equal(other[g][n])
            for n in one[g]
        )
        for g in one
    )


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    tensors: dict[str, dict[str, Tensor]] = {
        **TENSORS,
        "odd": {
            "bf16": torch.tensor([0.1, -0.0, float("nan"), float("inf")]).bfloat16(),
            "strided": torch.arange(12.0).reshape(3, 4).t(),
            "view": torch.arange(12.0)[3:5],
            "bool": torch.tensor([True, False]),
            "grad": torch.ones(2, requires_grad=True),
        },
        "empty": {},
    }
    folder = save_checkpoint(checkpoint_folder(tmp_path, 12), tensors, STATE)
    assert folder == tmp_path / "iteration_000012"
    loaded, state = load_checkpoint(folder)
    assert _same_tensors(
        {g: {n: t.detach() for n, t in m.items()} for g, m in tensors.items()}, loaded
    )
    assert state == STATE
    assert (folder / "odd.safetensors").stat().st_size < 1000


def test_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "one", TENSORS, STATE)
    other = save_checkpoint(tmp_path / "other", TENSORS, STATE)
    names = sorted(path.name for path in one.iterdir())
    assert names == ["adapter.safetensors", "optimizer.safetensors", "state.json"]
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_saving_again_replaces_everything(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "iteration_000001", TENSORS, STATE)
    save_checkpoint(folder, {"adapter": {"b": torch.zeros(1)}}, {"iteration": 4})
    tensors, state = load_checkpoint(folder)
    assert list(tensors) == ["adapter"]
    assert state == {"iteration": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_000001"]


@pytest.mark.parametrize("name", ["adapter.safetensors", "state.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "iteration_000002", TENSORS, STATE)
    folder = save_checkpoint(tmp_path / "iteration_000003", TENSORS, STATE)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} is missing.*another one \(iteration_0+2\)"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_is_found(tmp_path: Path, name: str, damage: str) -> None:
    path = save_checkpoint(tmp_path / "iteration_000003", TENSORS, STATE) / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        # In state.json this is a digit of the learning rate: still valid JSON.
        place = content.index(b"0.30") + 3 if name == "state.json" else len(content) - 1
        content[place] ^= 1
    else:
        del content[-7:]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged; got .*there is no other one"):
        load_checkpoint(path.parent)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"iteration_000009: state\.json is missing"):
        load_checkpoint(tmp_path / "iteration_000009")


def test_another_schema_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_checkpoint(tmp_path / "iteration_000003", TENSORS, STATE)
    monkeypatch.setattr(checkpoint, "SCHEMA_VERSION", 2)
    with pytest.raises(CheckpointError, match="another schema than 2; got 1"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"good": 1, "betas": (0.9, 0.999)}, r"got \{'betas': \(0\.9, 0\.999\)\}; set lists"),
        ({"best": float("-inf")}, "best.*finite"),
        ({"milestones": {3: 1}}, "milestones.*string keys"),
        ({"weight": torch.ones(1)}, "weight.*tensors argument"),
    ],
)
def test_state_that_json_would_change_is_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "iteration_000001", TENSORS, state)
    assert not list(tmp_path.iterdir())


def test_a_group_name_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got \['\.\./adapter'\]"):
        save_checkpoint(tmp_path / "iteration_000001", {"../adapter": {}}, STATE)


def test_other_library_versions_give_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    versions = checkpoint.library_versions()
    monkeypatch.setattr(
        checkpoint, "library_versions", lambda: {**versions, "torch": "1.0", "peft": "0.1"}
    )
    folder = save_checkpoint(tmp_path / "iteration_000003", TENSORS, STATE)
    with caplog.at_level(logging.WARNING):
        load_checkpoint(folder)
    (record,) = caplog.records
    message = record.getMessage()
    assert f"peft 0.1 (here {versions['peft']}), torch 1.0 (here {versions['torch']})" in message
    assert "diffusers" not in message
    assert json.loads((folder / "state.json").read_text())["versions"].keys() == versions.keys()


def test_latest_goes_by_number_and_ignores_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nothing") is None
    for name in (".saving-iteration_000099", "iteration_000098.bak", "best"):
        (tmp_path / name).mkdir()
    assert latest_checkpoint(tmp_path) is None
    for iteration in (2, 10, 9, 1_000_000):
        save_checkpoint(checkpoint_folder(tmp_path, iteration), {}, {})
    assert latest_checkpoint(tmp_path) == tmp_path / "iteration_1000000"
    assert not (tmp_path / ".saving-iteration_000099").exists()


def test_prune_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    folders = [save_checkpoint(checkpoint_folder(tmp_path, i), TENSORS, STATE) for i in range(6)]
    (tmp_path / "best").mkdir()
    removed = prune(tmp_path, keep=2, protect={folders[1]})
    assert removed == [folders[0], folders[2], folders[3]]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"best", "iteration_000001", "iteration_000004", "iteration_000005"}
    with pytest.raises(CheckpointError, match="got keep 0; set 1 or more"):
        prune(tmp_path, keep=0)


def test_a_replacement_that_died_half_way_is_undone(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "iteration_000003", TENSORS, STATE)
    aside = tmp_path / ".replaced-iteration_000003"
    folder.rename(aside)
    assert latest_checkpoint(tmp_path) == folder
    folder.rename(aside)
    assert load_checkpoint(folder)[1] == STATE
    folder.rename(aside)
    save_checkpoint(tmp_path / "iteration_000004", TENSORS, STATE)
    assert load_checkpoint(folder)[1] == STATE


WRITER = """
import itertools, sys, torch
from pathlib import Path
from trainers.checkpoint import save_checkpoint
torch.set_num_threads(1)
root = Path(sys.argv[1])
for i in itertools.count():
    tensors = {g: {"x": torch.full((20_000,), float(i))} for g in ("adapter", "optimizer")}
    save_checkpoint(root / "iteration_000001", tensors, {"i": i})
    save_checkpoint(root / f"iteration_{2 + i % 2:06d}", tensors, {"i": i})
    print(i, flush=True)
"""


def test_sigkill_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    delays = random.Random(0)
    root, seen = tmp_path / "root", tmp_path / "seen"
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(25):
            # One process, many moments: what a stopped one has written is what a kill would leave.
            time.sleep(delays.random() * 0.02)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            _check_whole(shutil.copytree(root, seen))
            shutil.rmtree(seen)
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()
        _check_whole(root)
    save_checkpoint(root / "iteration_000009", TENSORS, STATE)
    assert all(path.name.startswith("iteration_") for path in root.iterdir())


def _check_whole(root: Path) -> None:
    assert latest_checkpoint(root) is not None
    for name in ("iteration_000001", "iteration_000002"):
        tensors, state = load_checkpoint(root / name)
        assert all((group["x"] == state["i"]).all() for group in tensors.values())
