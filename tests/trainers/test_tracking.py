import logging
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
import wandb
from PIL import Image
from wandb.sdk import wandb_run

from miles_rollout import Media
from tests.wandb_reader import read_run, run_folders
from trainers.samples import Sample
from trainers.tracking import Tracker, TrackingConfig, TrackingError
from trainers.versions import library_versions

OFF = TrackingConfig(wandb="disabled")


@pytest.fixture(autouse=True)
def _wandb_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def _lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def _sample(value: float = 0.5, prompt: str = "a cat") -> Sample:
    media = Media(image=torch.full((3, 16, 16), value))
    return Sample(media=media, prompt=prompt, reward=0.25)


def test_one_line_an_iteration_with_iteration_first_and_sorted_keys(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker:
        tracker.log(0, {"train/loss": 0.1, "eval/reward/mean": 1})
        tracker.log(2, {"b": torch.tensor(0.1), "a": np.float32(0.1), "c": None, "d": 0.1 + 0.2})
    assert _lines(tmp_path) == [
        '{"iteration": 0, "eval/reward/mean": 1, "train/loss": 0.1}',
        '{"iteration": 2, "a": 0.10000000149011612, "b": 0.10000000149011612, "c": null, '
        '"d": 0.30000000000000004}',
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, OFF, {})
    tracker.log(0, {"a": 1.0})
    assert len(_lines(tmp_path)) == 1
    tracker.close()


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker:
        tracker.log(0, {"a": math.nan, "b": torch.tensor(math.inf), "c": -math.inf})
    assert _lines(tmp_path) == ['{"iteration": 0, "a": null, "b": null, "c": null}']


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": torch.ones(2)}, r"got 'loss': Tensor; set a mean"),
        ({"iteration": 1}, r"other than 'iteration'"),
    ],
)
def test_what_is_not_a_number_is_refused(tmp_path: Path, metrics: Any, message: str) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker, pytest.raises(TrackingError, match=message):
        tracker.log(0, metrics)


