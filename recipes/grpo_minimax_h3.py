"""GRPO on MiniMax H3: ``python -m recipes.grpo_minimax_h3 [FILE.yaml ...] [key.path=value ...]``.

Video with sound, trained on either stream or on both. Without arguments it trains the tiny H3 that
ships with the package, on the CPU.
"""

from __future__ import annotations

from recipes.command_line import main

if __name__ == "__main__":
    main(__doc__ or "", default="configs/minimax_h3/tiny_cpu.yaml")
