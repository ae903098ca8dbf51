"""LoRA on a denoiser: its configuration, attaching it, exporting it.

peft does the layers; this module adds what RL needs of them. Master weights are float32 whatever
the base's dtype (an update of 1e-5 on a bf16 weight of 0.02 is lost), the initial values come from
a seed of their own, and a target that matches nothing is an error. Using what is attached is
``trainers.adapters``, whose names are importable from here.
"""

from __future__ import annotations

import difflib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from trainers.adapters import (
    LoraError,
    adapter_config,
    adapter_parameters,
    adapter_tensors,
    base_model,
    load_adapter_tensors,
    trainable_parameters,
    use_adapter,
)
from trainers.config_loader import STRICT

__all__ = [
    "QWEN_IMAGE_TARGETS",
    "LoraConfig",
    "LoraError",
    "adapter_tensors",
    "attach_lora",
    "base_model",
    "check_start",
    "export_lora",
    "load_adapter_tensors",
    "load_exported",
    "trainable_parameters",
    "use_adapter",
    "weights_name",
]

QWEN_IMAGE_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)
"""The 12 linear layers of a Qwen-Image block that Flow-GRPO trains."""

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
_PREFIX = "transformer"
"""Of the names in every exported file: what loaders of diffusers expect by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Which layers get an adapter, how large, and how it starts."""

    __pydantic_config__ = STRICT

    rank: int = 16
    """Columns of A and B."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = QWEN_IMAGE_TARGETS
    """Ends of module names, whole words between dots; each must match at least one module."""
    dropout: float = 0.0
    """Only 0: a mask drawn anew in each forward makes replay differ from rollout."""
    init: Literal["gaussian", "default"] = "gaussian"
    """How A starts: normal with std 1 / rank, or as a linear layer of torch. B starts at 0."""
    start: str | None = None
    """A LoRA to start from, of this rank, alpha and these targets: a folder that holds an exported
    one, such as a checkpoint's (null: as ``init`` says)."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise LoraError(f"lora.rank: must be at least 1; got {self.rank}; set e.g. 16")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise LoraError(f"lora.alpha: must be positive; got {self.alpha}; set e.g. 2 * rank")
        if self.dropout != 0:
            raise LoraError(
                f"lora.dropout: rollout and replay would see different masks, so the ratio would "
                f"not start at 1; got {self.dropout}; set 0"
            )
        if self.start is not None and self.init != "gaussian":
            raise LoraError(
                f"lora.init: has no effect beside lora.start; got {self.init!r}; leave it out"
            )
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise LoraError(
                f"lora.targets: needs at least one name, each once; got {list(self.targets)}; "
                f"set ends of module names, e.g. {QWEN_IMAGE_TARGETS[0]!r}"
            )


def attach_lora(
    module: nn.Module, config: LoraConfig, *, seed: int, adapter_name: str = "default"
) -> list[str]:
    """Freeze ``module``, add an adapter to it and return the sorted names of its parameters.

    The new adapter becomes the active one and the only one that is trained: of several adapters
    attach the trained one last. Same seed, same initial values, on any device.
    """
    if adapter_name in getattr(module, "peft_config", {}):
        raise LoraError(
            f"attach_lora: the module already has this adapter; got {adapter_name!r}; "
            f"set another adapter_name"
        )
    _check_targets(module, config.targets)
    module.requires_grad_(False)
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(config.targets),
        lora_dropout=config.dropout,
        init_lora_weights="gaussian" if config.init == "gaussian" else True,
    )
    # peft draws A from the global generator, on the CPU.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Several adapters are what is wanted here.
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
        adapted: Any = module
        adapted.add_adapter(peft_config, adapter_name)
    _initialise(module, config, seed, adapter_name)
    return sorted(trainable_parameters(module))


def weights_name(denoiser: str) -> str:
    """The file of one denoiser's adapter: that of ``transformer`` has the name loaders look for.

    No other ends alike, or a loader that is given the folder could not choose.
    """
    stem, _, end = WEIGHTS_NAME.rpartition(".")
    return WEIGHTS_NAME if denoiser == "transformer" else f"{stem}_{denoiser}.{end}"


