"""A pipeline by name: one of the tiny ones that ship with the package, a folder, or a hub name."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from miles_rollout.errors import RolloutParamsError

TINY_PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-flux": ("tiny_flux", {}),
    "tiny-ltx2": ("tiny_ltx2", {}),
    "tiny-ltx2-3": ("tiny_ltx2", {"version": "2.3"}),
    "tiny-qwen-image": ("tiny_qwen_image", {}),
    "tiny-qwen-image-pretrained": ("tiny_qwen_image", {"pretrained": True}),
    "tiny-sd3": ("tiny_sd3", {}),
    "tiny-minimax-h3": ("tiny_minimax_h3", {}),
}
"""Name -> function of ``miles_rollout.testing`` and its arguments."""


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
    if (looks_local or path.exists()) and not (path / "model_index.json").is_file():
        raise RolloutParamsError(
            f"pipeline: the folder holds no model_index.json; got {name!r}; give a folder that "
            "save_pretrained wrote, a hub name, or a tiny pipeline's name"
        )


def load_pipeline(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load by name, with the progress bar off. Raises ``RolloutParamsError`` for a bad name."""
    check_pipeline_name(name)
    if name in TINY_PIPELINES:
        function, arguments = TINY_PIPELINES[name]
        testing = importlib.import_module("miles_rollout.testing")
        pipe = getattr(testing, function)(**arguments, dtype=dtype)
    else:
        pipe = DiffusionPipeline.from_pretrained(str(Path(name).expanduser()), torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe
