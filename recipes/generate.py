"""Pictures or videos from a checkpoint: ``python -m recipes.generate CHECKPOINT PROMPT [PROMPT ...]``.

CHECKPOINT is a folder like ``runs/x/checkpoints/iteration_000060``, or a run's ``output_dir`` for
its latest one. Sampling is deterministic: the same seed gives the same samples.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from miles_rollout.errors import MilesRolloutError
from trainers.build import RunError, build_engine, make_folder
from trainers.checkpoint import latest_checkpoint, load_checkpoint
from trainers.config import TrainConfig
from trainers.config_loader import from_tree
from trainers.devices import build_device
from trainers.ema import EMA
from trainers.evaluation import DETERMINISTIC
from trainers.image_grid import save_grid, to_pil
from trainers.policy import Policy
from trainers.rollouts import with_media
from trainers.samples import Sample
from trainers.video_file import write_video


def generate(checkpoint: Path, prompts: list[str], out: Path, *, seed: int, count: int) -> Path:
    """Write ``count`` pictures or videos a prompt and a contact sheet under ``out``."""
    folder = find(checkpoint)
    tensors, state = load_checkpoint(folder)
    config = from_tree(TrainConfig, state["config"], str(folder))
    make_folder(out, "--out")
    engine = build_engine(config, build_device(config.model.device), prompts)
    lora = config.model.lora
    if lora is not None:  # the checkpoint holds all weights, also where the run started from others
        lora = replace(lora, start=None)
    policy = Policy(engine, lora, seed=config.seed, denoisers=config.model.denoisers)
    policy.load(tensors["policy"])
    if config.ema is not None and config.ema.export:
        average = EMA(config.ema, policy.parameters)
        average.load(tensors["ema"], state["ema_updates"])
        average.copy_to(policy.parameters)
    pictures: list[Tensor] = []
    captions: list[str] = []
    for batch in engine.generate(
        prompts,
        count,
        DETERMINISTIC,
        seed=seed,
        negative_prompt=config.rollout.negative_prompt,
        decode=False,
        **config.rollout.arguments(config.eval.num_inference_steps),
    ):
        ids = zip(batch.group_ids.tolist(), batch.sample_ids.tolist(), strict=True)
        media = with_media(batch, engine).media or []
        for medium, prompt, (group, number) in zip(media, batch.prompts, ids, strict=True):
            sample = Sample(media=medium, prompt=prompt)
            name = f"prompt_{group:03d}_sample_{number:03d}"
            if medium.video is None:
                to_pil(sample.picture).save(out / f"{name}.png")
            else:
                write_video(out / f"{name}.mp4", medium)
            pictures.append(sample.picture.clone())  # of a video one frame, not all
            captions.append(prompt)
    save_grid(out / "grid.png", pictures, captions)
    return out / "grid.png"


def find(checkpoint: Path) -> Path:
    """The checkpoint itself, or the latest of a run. Raises ``RunError`` if there is none."""
    if (checkpoint / "state.json").is_file():
        return checkpoint
    latest = latest_checkpoint(checkpoint / "checkpoints")
    if latest is None:
        raise RunError(
            f"generate: no checkpoint there; got {str(checkpoint)!r}; give a run's output_dir or a "
            "folder like runs/x/checkpoints/iteration_000060"
        )
    return latest


def main() -> None:
    """Parse ``sys.argv``; a mistake of the user is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("generated"), help="folder for the files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="samples a prompt")
    a = parser.parse_args()
    try:
        print(generate(a.checkpoint, a.prompts, a.out, seed=a.seed, count=a.count))
    except MilesRolloutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
