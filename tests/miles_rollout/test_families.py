import json

import diffusers
import pytest

from miles_rollout.families import RELEASED, class_name_of, find_adapter
from miles_rollout.loading import TINY_PIPELINES, load_pipeline
from miles_rollout.pipelines import ADAPTERS, GenericAdapter, adapter_for


@pytest.mark.parametrize("name", TINY_PIPELINES)
def test_a_tiny_pipelines_adapter_is_found_by_its_name(name):
    found = find_adapter(name)
    # None is allowed: the family is then known when the pipeline is there.
    assert found is None or type(found) is type(adapter_for(load_pipeline(name)))


@pytest.mark.parametrize(
    "name",
    [
        "tiny-qwen-image",
        "tiny-sd3",
        "tiny-flux",
        "tiny-minimax-h3",
        "tiny-wan",
        "tiny-wan2-2",
        "tiny-z-image",
        "tiny-sana",
        "tiny-hunyuan-video-1-5",
    ],
)
def test_these_are_found(name):
    assert find_adapter(name) is not None


@pytest.mark.parametrize("name", RELEASED)
def test_released_names_are_of_families_with_an_adapter(name):
    assert RELEASED[name] in ADAPTERS
    assert find_adapter(name) is not None
    assert hasattr(diffusers, RELEASED[name])


def test_other_hub_names_say_nothing():
    assert class_name_of("someone/else") is None
    assert find_adapter("someone/else") is None


@pytest.mark.parametrize("index", ["model_index.json", "modular_model_index.json"])
def test_a_folder_says_its_class(tmp_path, index):
    (tmp_path / index).write_text(json.dumps({"_class_name": "FluxPipeline"}))
    assert class_name_of(str(tmp_path)) == "FluxPipeline"
    assert type(find_adapter(str(tmp_path))).__name__ == "FluxAdapter"


def test_a_class_without_an_adapter_and_one_that_is_not_of_diffusers(tmp_path):
    index = tmp_path / "model_index.json"
    index.write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
    assert isinstance(find_adapter(str(tmp_path)), GenericAdapter)
    index.write_text(json.dumps({"_class_name": "MyPipeline"}))
    assert find_adapter(str(tmp_path)) is None
    index.write_text("{}")
    assert find_adapter(str(tmp_path)) is None
