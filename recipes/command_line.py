"""What every recipe's command line does: load the config, explain it, or run it."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from miles_rollout.errors import MilesRolloutError
from trainers.build import read_inputs, run
from trainers.config import TrainConfig
from trainers.config_loader import load
from trainers.dry_run import describe
from trainers.summary import summarise

ROOT = Path(__file__).resolve().parent.parent


def main(doc: str, *, default: str) -> None:
    """Parse ``sys.argv``; a mistake of the user is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Defaults: {default}. Keys and their meaning: docs/config.md.",
    )
    parser.add_argument("sources", nargs="*", metavar="FILE.yaml | key.path=value")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved config and what an iteration will cost, and exit",
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "urllib3", "diffusers", "transformers"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # A folder such as runs/lr=1e-4 has an equals sign too.
    paths = [s for s in arguments.sources if "=" not in s or Path(s).is_file()]
    overrides = [s for s in arguments.sources if s not in paths]
    try:
        config = load(TrainConfig, paths or [ROOT / default], overrides)
        if arguments.dry_run:
            print(describe(config, read_inputs(config)))
            return
        print(summarise(run(config)))
    except MilesRolloutError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: resume=true goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
