"""Algorithms that train on rollouts: data, advantages, losses, rewards, checkpoints."""
