"""Single steps of every kind from fixed numbers: what is the same on every processor.

Mean and next sample are sums and products of single elements, which IEEE arithmetic rounds in one way,
whatever instructions compute them (ATEN_CPU_CAPABILITY default, avx2 and avx512 gave the same bits). So
they are compared bit for bit where tolerances would have to stand for a whole recipe. A log-prob is a
sum, whose order is the processor's, and is no part of it.
"""

import torch
from torch import Tensor

from miles_rollout.transitions import SDE_TYPES, flow_step
from tests.standards.observed import Entries, pinned, sha256

NAME = "steps"
SIGMAS = ((1.0, 0.875), (0.7, 0.6), (0.3, 0.2))
"""From and to; 0.875 stands in for the first in a denominator."""
NOISE_LEVEL = 0.7


def steps() -> Entries:
    """sha256 of the mean, the std and the next sample of every kind of step from every sigma."""
    sample, velocity, noise = (_spread(a) for a in (0.7548776662466927, 0.569840290998, 0.81917251))
    found: Entries = {}
    with pinned(), torch.no_grad():
        for kind in SDE_TYPES:
            drawn = {} if kind == "ode" else {"noise": noise}
            for sigma, sigma_next in SIGMAS:
                step = flow_step(
                    kind,
                    sample,
                    velocity,
                    sigma=sigma,
                    sigma_next=sigma_next,
                    noise_level=NOISE_LEVEL,
                    sigma_max=SIGMAS[0][1],
                    **drawn,
                )
                for part in ("mean", "std", "next_sample"):
                    found[f"{kind}/{sigma}/{part}/sha256"] = sha256([getattr(step, part)])
    return found


def _spread(factor: float) -> Tensor:
    """float32 [3, 37] in -2..2, from float64 products and remainders: no generator is asked."""
    numbers = torch.arange(1, 112, dtype=torch.float64) * factor
    return ((numbers.remainder(1) - 0.5) * 4).float().reshape(3, 37)
