"""The docs are true: generated pages are current, worked examples run, links and modules exist."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from miles_rollout import check
from miles_rollout.loading import check_pipeline_name
from miles_rollout.pipelines import ADAPTERS, PipelineAdapter
from tests.miles_rollout.models import MODELS
from trainers.config import TrainConfig
from trainers.config_docs import render, undocumented
from trainers.config_loader import ConfigError, load, to_tree, to_yaml
from trainers.rewards import REWARDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]


def python_blocks(page: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return "\n\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture
def import_as(tmp_path, monkeypatch):
    """Import source as a module of a temporary folder; dataclasses want a real one."""
    names: list[str] = []

    def load_module(name: str, source: str):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        names.append(name)
        return importlib.import_module(name)

    yield load_module
    for name in names:
        sys.modules.pop(name, None)


def test_the_config_page_is_what_its_generator_prints():
    page = (ROOT / "docs" / "config.md").read_text()
    assert page == render(), "run: python -m trainers.config_docs > docs/config.md"


def test_every_key_of_the_config_has_a_meaning():
    assert undocumented() == []


def test_the_config_page_names_every_key_of_a_resolved_config():
    page = render()

    def check(tree, prefix):
        for name, value in tree.items():
            key = f"{prefix}{name}"
            assert f"| `{key}` |" in page
            if isinstance(value, dict):
                check(value, f"{key}.")

    check(to_tree(load(TrainConfig, [])), "")


def test_what_the_config_page_says_of_overrides_and_files(tmp_path):
    tiny = ROOT / "configs" / "qwen_image" / "tiny_cpu.yaml"
    overrides = [
        "optim.lr=3e-4",
        "rollout.negative_prompt=null",
        "model.lora={rank: 8}",
        "model.gradient_checkpointing=1",
        "output_dir=7",
        "rewards=[{name: jpeg_compressibility}]",
        "rewards.0.weight=2",
    ]
    config = load(TrainConfig, [tiny], overrides)
    assert (config.optim.lr, config.rollout.negative_prompt) == (3e-4, None)
    assert config.model.lora is not None
    assert config.model.lora.rank == 8
    assert (config.model.gradient_checkpointing, config.output_dir) == (True, "7")
    assert [(r.name, r.weight) for r in config.rewards] == [("jpeg_compressibility", 2.0)]
    window = "rollout.window={type: random, size: 2}"
    assert load(TrainConfig, [], [window]).rollout.window.type == "random"
    with pytest.raises(ConfigError, match=r"rollout\.window\.steps: no such key"):
        load(TrainConfig, [tiny], [window])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(TrainConfig, [tmp_path / "config.yaml"]) == config


def test_the_worked_reward_scores_and_is_found_by_its_path(import_as):
    import_as("my_rewards", python_blocks("rewards.md"))


def test_the_worked_algorithm_makes_one_update(import_as):
    module = import_as("reinforce_example", python_blocks("add_an_algorithm.md"))
    assert module.metrics.loss != 0


def quoted_blocks(page: str) -> list[tuple[str, str]]:
    """The blocks that name the file which they are a piece of."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"```python (\S+)\n(.*?)```", text, re.DOTALL)


def test_the_worked_model_is_rolled_out_and_replayed(import_as):
    module = import_as("model_example", python_blocks("add_a_model.md"))
    assert module.batch.trajectory.replayable_steps == (0, 1)


def test_the_pieces_of_the_worked_model_are_those_of_the_repository():
    blocks = quoted_blocks("add_a_model.md")
    for path, block in blocks:
        assert block in (ROOT / path).read_text(), f"not in {path} as it is:\n{block}"
    adapter = "miles_rollout/pipelines/flux_2_klein.py"
    shown = [line for path, block in blocks if path == adapter for line in block.splitlines()]
    whole = (ROOT / adapter).read_text().splitlines()
    whole = whole[whole.index("@final") :]
    assert [line for line in shown if line] == [line for line in whole if line]


def test_the_page_on_models_names_every_member_of_an_adapter():
    text = (ROOT / "docs" / "add_a_model.md").read_text()
    members = {name for name in vars(PipelineAdapter) if not name.startswith("_")}
    members |= set(PipelineAdapter.__annotations__)
    assert not [name for name in sorted(members) if f"`{name}`" not in text]


def test_the_check_of_the_worked_model_passes(monkeypatch, capsys):
    command = [line for line in commands(ROOT / "docs" / "add_a_model.md") if "bfloat16" in line]
    monkeypatch.setattr(sys, "argv", shlex.split(command[0])[2:])
    with pytest.raises(SystemExit) as stop:
        check.main()
    assert stop.value.code == 0
    assert "FAIL" not in capsys.readouterr().out


def test_the_yaml_of_the_rewards_page_is_a_config(tmp_path):
    text = (ROOT / "docs" / "rewards.md").read_text()
    for i, block in enumerate(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)):
        path = tmp_path / f"{i}.yaml"
        path.write_text(block)
        assert load(TrainConfig, [path]).rewards[0].weight == 1.0


def test_the_design_page_names_every_module():
    text = (ROOT / "docs" / "design.md").read_text()
    for package in ("miles_rollout", "trainers"):
        folder = ROOT / package
        names = {p.stem for p in folder.glob("*.py")} - {"__init__"}
        names |= {p.parent.name for p in folder.glob("*/__init__.py")}
        missing = [name for name in sorted(names) if f"`{name}`" not in text]
        assert not missing, f"{package}: docs/design.md says nothing of {missing}"


def test_the_design_page_names_every_family():
    text = (ROOT / "docs" / "design.md").read_text()
    assert not [name for name in ADAPTERS if f"`{name}`" not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_pages_are_ascii_and_name_files_that_exist(page):
    text = page.read_text()
    assert text.isascii()
    known = {p.name for p in (ROOT / "docs").glob("*.md")} | {p.name for p in ROOT.glob("*.md")}
    for name in re.findall(r"`([\w/]+\.md)`", text):
        assert name in known or (ROOT / name).is_file(), name
    for name in re.findall(
        r"`((?:miles_rollout|trainers|recipes|tests|configs)/[\w/]+\.\w+)`", text
    ):
        assert (ROOT / name).is_file() or name == "trainers/algorithms/reinforce.py", name


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "README.md"], ids=lambda p: p.name)
def test_commands_of_a_page_exist_and_their_configs_load(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    for line in commands(page):
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], env=environment, check=True)
            continue
        assert words[:2] == ["python", "-m"], line
        sources = [word for word in words[3:] if not word.startswith("-")]
        paths = [word for word in sources if "=" not in word]
        if words[2] == "pytest":
            assert Path(paths[0]).is_file(), line
            assert any(name.endswith(paths[1]) for name in MODELS), line
        elif words[2] == "miles_rollout.check":
            check_pipeline_name(paths[0])
        elif words[2].startswith("trainers.rewards."):
            assert importlib.util.find_spec(words[2]), line
            assert paths[0] in REWARDS, line
        else:
            assert words[2] == "recipes.grpo_qwen_image", line
            load(TrainConfig, paths, [word for word in sources if "=" in word])
