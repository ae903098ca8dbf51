"""GRPO on Qwen-Image: ``python -m recipes.grpo_qwen_image [FILE.yaml ...] [key.path=value ...]``.

Without arguments it trains the tiny Qwen-Image that ships with the package, on the CPU.
"""

from __future__ import annotations

from recipes.command_line import main

if __name__ == "__main__":
    main(__doc__ or "", default="configs/qwen_image/tiny_cpu.yaml")
