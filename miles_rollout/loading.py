"""A pipeline by name: one of the tiny ones that ship with the package, a folder, or a hub name."""

from __future__ import annotations

import difflib
import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModularPipeline

from miles_rollout.errors import RolloutParamsError

TINY_PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-cosmos3": ("tiny_cosmos3", {}),
    "tiny-cosmos3-modular": ("tiny_cosmos3_modular", {}),
    "tiny-flux": ("tiny_flux", {}),
    "tiny-hunyuan-video-1-5": ("tiny_hunyuan_video15", {}),
    "tiny-flux-2-klein": ("tiny_flux_2_klein", {}),
    "tiny-qwen-image-edit-plus": ("tiny_qwen_image_edit_plus", {}),
    "tiny-qwen-image-2-1": ("tiny_qwen_image_2_1", {}),
    "tiny-ltx2": ("tiny_ltx2", {}),
    "tiny-ltx2-3": ("tiny_ltx2", {"version": "2.3"}),
    "tiny-qwen-image": ("tiny_qwen_image", {}),
    "tiny-qwen-image-pretrained": ("tiny_qwen_image", {"pretrained": True}),
    "tiny-sana": ("tiny_sana", {}),
    "tiny-sd3": ("tiny_sd3", {}),
    "tiny-minimax-h3": ("tiny_minimax_h3", {}),
    "tiny-minimax-h3-pretrained": ("tiny_minimax_h3", {"pretrained": True}),
    "tiny-wan": ("tiny_wan", {"version": "2.1"}),
    "tiny-wan2-2": ("tiny_wan", {"version": "2.2"}),
    "tiny-z-image": ("tiny_z_image", {}),
}
"""Name -> function of ``miles_rollout.testing`` and its arguments."""

_INDEX, _MODULAR_INDEX = "model_index.json", "modular_model_index.json"
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
_MODULAR = ("collection", "components_manager", "revision", "trust_remote_code", "workflow")
"""What a modular pipeline is made with, before its components are loaded with the rest."""


def check_pipeline_name(name: str) -> None:
    """Refuse, before anything is loaded, a name that cannot be a pipeline."""
    if name.startswith("tiny-") and name not in TINY_PIPELINES:
        near = difflib.get_close_matches(name, TINY_PIPELINES, n=1)
        raise RolloutParamsError(
            f"pipeline: no such tiny pipeline; got {name!r}; "
            + (f"did you mean {near[0]}?" if near else f"choose among {sorted(TINY_PIPELINES)}")
        )
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if not (looks_local or path.exists()):
        return
    if not any((path / index).is_file() for index in (_INDEX, _MODULAR_INDEX)):
        raise RolloutParamsError(
            f"pipeline: the folder holds no {_INDEX} and no {_MODULAR_INDEX}; got {name!r}; give a "
            "folder that save_pretrained wrote, a hub name, or a tiny pipeline's name"
        )


def load_pipeline(
    name: str, dtype: torch.dtype = torch.float32, workflow: str | None = None
) -> Any:
    """Load by name, with the progress bar off. Raises ``RolloutParamsError`` for a bad name.

    ``workflow``: of a modular pipeline with several only the components of this one are loaded.
    """
    check_pipeline_name(name)
    if name in TINY_PIPELINES:
        function, arguments = TINY_PIPELINES[name]
        testing = importlib.import_module("miles_rollout.testing")
        pipe = getattr(testing, function)(**arguments, dtype=dtype)
    else:
        chosen = {} if workflow is None else {"workflow": workflow}
        pipe = load_pretrained(name, torch_dtype=dtype, **chosen)
    hide_progress_bars(pipe)
    return pipe


def load_pretrained(name: str, **kwargs: Any) -> Any:
    """Load a folder or a hub name, whether the pipeline is modular or not.

    ``kwargs`` are those of diffusers' ``from_pretrained``, and of ``load_components`` where it is
    modular: ``torch_dtype``, ``workflow`` and the like. Raises ``RolloutParamsError`` for a folder
    that holds no pipeline, or not all of one.
    """
    check_pipeline_name(name)
    path = Path(name).expanduser()
    if not _is_modular(path, name, {k: v for k, v in kwargs.items() if k in (*_HUB, "revision")}):
        return DiffusionPipeline.from_pretrained(str(path) if path.exists() else name, **kwargs)
    if path.exists():
        _import_own_parts(path / _MODULAR_INDEX)
        name = str(path)
    made_with = {k: v for k, v in kwargs.items() if k in (*_HUB, *_MODULAR)}
    pipe = ModularPipeline.from_pretrained(name, **made_with)
    pipe.load_components(**{k: v for k, v in kwargs.items() if k not in _MODULAR})
    specs = {part: pipe.get_component_spec(part) for part in pipe.null_component_names}
    # One without a place to load it from was not there when the pipeline was saved.
    missing = [part for part, spec in specs.items() if spec.pretrained_model_name_or_path]
    if missing:
        raise RolloutParamsError(
            f"pipeline: not all of it could be loaded; got no {', '.join(missing)} from {name!r}; "
            "see what diffusers logged of each, or load the workflow= that does without"
        )
    return pipe


def hide_progress_bars(pipe: Any) -> None:
    """Also those of a modular pipeline's inner blocks, which its own setting does not reach."""
    pipe.set_progress_bar_config(disable=True)
    blocks = [pipe._blocks] if isinstance(pipe, ModularPipeline) else []
    while blocks:
        block = blocks.pop()
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
        blocks.extend(block.sub_blocks.values())


def _is_modular(path: Path, name: str, hub: dict[str, Any]) -> bool:
    """A pipeline that is both is loaded as the standard one."""
    if path.exists():
        return not (path / _INDEX).is_file()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of how diffusers asks the hub
        try:
            DiffusionPipeline.load_config(name, **hub)
        except OSError:
            try:
                ModularPipeline.load_config(name, **hub)
            except OSError:
                return False
            return True
    return False


def _import_own_parts(index: Path) -> None:
    """diffusers finds a class of another package only where its module was imported."""
    try:
        entries = json.loads(index.read_text()).values()
    except (AttributeError, ValueError) as error:
        raise RolloutParamsError(
            f"pipeline: {_MODULAR_INDEX} is damaged; got {error} in {str(index.parent)!r}; save the "
            "pipeline again"
        ) from error
    for entry in entries:
        if isinstance(entry, list) and entry and str(entry[0]).startswith("miles_rollout."):
            importlib.import_module(entry[0])
