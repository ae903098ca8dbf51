"""GRPO on Cosmos3: ``python -m recipes.grpo_cosmos3 [FILE.yaml ...] [key.path=value ...]``.

Video, with sound if the request asks for it. Without arguments it trains the tiny Cosmos3 that ships
with the package, on the CPU.
"""

from __future__ import annotations

from recipes.command_line import main

if __name__ == "__main__":
    main(__doc__ or "", default="configs/cosmos3/tiny_cpu.yaml")
