"""A recorded standard, where it was recorded, and what differs from it.

Where libraries, Python and processor are those of the record, numbers are compared bit for bit, NaN
with NaN. Elsewhere other kernels sum in another order, so floats get tolerances and checksums say
nothing; that sees a wrong formula, and does not see one unit in the last place.
"""

import json
import math
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
RECIPES = ("qwen_image", "minimax_h3")
COMMAND = "make standards"
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "numpy")

TOLERANCES = {
    "log_probs": (0.0, 2e-6),
    "ratios": (0.0, 2e-6),
    "rewards": (0.0, 3e-5),
    "advantages": (0.0, 2e-4),
    "loss": (0.0, 4e-5),
    "grad_norm": (1e-4, 0.0),
    "clipped_gradient": (1e-4, 0.0),
    "norm": (1e-5, 0.0),
}
"""(relative, absolute) by a part of an entry's name, the first that fits.

About ten times the largest gap of seven records against that of AVX512: ATEN_CPU_CAPABILITY=avx2 and
default, ONEDNN_MAX_CPU_ISA=SSE41, MKL_ENABLE_INSTRUCTIONS=AVX2, MKL_CBWR=COMPATIBLE with the former.
They were 1.2e-7 for log-probs and ratios, 2.7e-6 for rewards, 1.8e-5 for advantages (a small spread
within a group enlarges them), 4e-6 for losses, 9e-6 of gradient norms, 7e-7 of other norms.
"""


def environment() -> dict[str, str]:
    """What decides the last bits; call it with the settings of the run."""
    return {
        **{name: metadata.version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def _processor() -> str:
    """Kernels are chosen, and blocks are cut, by model and cache: the name alone may be masked."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor()
    lines = (line.partition(":") for line in path.read_text().splitlines())
    told = {name.strip(): value.strip() for name, _, value in lines}
    wanted = ("vendor_id", "cpu family", "model", "model name", "cache size")
    return ", ".join(told[name] for name in wanted if name in told)


def path_of(recipe: str) -> Path:
    """Where the standard of a recipe is."""
    return FOLDER / f"{recipe}.json"


def read(recipe: str) -> dict[str, Any]:
    """``env`` and ``entries``; floats as they were."""
    return json.loads(path_of(recipe).read_text())


def write(recipe: str, env: Mapping[str, str], entries: Mapping[str, Any]) -> None:
    """One entry a line, so that a diff shows which of them changed."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in entries)
    head = json.dumps(dict(env), indent=2).replace("\n", "\n ")
    path_of(recipe).write_text(f'{{\n "env": {head},\n "entries": {{\n{lines}\n }}\n}}\n')


def other_environment(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What differs, as "torch 2.13.0+cpu (here 2.12.0)"; empty: numbers have to be equal."""
    names = [*recorded, *(name for name in here if name not in recorded)]
    return [
        f"{name} {recorded.get(name)} (here {here.get(name)})"
        for name in names
        if recorded.get(name) != here.get(name)
    ]


def difference(recorded: Mapping[str, Any], found: Mapping[str, Any], *, exact: bool) -> str | None:
    """The first entry that differs, with both values, in the order of computation; None: none."""
    for name in [*recorded, *(name for name in found if name not in recorded)]:
        if name not in recorded or name not in found:
            where, value = (
                ("run", recorded[name]) if name in recorded else ("standard", found[name])
            )
            return f"{name}: missing in the {where}; the other has {value!r}"
        if name.endswith("sha256"):
            if exact and recorded[name] != found[name]:
                return f"{name}: recorded {recorded[name]}, now {found[name]}"
            continue
        before, now = (v if isinstance(v, list) else [v] for v in (recorded[name], found[name]))
        if len(before) != len(now):
            return f"{name}: recorded {len(before)} values, now {len(now)}"
        for i, (a, b) in enumerate(zip(before, now, strict=True)):
            if not _same(a, b, (0.0, 0.0) if exact else _tolerance(name)):
                place = f"[{i}]" if isinstance(recorded[name], list) else ""
                return f"{name}{place}: recorded {a!r}, now {b!r}"
    return None


def _tolerance(name: str) -> tuple[float, float]:
    return next(TOLERANCES[part] for part in TOLERANCES if part in name.split("/"))


def _same(a: float | None, b: float | None, tolerance: tuple[float, float]) -> bool:
    if a is None or b is None:
        return a is b
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    if tolerance == (0.0, 0.0):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return math.isclose(a, b, rel_tol=tolerance[0], abs_tol=tolerance[1])
