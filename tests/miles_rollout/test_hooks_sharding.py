"""Sequence parallel: ranks hold parts of a sample, and noise and log-prob are those of the whole."""

import threading

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from miles_rollout import RolloutParams, RolloutStateError
from miles_rollout.hooks import (
    Sharding,
    accept_transition,
    finalize_rollout_if_enabled,
    prepare_rollout_if_enabled,
    rollout_step_kwargs,
)

SEEDS = [3, 4]
RANKS = 2
ROWS = 7
PER_RANK = 4  # one row of padding


class Group:
    """Ranks as threads: `gather` waits for all of them, as a collective does."""

    def __init__(self):
        self.parts = [None] * RANKS
        self.barrier = threading.Barrier(RANKS, timeout=60)

    def sharding(self, rank):
        return Sharding(
            gather=lambda part: self.gather(rank, part), shard=lambda whole: cut(whole, rank)
        )

    def gather(self, rank, part):
        self.parts[rank] = part
        self.barrier.wait()
        whole = torch.cat(self.parts, dim=1)[:, :ROWS]
        self.barrier.wait()
        return whole


def cut(whole, rank):
    padded = torch.nn.functional.pad(whole, (0, 0, 0, RANKS * PER_RANK - ROWS))
    return padded[:, rank * PER_RANK : (rank + 1) * PER_RANK]


def noise(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, ROWS, 3, generator=generator).to(dtype)


def loop(x, params, sharding=None):
    """A denoiser that treats each row alone, so that a shard's velocity is the whole one's."""
    drive = accept_transition(FlowMatchEulerDiscreteScheduler(shift=3.0))
    drive.set_timesteps(4)
    request = {}
    kwargs = {} if sharding is None else {"sharding": {"video": sharding}}
    prepare_rollout_if_enabled(request, params, SEEDS, schedulers={"video": drive}, **kwargs)
    for t in drive.timesteps:
        kwargs = rollout_step_kwargs(request, stream="video")
        x = drive.step((x * 3).sin(), t, x, return_dict=False, **kwargs)[0]
    return x, finalize_rollout_if_enabled(request)


def on_ranks(params, dtype=torch.float32, *, sharded=True):
    group, found = Group(), {}

    def rank_main(rank):
        sharding = group.sharding(rank) if sharded else None
        found[rank] = loop(cut(noise(dtype), rank), params, sharding)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("latent_dtype", ["pipeline", "float32"])
@pytest.mark.parametrize("steps", [None, [1], []])
def test_every_rank_has_the_trajectory_of_the_whole_sample_bitwise(steps, latent_dtype, dtype):
    params = RolloutParams(sde_step_indices=steps, latent_dtype=latent_dtype, debug=True)
    final, whole = loop(noise(dtype), params)
    held = whole.streams["video"]
    for rank, (part, trajectory) in enumerate(on_ranks(params, dtype)):
        mine = trajectory.streams["video"]
        assert torch.equal(part, cut(final, rank))
        assert torch.equal(mine.latents, held.latents)
        assert torch.equal(mine.log_probs, held.log_probs)
        assert torch.equal(mine.num_elements, held.num_elements)
        for name in held.debug:
            assert torch.equal(mine.debug[name], held.debug[name])


def test_without_sharding_ranks_would_draw_one_noise():
    """What the test above rests on: the parts alone are another rollout."""
    final, _ = loop(noise(), RolloutParams())
    parts = [part for part, _ in on_ranks(RolloutParams(), sharded=False)]
    assert not torch.equal(parts[1], cut(final, 1))


def test_a_shard_that_is_no_inverse_is_refused():
    wrong = Sharding(gather=lambda part: part, shard=lambda whole: whole[:, 1:])
    with pytest.raises(RolloutStateError, match=r"got \(2, 6, 3\) for \(2, 7, 3\); make shard the"):
        loop(noise(), RolloutParams(), wrong)
