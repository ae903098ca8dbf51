"""Pipelines by name: folders of standard and of modular pipelines, and what is said of others."""

import json
import subprocess
import sys

import pytest
import torch

from miles_rollout import RolloutEngine, RolloutParams, RolloutParamsError
from miles_rollout.loading import check_pipeline_name, load_pipeline
from miles_rollout.testing import tiny_minimax_h3
from tests.miles_rollout.tiny_h3 import NAMES, call, keyframes, references

# diffusers' audio VAE, as it is made.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


@pytest.fixture(name="saved", scope="module")
def _saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("h3")
    tiny_minimax_h3().save_pretrained(str(folder), overwrite_modular_index=True)
    return folder


@pytest.fixture(name="loaded", scope="module")
def _loaded(saved):
    return load_pipeline(str(saved))


@pytest.mark.parametrize("inputs", [dict, keyframes, references])
def test_a_modular_pipeline_is_the_same_after_a_round_trip(loaded, inputs):
    theirs, ours = (call(pipe, **inputs()) for pipe in (tiny_minimax_h3(), loaded))
    for name in NAMES:
        assert torch.equal(ours[name], theirs[name]), name


def test_a_modular_pipeline_is_cast_as_it_is_loaded(saved):
    half = load_pipeline(str(saved), torch.bfloat16)
    theirs, ours = (
        call(pipe, output=NAMES[:2]) for pipe in (tiny_minimax_h3(dtype=half.dtype), half)
    )
    assert half.transformer.dtype == torch.bfloat16
    for name in NAMES[:2]:
        assert torch.equal(ours[name], theirs[name]), name


def test_the_engine_loads_a_folder_and_one_workflow_of_it(saved):
    engine = RolloutEngine.from_pretrained(str(saved), workflow="ref2va")
    assert not hasattr(engine.pipe, "transformer")
    size = {"height": 32, "width": 32, "num_frames": 124, "num_inference_steps": 3, "seed": 0}
    given = {"inputs": [references()], "decode": False, **size}
    (batch,) = engine.generate(["a cat"], 1, RolloutParams(), **given)
    (whole,) = RolloutEngine(tiny_minimax_h3()).generate(["a cat"], 1, RolloutParams(), **given)
    for name in ("video", "audio"):
        assert torch.equal(batch.latents[name], whole.latents[name])
    assert torch.equal(
        engine.replay(batch.trajectory, 1).log_prob, whole.trajectory.log_probs[:, 1]
    )
    with pytest.raises(RolloutParamsError, match="was loaded for ref2va alone; got a t2va request"):
        engine.generate(["a cat"], 1, RolloutParams(), **size)


def test_nothing_shows_a_progress_bar(loaded, capfd):
    call(loaded, output=NAMES[:2])
    assert capfd.readouterr().err == ""


def test_another_process_finds_the_classes_of_the_tiny_ones(saved):
    code = (
        "import sys\nfrom miles_rollout.loading import load_pipeline\n"
        "print(type(load_pipeline(sys.argv[1]).processor).__name__)"
    )
    run = [sys.executable, "-c", code, str(saved)]
    found = subprocess.run(run, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "TinyQwen3VLProcessor"


def test_a_part_that_cannot_be_loaded_is_named(saved, tmp_path):
    index = json.loads((saved / "modular_model_index.json").read_text())
    index["vae"][2]["pretrained_model_name_or_path"] = str(tmp_path)
    (tmp_path / "modular_model_index.json").write_text(json.dumps(index))
    with pytest.raises(RolloutParamsError, match=r"not all of it could be loaded; got no vae from"):
        load_pipeline(str(tmp_path))


def test_a_part_that_was_not_saved_is_left_out(tmp_path):
    pipe = tiny_minimax_h3()
    pipe.update_components(transformer_ref=None)
    pipe.save_pretrained(str(tmp_path), overwrite_modular_index=True)
    index = json.loads((tmp_path / "modular_model_index.json").read_text())
    assert index["transformer_ref"][2]["pretrained_model_name_or_path"] is None
    assert load_pipeline(str(tmp_path)).transformer_ref is None


@pytest.mark.parametrize(
    "load", [check_pipeline_name, load_pipeline, RolloutEngine.from_pretrained]
)
def test_a_folder_without_a_pipeline_is_told_in_one_line(tmp_path, load):
    message = (
        r"^pipeline: the folder holds no model_index.json and no modular_model_index.json; .*$"
    )
    with pytest.raises(RolloutParamsError, match=message):
        load(str(tmp_path))


def test_a_damaged_index_is_told(tmp_path):
    for text in ("{", "[]"):
        (tmp_path / "modular_model_index.json").write_text(text)
        with pytest.raises(RolloutParamsError, match=r"modular_model_index.json is damaged; got"):
            load_pipeline(str(tmp_path))


def test_a_name_that_is_nowhere_is_looked_up_as_both_kinds(monkeypatch):
    asked = []

    def lookup(cls, name, **_):
        asked.append((cls.__name__, name))
        raise OSError("not there")

    for kind in ("DiffusionPipeline", "ModularPipeline"):
        monkeypatch.setattr(f"miles_rollout.loading.{kind}.load_config", classmethod(lookup))
    loader = "miles_rollout.loading.DiffusionPipeline.from_pretrained"
    monkeypatch.setattr(loader, classmethod(lookup))
    with pytest.raises(OSError, match="not there"):
        load_pipeline("nobody/nothing")
    kinds = ["DiffusionPipeline", "ModularPipeline", "DiffusionPipeline"]
    assert asked == [(kind, "nobody/nothing") for kind in kinds]


def test_a_name_of_a_modular_pipeline_alone_is_loaded_as_one(monkeypatch):
    asked = []

    def known(cls, name, **how):
        asked.append((cls.__name__, name, how))
        if cls.__name__ == "DiffusionPipeline":
            raise OSError("not there")
        if "workflow" in how:
            raise InterruptedError
        return {}

    for kind in ("DiffusionPipeline", "ModularPipeline"):
        monkeypatch.setattr(f"miles_rollout.loading.{kind}.load_config", classmethod(known))
    loader = "miles_rollout.loading.ModularPipeline.from_pretrained"
    monkeypatch.setattr(loader, classmethod(known))
    how = {"workflow": "t2va", "revision": "main", "token": "x", "torch_dtype": torch.bfloat16}
    with pytest.raises(InterruptedError):
        RolloutEngine.from_pretrained("org/model", **how)
    hub = {"revision": "main", "token": "x"}
    assert asked == [
        ("DiffusionPipeline", "org/model", hub),
        ("ModularPipeline", "org/model", hub),
        ("ModularPipeline", "org/model", {**hub, "workflow": "t2va"}),
    ]