def test_a_second_call_for_an_iteration_is_refused(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker:
        tracker.log(3, {"a": 1.0})
        with pytest.raises(TrackingError, match=r"iteration 3 after 3; pass all metrics"):
            tracker.log(3, {"b": 1.0})


def test_another_runs_metrics_are_not_appended_to(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker:
        tracker.log(0, {"a": 1.0})
    with pytest.raises(TrackingError, match=r"holds another run.*set resume"):
        Tracker(tmp_path, OFF, {})


@pytest.mark.parametrize("torn", [b"", b'{"iteration": 4, "tr', b"{", b'{"iteration": 9}'])
def test_resume_cuts_back_and_tolerates_a_torn_last_line(tmp_path: Path, torn: bytes) -> None:
    with Tracker(tmp_path, OFF, {}) as tracker:
        for iteration in range(4):
            tracker.log(iteration, {"a": iteration / 3})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    with Tracker(tmp_path, OFF, {}, resume_from=2) as tracker:
        assert _lines(tmp_path) == whole.decode().splitlines()[:2]
        for iteration in range(2, 4):
            tracker.log(iteration, {"a": iteration / 3})
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n{"iteration": 1}')
    with Tracker(tmp_path, OFF, {}, resume_from=2) as tracker:
        tracker.log(2, {})
    assert _lines(tmp_path) == ['{"iteration": 0}', '{"iteration": 1}', '{"iteration": 2}']


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n{"itera\n{"iteration": 2}\n')
    with pytest.raises(TrackingError, match="line 2 is not a metrics line"):
        Tracker(tmp_path, OFF, {}, resume_from=2)


def test_resume_of_a_run_that_never_logged(tmp_path: Path) -> None:
    with Tracker(tmp_path, OFF, {}, resume_from=0) as tracker:
        tracker.log(0, {})
    assert len(_lines(tmp_path)) == 1


def test_only_the_main_rank_writes(tmp_path: Path) -> None:
    with Tracker(tmp_path / "run", TrackingConfig(), {}, is_main=False) as tracker:
        tracker.log(0, {"a": 1.0}, samples={"x": [_sample()]})
        assert not tracker.wants_media(0)
    assert not list(tmp_path.iterdir())


def test_offline_wandb_holds_what_was_logged(tmp_path: Path) -> None:
    config = TrackingConfig(project="p", name="n", group="g", tags=("t",), num_media=2)
    ratios = torch.tensor([0.9, 1.0, 1.1, math.nan])
    with Tracker(tmp_path, config, {"seed": 7, "lora": {"rank": 4}}) as tracker:
        for iteration in (3, 4):
            tracker.log(
                iteration,
                {"train/loss": 0.5, "rollout/log_prob/image/step_3": -1.5, "bad": math.nan},
                histograms={"train/ratio": ratios, "empty": torch.tensor([math.nan])},
                samples={"samples/train": [_sample(v, "p" * 300) for v in (0.1, 0.5, 0.9)]},
            )
    (folder,) = run_folders(tmp_path)
    run = read_run(folder)
    assert [row["iteration"] for row in run.history] == [3, 4]
    row = run.history[0]
    assert row["train/loss"] == 0.5
    assert row["rollout/log_prob/image/step_3"] == -1.5
    assert "bad" in row
    assert "empty" not in row
    assert sum(row["train/ratio"]["values"]) == 3
    assert row["samples/train"]["count"] == 2
    assert row["samples/train"]["captions"] == ["p" * 160 + " | 0.2500"] * 2
    logged = {key for key in row if not key.startswith("_")} - {"iteration"}
    assert {key: run.step_metrics[key] for key in logged} == dict.fromkeys(logged, "iteration")
    assert run.step_metrics["*"] == "iteration"
    assert (run.info.project, run.info.display_name, run.info.run_group) == ("p", "n", "g")
    assert list(run.info.tags) == ["t"]
    assert run.config["seed"] == 7
    assert run.config["lora"] == {"rank": 4}
    assert run.config["versions"] == library_versions()
    assert run.exit_code == 0
    assert len(list((folder / "files/media/images/samples").glob("*.png"))) == 4
    assert wandb.run is None


def test_a_resumed_run_is_a_fresh_one_in_the_same_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a sweep or a restarted job sets it.
    monkeypatch.setenv("WANDB_RUN_ID", "fixed")
    monkeypatch.setenv("WANDB_RESUME", "allow")
    for resume_from in (None, 1):
        with Tracker(tmp_path, TrackingConfig(), {}, resume_from=resume_from) as tracker:
            tracker.log(resume_from or 0, {"a": 1.0})
    runs = [read_run(folder) for folder in run_folders(tmp_path)]
    assert len(runs) == 2
    assert len({run.info.run_id for run in runs}) == 2
    assert {run.info.run_group for run in runs} == {tmp_path.name}
    assert sorted(run.config.get("resumed_from", -1) for run in runs) == [-1, 1]


def test_an_exception_marks_the_run_as_failed_and_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="training"), Tracker(tmp_path, TrackingConfig(), {}):
        raise KeyError("training")
    (folder,) = run_folders(tmp_path)
    assert read_run(folder).exit_code == 1


def test_close_can_be_called_twice(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, TrackingConfig(), {})
    tracker.close()
    tracker.close()


def _break(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no network")

    if where == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    elif where == "init":
        monkeypatch.setattr(wandb, "init", fail)
    else:
        monkeypatch.setattr(wandb_run.Run, {"log": "log", "finish": "finish"}[where], fail)


@pytest.mark.parametrize("where", ["import", "init", "log", "finish"])
def test_wandb_failures_cost_one_warning_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    with monkeypatch.context() as patch:
        _break(patch, where)
        with Tracker(tmp_path, TrackingConfig(), {}) as tracker:
            for iteration in range(3):
                tracker.log(iteration, {"a": 1.0})
    assert len(_lines(tmp_path)) == 3
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "W&B is off from here on, metrics.jsonl is not" in record.getMessage()


def test_disabled_does_without_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _break(monkeypatch, "import")
    with Tracker(tmp_path, OFF, {}) as tracker:
        tracker.log(0, {"a": 1.0})
    assert not caplog.records


def test_contact_sheets_go_to_samples(tmp_path: Path) -> None:
    config = TrackingConfig(wandb="disabled", num_media=3, media_every=5)
    with Tracker(tmp_path, config, {}) as tracker:
        assert [i for i in range(11) if tracker.wants_media(i)] == [0, 5, 10]
        tracker.log(5, {}, samples={"rollout/best": [_sample()] * 4, "none": []})
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "iteration_000005_rollout_best.png"
    with Image.open(path) as sheet:
        cells = sheet.width // 2
        assert sheet.getpixel((cells // 2, 40)) == (128, 128, 128)
        # Three images in a grid of 2 x 2: the last cell is empty.
        assert sheet.getpixel((cells * 3 // 2, sheet.height // 2 + 40)) == (255, 255, 255)


@pytest.mark.parametrize("key", ["media_every", "num_media"])
def test_wrong_numbers_say_what_to_set(key: str) -> None:
    with pytest.raises(TrackingError, match=rf"tracking\.{key}: .*got -1; set"):
        TrackingConfig(**{key: -1})  # type: ignore[arg-type]


def test_config_comes_from_yaml_trees_and_refuses_unknown_keys() -> None:
    adapter = pydantic.TypeAdapter(TrackingConfig)
    assert adapter.validate_python({"tags": ["x"], "media_every": 0}) == TrackingConfig(
        tags=("x",), media_every=0
    )
    with pytest.raises(pydantic.ValidationError, match="wandb"):
        adapter.validate_python({"wandb": "offlin"})