def export_lora(
    module: nn.Module,
    path: Path,
    config: LoraConfig,
    *,
    adapter_name: str = "default",
) -> Path:
    """Write the adapter of one denoiser for stock diffusers.

    ``pipe.load_lora_weights(folder)`` reads the file of ``transformer``, and the denoiser itself
    reads any: ``pipe.transformer_2.load_lora_adapter(folder, weight_name=...)``, also of a pipeline
    class without LoRA loading. Rank and alpha go into the file: without them a loader takes alpha =
    rank, another strength.
    The tensors stay float32. On a bf16 pipeline stock diffusers rounds them to bf16 as it loads
    them, so there the picture is close to that of training; in float32 it is the same.
    """
    attached = adapter_config(module, adapter_name)
    if (attached.r, attached.lora_alpha) != (config.rank, config.alpha):
        raise LoraError(
            f"export_lora: rank and alpha are not those of adapter {adapter_name!r}; got "
            f"{(config.rank, config.alpha)} for {(attached.r, attached.lora_alpha)}; "
            f"set the config that the adapter was attached with"
        )
    # Only what says how to apply the tensors: other versions of peft refuse keys unknown to them.
    metadata = {
        f"{_PREFIX}.r": config.rank,
        f"{_PREFIX}.lora_alpha": config.alpha,
        f"{_PREFIX}.target_modules": sorted(config.targets),
    }
    partial = path.with_name(f".partial-{path.name}")
    tensors = adapter_tensors(module, adapter_name)
    save_file(
        {f"{_PREFIX}.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()},
        partial,
        {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(metadata, sort_keys=True)},
    )
    _sort_header(partial)
    partial.replace(path)
    return path


def load_exported(
    module: nn.Module, path: Path, config: LoraConfig, *, adapter_name: str = "default"
) -> None:
    """Copy an exported LoRA into an adapter, all of it: what `export_lora` wrote, or diffusers.

    Raises ``LoraError`` for a file that is none, that was made with another rank or alpha, or whose
    names or shapes do not fit.
    """
    where = f"lora.start: {path}"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise LoraError(
            f"{where} cannot be read; got {error}; set a folder with {path.name}, or null"
        ) from None
    _check_strength(where, _read_header(path), config)
    named = {name.removeprefix(f"{_PREFIX}."): tensor for name, tensor in tensors.items()}
    try:
        load_adapter_tensors(module, named, adapter_name)
    except LoraError as error:
        raise LoraError(f"{where} does not fit: {error}") from None


def check_start(config: LoraConfig) -> None:
    """Raise ``LoraError`` unless ``lora.start`` holds exported files of this strength."""
    if config.start is None:
        return
    folder = Path(config.start)
    stem, _, end = WEIGHTS_NAME.rpartition(".")
    files = sorted(folder.glob(f"{stem}*.{end}"))
    if not files:
        raise LoraError(
            f"lora.start: no exported LoRA there; got {str(folder)!r}; set a folder that holds "
            f"{WEIGHTS_NAME}, such as a checkpoint's, or null"
        )
    for path in files:
        _check_strength(f"lora.start: {path}", _read_header(path), config)


def _read_header(path: Path) -> Mapping[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise LoraError(
            f"lora.start: {path} cannot be read; got {error}; set a folder with {path.name}, or null"
        ) from None


def _check_strength(where: str, header: Mapping[str, str], config: LoraConfig) -> None:
    """A file that does not tell its alpha is applied with alpha = rank, as diffusers does."""
    told = json.loads(header.get(LORA_ADAPTER_METADATA_KEY, "{}"))
    rank = told.get(f"{_PREFIX}.r", config.rank)
    for name, found, wanted in (
        ("rank", rank, config.rank),
        ("alpha", told.get(f"{_PREFIX}.lora_alpha", rank), config.alpha),
    ):
        if found != wanted:
            raise LoraError(
                f"{where} was made with another strength; got {name} {found} for {wanted}; set "
                f"lora.{name} to {found}"
            )
    for key in ("rank_pattern", "alpha_pattern", "use_rslora"):
        if told.get(f"{_PREFIX}.{key}"):
            raise LoraError(
                f"{where} has layers of different strength; got {key} "
                f"{told[f'{_PREFIX}.{key}']}; set one whose layers are alike"
            )


def _sort_header(path: Path) -> None:
    """safetensors writes its metadata in a random order: sorted, equal adapters are equal files."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:start]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[start:])


def _initialise(module: nn.Module, config: LoraConfig, seed: int, adapter_name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(module, adapter_name).items():
        # peft gives the adapter the base's dtype.
        value = torch.zeros(parameter.shape, dtype=torch.float32)
        if ".lora_A." in name and config.init == "gaussian":
            nn.init.normal_(value, std=1 / config.rank, generator=generator)
        elif ".lora_A." in name:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        parameter.data = value.to(parameter.device)


def _check_targets(module: nn.Module, targets: Sequence[str]) -> None:
    names = [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear | BaseTunerLayer) and ".lora_" not in name
    ]
    unmatched = [t for t in targets if not any(f".{name}".endswith(f".{t}") for name in names)]
    if not unmatched:
        return
    parts = [name.split(".") for name in names]
    ends = sorted({".".join(p[i:]) for p in parts for i in range(len(p)) if not p[i].isdigit()})
    near = {target: difflib.get_close_matches(target, ends, n=3) for target in unmatched}
    hints = "; ".join(f"for {t!r} try {', '.join(n) or 'print(module)'}" for t, n in near.items())
    raise LoraError(
        f"lora.targets: no linear layer of {type(module).__name__} has a name that ends so; got "
        f"{unmatched}; {hints}"
    )
