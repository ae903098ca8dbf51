"""What an algorithm and a rollout have to agree on, said in one line before a model is loaded."""

from pathlib import Path

import pytest

from tests.tiny_run import tiny_config
from trainers.config import TrainConfig
from trainers.config_loader import ConfigError, load, to_yaml

NFT = ("algorithm.type=diffusion_nft", "rollout.sde_type=ode")
PROGRESSIVE = "rollout.window={type: progressive, size: 2}"
GUIDED = ("rollout.true_cfg_scale=4", "rollout.negative_prompt=' '")
SD3 = "model={pipeline: tiny-sd3, lora: {rank: 2, targets: [attn.to_q]}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.sde_type=ode"],
            "algorithm grpo: an ode rollout has no log-prob to train on; got rollout.sde_type ode; "
            "set sde, cps or dance_sde, or algorithm.type diffusion_nft",
        ),
        (
            ["algorithm.type=grpo_guard", "rollout.sde_type=cps"],
            "algorithm grpo_guard: is for steps of another kind; got rollout.sde_type cps; set sde "
            "or dance_sde",
        ),
        (["algorithm.type=cps"], "got rollout.sde_type sde; set cps"),
        (["algorithm.type=dance_grpo"], "got rollout.sde_type sde; set dance_sde"),
        (
            ["algorithm.type=mix_grpo"],
            "algorithm mix_grpo: the window has to move in the course of the run; got "
            "rollout.window of type fixed, always at steps [0, 2] of 4; set progressive or random, and "
            "a size that leaves room",
        ),
        (
            ["algorithm.type=mix_grpo", "rollout.window={type: random, size: 4}"],
            "got rollout.window of type random, always at steps [0, 1, 2, 3] of 4; set",
        ),
        (
            ["algorithm.type=mix_grpo", "rollout.window={type: progressive, size: 4}"],
            "got rollout.window of type progressive, always at steps [0, 1, 2, 3] of 4; set",
        ),
        (
            ["algorithm.type=flow_grpo_fast", "rollout.window={type: all}"],
            "algorithm flow_grpo_fast: trains at most 3 steps an iteration; got a rollout.window of "
            "4; set a smaller one, or algorithm.type grpo",
        ),
        (
            ["algorithm.timestep_fraction=0.4"],
            "timestep_fraction: leaves no step to train; got 0.4 of 2 steps; set it higher",
        ),
        (
            [*NFT, *GUIDED],
            "algorithm diffusion_nft: its loss is on the velocity of one denoiser call; got "
            "guidance with true_cfg_scale 4.0; set true_cfg_scale to 1",
        ),
        # By the argument of another family, which has an empty prompt to guide by.
        (
            [*NFT, "model={pipeline: tiny-z-image, lora: {rank: 2, targets: [attention.to_q]}}"],
            "noises finished samples, but this pipeline's denoiser is called with more than the sample "
            "in one argument; got 'tiny-z-image'; set an algorithm on log-probs, such as grpo",
        ),
        (
            [*NFT, SD3, "rollout.guidance_scale=4"],
            "with guidance_scale 4.0; set guidance_scale to 1",
        ),
        (
            [*NFT, "rollout.same_noise=true"],
            "algorithm diffusion_nft: an ode rollout makes one picture of one noise, so the samples "
            "of a group would be equal; got rollout.same_noise true; set it false, or a stochastic",
        ),
        (
            ["algorithm={kl_beta: 0.1, reference: start}"],
            "algorithm.reference start: the run starts from no LoRA, so its start is the base; got "
            "model.lora.start null; set it, or algorithm.reference base",
        ),
        (
            ["algorithm={kl_beta: 0.1, reference: start}", "model.lora=null"],
            "algorithm.reference start: the run starts from no LoRA",
        ),
        (["algorithm.reference=start"], "reference has no effect at kl_beta 0; got 'start'; set"),
        (
            [*NFT, "algorithm.reference=start", "algorithm.kl_beta=0"],
            "reference has no effect at kl_beta 0; got 'start'; set kl_beta above 0",
        ),
        (
            ["algorithm.best_of_group=3", "algorithm.worst_of_group=2"],
            "algorithm grpo: best_of_group and worst_of_group choose 2 or more of the group's 4 "
            "samples; got 5; set for example 4 and 4, or 0 and 0 for all",
        ),
        (["algorithm.best_of_group=1"], "choose 2 or more of the group's 4 samples; got 1; set"),
        (["algorithm.worst_of_group=-1"], "must be >= 0; got 0, -1"),
        (
            ["algorithm.step_weights={'2': 2.0, '3': 0.5}"],
            "algorithm.step_weights: step 3 is never trained, so its weight has no effect; got a "
            "rollout.window over [0, 2] of 4 steps; leave it out",
        ),
        (["algorithm.kl=velocity"], "kl has no effect at kl_beta 0; got 'velocity'; set kl_beta"),
        (
            ["algorithm.type=diffusion_nft", "rollout.sde_streams=[image]"],
            "trains all streams by their weights; got rollout.sde_streams ['image']; set null",
        ),
        (
            ["ema={decay: 0.9, every: 3}", "iterations=2"],
            "ema.every: the run's 2 updates end before the average moves, so it would stay the "
            "initial weights; got 3; set it lower, or ema null",
        ),
        (
            [
                "algorithm.best_of_group=1",
                "algorithm.worst_of_group=1",
                "rollout.chunk_size=1",
                "optim.updates_per_iteration=8",
            ],
            "optim.updates_per_iteration: more than the 4 samples that an iteration trains; got 8",
        ),
        (
            ["algorithm.step_weights={'0': -1.0}"],
            'weights must be >= 0 and finite; got {0: -1.0}; set for example {"0": 0.5}',
        ),
        (
            [*NFT, "algorithm.beta=0"],
            "beta and adaptive_weight_min must be positive and kl_beta >=",
        ),
        ([*NFT, "algorithm.kl_beta=-1"], "and kl_beta >= 0; got 1.0, 1e-05, -1.0"),
        ([*NFT, "algorithm.old_policy.hold=1"], "old_policy: needs flat >= 0, rate >= 0 and hold"),
        (["algorithm.advantage_epsilon=-1"], "advantage_epsilon must be finite and >= 0; got -1"),
        (["algorithm.timestep_fraction=0"], "timestep_fraction must be within 0..1, 0 excluded"),
        (["ema={decay: 1.0}"], "decay must be within 0..1, 1 excluded"),
        (
            ["ema={evaluate: false, export: false}"],
            "ema has no effect: neither evaluate nor export",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(Path("runs/x"), *overrides)
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.type=grpo_guard", "rollout.sde_type=dance_sde"],
        ["algorithm.type=cps", "rollout.sde_type=cps"],
        ["algorithm.type=dance_grpo", "rollout.sde_type=dance_sde"],
        ["algorithm.type=mix_grpo", PROGRESSIVE],
        ["algorithm.type=mix_grpo", "rollout.window={type: random, size: 2}"],
        ["algorithm.type=flow_grpo_fast"],
        [*NFT],
        [*NFT, "rollout.window={type: all}"],
        [*NFT, SD3, "rollout.guidance_scale=1"],
        # A stochastic sampler may share the first noise, and embedded guidance is an input.
        ["algorithm.type=diffusion_nft", "rollout.same_noise=true"],
        ["algorithm={kl_beta: 0.1, reference: start}", "model.lora.start=somewhere"],
        ["algorithm.best_of_group=2", "algorithm.worst_of_group=2"],
    ],
)
def test_what_fits_is_a_config(overrides: list[str]) -> None:
    assert tiny_config(Path("runs/x"), *overrides).algorithm.type in str(overrides) + "grpo"


def test_weights_of_steps_are_read_and_written_with_quotes(tmp_path: Path) -> None:
    """Keys of a config are text; those of this one are numbers."""
    config = tiny_config(tmp_path, "algorithm.step_weights={'0': 0.5, '2': 3}")
    assert config.algorithm.step_weights == {0: 0.5, 2: 3.0}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(TrainConfig, [tmp_path / "config.yaml"]) == config


@pytest.mark.parametrize(
    ("window", "is_allowed"),
    [
        ("{type: progressive, size: 2, start_max: 1}", True),
        ("{type: progressive, size: 2, shift: 3}", True),
        ("{type: progressive, size: 2}", False),
    ],
)
def test_cps_is_refused_for_a_window_that_comes_to_the_last_step_later(
    window: str, is_allowed: bool
) -> None:
    overrides = (f"rollout.window={window}", "rollout.sde_type=cps", "algorithm.type=cps")
    if is_allowed:
        tiny_config(Path("runs/x"), *overrides)
        return
    with pytest.raises(ConfigError, match="cps has no density in the last step 3"):
        tiny_config(Path("runs/x"), *overrides)
