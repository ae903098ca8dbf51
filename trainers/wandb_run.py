"""A Weights & Biases run that can fail without anyone noticing but the log.

Every call into W&B is guarded: whatever goes wrong there costs one warning and the rest of the W&B
record, never the training. (An online start waits up to W&B's 90 s for a server out of reach.) Each
key gets ``iteration`` as its own x-axis; W&B's internal step is not used, since it drops what
arrives out of order.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trainers.image_grid import to_pil
from trainers.samples import Sample

Shown: TypeAlias = tuple[Sample, Path | None]
"""A sample, and the file that holds it if it is a video."""

logger = logging.getLogger(__name__)


class WandbRun:
    """One run, started in the constructor; off for good after the first failure."""

    def __init__(self, output_dir: Path, run_config: Mapping[str, Any], **init: Any) -> None:
        self._run: Any = None
        self._defined: set[str] = set()
        self._guard("start", lambda: self._start(output_dir, run_config, init))

    def log(
        self,
        iteration: int,
        metrics: Mapping[str, float | int | None],
        histograms: Mapping[str, Tensor],
        samples: Mapping[str, Sequence[Shown]],
    ) -> None:
        """One row of the run's history."""
        if self._run is not None:
            self._guard("log", lambda: self._log(iteration, metrics, histograms, samples))

    def close(self, *, failed: bool) -> None:
        """Can be called twice."""
        run, self._run = self._run, None
        if run is not None:
            self._guard("finish", lambda: run.finish(exit_code=int(failed)))

    def _start(self, output_dir: Path, run_config: Mapping[str, Any], init: Any) -> None:
        import wandb  # here: a broken installation must not stop training either

        self._run = wandb.init(
            dir=output_dir,
            # Fresh also after a resume: offline, W&B starts an old id from zero and a later sync
            # replaces what was there.
            id=uuid.uuid4().hex[:8],
            config=dict(run_config),
            reinit="create_new",
            settings=wandb.Settings(x_disable_stats=True, console="off", silent=True),
            **init,
        )
        self._run.define_metric("iteration", hidden=True)
        self._run.define_metric("*", step_metric="iteration")

    def _log(
        self,
        iteration: int,
        metrics: Mapping[str, float | int | None],
        histograms: Mapping[str, Tensor],
        samples: Mapping[str, Sequence[Shown]],
    ) -> None:
        import wandb

        row: dict[str, Any] = {key: value for key, value in metrics.items() if value is not None}
        for key, values in histograms.items():
            values = values.detach().float().flatten()
            finite = values[torch.isfinite(values)]
            if finite.numel():
                row[key] = wandb.Histogram(finite.cpu().numpy())
        for key, shown in samples.items():
            row[key] = [
                wandb.Image(to_pil(sample.picture), caption=sample.caption)
                if path is None
                # An encoded file, which W&B copies: of arrays it makes a video without sound.
                else wandb.Video(str(path), caption=sample.caption, format="mp4")
                for sample, path in shown
            ]
        # By name: how deep "*" reaches into keys such as a/b/c is W&B's affair.
        for key in sorted(row.keys() - self._defined):
            self._run.define_metric(key, step_metric="iteration")
            self._defined.add(key)
        self._run.log({"iteration": iteration, **row})

    def _guard(self, doing: str, action: Callable[[], None]) -> None:
        try:
            action()
        # Every error: a missing package, no network, a full disk, a bug in W&B.
        except Exception as error:
            self._run = None
            logger.warning(
                "W&B is off from here on, metrics.jsonl is not: %s failed with %r", doing, error
            )
