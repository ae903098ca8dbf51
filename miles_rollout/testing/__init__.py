"""Tiny real pipelines: for tests, for documentation and for recipes that run on a CPU."""

from miles_rollout.testing.qwen_image import tiny_qwen_image

__all__ = ["tiny_qwen_image"]
