"""What a run leaves to look at: ``metrics.jsonl``, ``samples/``, and a Weights & Biases run.

The file is the record; W&B shows the same keys and adds histograms and samples. Only the main rank
writes. W&B cannot resume a run offline, so a resumed training is a fresh run in the same group
with ``resumed_from`` in its config. W&B's files are in ``output_dir/wandb``; only the debug log of
its background process goes where ``WANDB_CACHE_DIR`` says.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor

from trainers.config_loader import STRICT
from trainers.metrics_file import MetricsFile, Scalar, TrackingError
from trainers.samples import Sample, save_samples
from trainers.versions import library_versions
from trainers.wandb_run import Shown, WandbRun

__all__ = ["Tracker", "TrackingConfig", "TrackingError"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingConfig:
    """Where metrics go besides ``metrics.jsonl``, and how many samples are kept."""

    __pydantic_config__ = STRICT

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Wins over WANDB_MODE. "offline" needs no account; send it later with ``wandb sync``."""
    project: str = "miles-rollout"
    """W&B project."""
    name: str | None = None
    """W&B name of the run; None: the name of output_dir."""
    group: str | None = None
    """W&B group, which holds a run and its resumptions; None: the name of output_dir."""
    tags: tuple[str, ...] = ()
    """W&B tags."""
    media_every: int = 10
    """Pictures or videos every so many iterations; 0: never."""
    num_media: int = 8
    """Samples each time, at most."""
    histograms: bool = True
    """Histograms of advantages, ratios and the like in W&B."""

    def __post_init__(self) -> None:
        if self.media_every < 0:
            raise TrackingError(
                f"tracking.media_every: must not be negative; got {self.media_every}; "
                f"set 0 for no samples"
            )
        if self.num_media < 1:
            raise TrackingError(
                f"tracking.num_media: must be at least 1; got {self.num_media}; "
                f"set media_every to 0 for no samples"
            )


class Tracker:
    """The one place that metrics go to, one call an iteration.

    ``resume_from``: the iteration that comes next; what the interrupted run logged of it and later
    is dropped first. Without it an ``output_dir`` that holds metrics is refused.

    Example::

        with Tracker(output_dir, TrackingConfig(), {"seed": 0}) as tracker:
            tracker.log(0, {"train/loss": loss}, histograms={"train/ratio": ratios})
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        config: TrackingConfig,
        run_config: Mapping[str, Any],
        *,
        is_main: bool = True,
        resume_from: int | None = None,
    ) -> None:
        self._config = config
        self._folder = Path(output_dir).resolve()
        self._file: MetricsFile | None = None
        self._wandb: WandbRun | None = None
        if not is_main:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = MetricsFile(self._folder / "metrics.jsonl", resume_from=resume_from)
        if config.wandb != "disabled":
            self._wandb = self._start_wandb(run_config, resume_from)

    def wants_media(self, iteration: int) -> bool:
        """Whether samples of this iteration are due; what is passed at other times is kept too."""
        every = self._config.media_every
        return self._file is not None and every > 0 and iteration % every == 0

    def log(
        self,
        iteration: int,
        metrics: Mapping[str, Scalar],
        *,
        histograms: Mapping[str, Tensor] | None = None,
        samples: Mapping[str, Sequence[Sample]] | None = None,
    ) -> None:
        """Record everything about ``iteration``, training and evaluation, in one call.

        Of each list in ``samples`` the first ``num_media`` are kept, in W&B and as a contact sheet
        ``samples/iteration_000012_<key>.png``; each video also as ``.._<key>_00.mp4``.
        """
        if self._file is None:
            return
        numbers = self._file.write(iteration, metrics)
        shown: dict[str, list[Shown]] = {}
        for key, given in (samples or {}).items():
            kept_samples = list(given)[: self._config.num_media]
            if kept_samples:
                name = f"iteration_{iteration:06d}_{key.replace('/', '_')}"
                files = save_samples(self._folder / "samples", name, kept_samples)
                shown[key] = list(zip(kept_samples, files, strict=True))
        if self._wandb is not None:
            kept = (histograms or {}) if self._config.histograms else {}
            self._wandb.log(iteration, numbers, kept, shown)

    def close(self, *, failed: bool = False) -> None:
        """Finish the file and the W&B run; can be called twice."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.close(failed=failed)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(failed=error_type is not None)

    def _start_wandb(self, run_config: Mapping[str, Any], resume_from: int | None) -> WandbRun:
        group = self._config.group or self._folder.name
        extra: dict[str, Any] = {"versions": library_versions()}
        if resume_from is not None:
            extra["resumed_from"] = resume_from
            logger.info("W&B: a fresh run in group %r, resumed from %d", group, resume_from)
        return WandbRun(
            self._folder,
            {**run_config, **extra},
            mode=self._config.wandb,
            project=self._config.project,
            name=self._config.name or self._folder.name,
            group=group,
            tags=list(self._config.tags),
        )
