"""GRPO on LTX-2 and 2.3: ``python -m recipes.grpo_ltx2 [FILE.yaml ...] [key.path=value ...]``.

Video with sound, trained on either stream or on both. Without arguments it trains the tiny LTX-2 that
ships with the package, on the CPU.
"""

from __future__ import annotations

from recipes.command_line import main

if __name__ == "__main__":
    main(__doc__ or "", default="configs/ltx2/tiny_cpu.yaml")
