"""What on-policy log-probs must be under the schedules of published recipes, in closed form.

An on-policy sample has E[log-prob] = -1/2 - ln(std) - ln(2 pi)/2 whatever the model says, so these
figures test schedule, formula and window at once. They are public: Flow-GRPO's Qwen-Image recipe at
512 x 512 (1024 tokens, noise level 1.2) and miles-diffusion's MiniMax H3 recipe (video shift 12,
noise level 0.7).
"""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from miles_rollout.transitions import schedule_step

QWEN_IMAGE = [  # sigma, std, E[log-prob]
    (1.000, 1.200, -1.601), (0.929, 1.208, -1.608), (0.852, 0.837, -1.241), (0.767, 0.665, -1.010),
    (0.673, 0.553, -0.827), (0.570, 0.468, -0.659), (0.456, 0.393, -0.485), (0.327, 0.318, -0.273),
    (0.183, 0.230, 0.052), (0.020, 0.024, 2.301),
]  # fmt: skip
MINIMAX_H3 = {1: -1.159, 2: -0.866, 3: -0.724}


def qwen_image_sigmas():
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.5,
        max_image_seq_len=8192,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
        use_dynamic_shifting=True,
    )
    mu = calculate_shift(1024, 256, 8192, 0.5, 0.9)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 10, 10), mu=mu)
    return scheduler.sigmas


def on_policy(sigmas, step, noise_level):
    """The std, and the log-prob of a sample of a 512 x 512 picture's latents."""
    generator = torch.Generator().manual_seed(step)
    x, v, noise = torch.randn(3, 1, 1024, 64, generator=generator)
    taken = schedule_step(
        "sde", x, v, sigmas=sigmas, step=step, noise_level=noise_level, noise=noise
    )
    return taken.std.item(), taken.log_prob.item()


@pytest.mark.parametrize("step", range(10))
def test_qwen_image_at_512(step):
    sigma, std, expected = QWEN_IMAGE[step]
    sigmas = qwen_image_sigmas()
    assert sigmas[step].item() == pytest.approx(sigma, abs=6e-4)
    measured, log_prob = on_policy(sigmas, step, 1.2)
    assert measured == pytest.approx(std, abs=6e-4)
    closed_form = -0.5 - np.log(measured) - 0.5 * np.log(2 * np.pi)
    assert closed_form == pytest.approx(expected, abs=1.1e-3)
    # The spread over 65,536 elements is 1 / sqrt(2 * 65536) = 0.0028.
    assert log_prob == pytest.approx(expected, abs=4 * 0.0028 + 1e-3)


def test_the_published_window_of_qwen_image():
    """Steps 3 and 4: the recorded standard is -0.919."""
    means = [on_policy(qwen_image_sigmas(), step, 1.2)[1] for step in (3, 4)]
    assert sum(means) / 2 == pytest.approx(-0.919, abs=0.009)


@pytest.mark.parametrize("step", MINIMAX_H3)
def test_minimax_h3_video(step):
    """Ten evaluations, so eleven of its inference steps."""
    diffusers = pytest.importorskip("diffusers", "0.40.0")
    scheduler = diffusers.MiniMaxH3Scheduler(shift=12.0)
    scheduler.set_timesteps(11)
    std, log_prob = on_policy(scheduler.sigmas, step, 0.7)
    closed_form = -0.5 - np.log(std) - 0.5 * np.log(2 * np.pi)
    assert closed_form == pytest.approx(MINIMAX_H3[step], abs=6e-4)
    assert log_prob == pytest.approx(MINIMAX_H3[step], abs=4 * 0.0028)
