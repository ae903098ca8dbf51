"""What others build on: names, signatures, types, and what an import drags in.

A change here breaks someone's code: write it into CHANGELOG.md, with "before" and "after".
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import miles_rollout

ROOT = Path(__file__).resolve().parent.parent

ERRORS = {
    "MilesRolloutError": Exception,
    "RolloutParamsError": ValueError,
    "RolloutStateError": RuntimeError,
}
MADE_BY_ROLLOUT = {"RolloutSession"}

SDK = {
    "FlowRolloutController": (
        "(params, seeds, *, stream, sigmas, timesteps, velocity_sign=1.0, mask=None, "
        "euler_ode=False)"
    ),
    "FlowRolloutController.trajectory": "(self)",
    "FlowRolloutController.transition": "(self, velocity, sample, *, step, ode, out_dtype=None)",
    "FlowStep": "(next_sample, std, log_prob, _means)",
    "Media": ("(*, image=None, video=None, audio=None, action=None, fps=None, sampling_rate=None)"),
    "Replay": "(*, streams=<factory>, log_prob)",
    "RolloutBatch": (
        "(*, trajectory, latents, prompts, group_ids, sample_ids, metadata, media=None)"
    ),
    "RolloutEngine": "(pipe, adapter=None)",
    "RolloutEngine.decode": "(self, latents, **request)",
    "RolloutEngine.drop_text_encoders": "(self)",
    "RolloutEngine.encode": "(self, prompts, *, max_sequence_length=None, inputs=None, **sampling)",
    "RolloutEngine.from_pretrained": "(name, **kwargs)",
    "RolloutEngine.generate": (
        "(self, prompts, group_size, params, *, seed, iteration=0, prompt_ids=None, "
        "metadata=None, negative_prompt=None, inputs=None, max_sequence_length=None, "
        "chunk_size=None, same_noise=False, share_prefix=False, decode=True, **sampling)"
    ),
    "RolloutEngine.replay": "(self, trajectory, step, samples=None)",
    "RolloutEngine.velocities": "(self, trajectory, step, states)",
    "RolloutParams": (
        "(*, sde_type='sde', noise_level=0.7, sde_step_indices=None, sde_streams=None, "
        "return_step_indices=None, call_step_indices=(), return_means=False, "
        "stream_weights='element', latent_dtype='pipeline', debug=False)"
    ),
    "RolloutParams.plan": "(self, sigmas, stream)",
    "RolloutTrajectory": (
        "(*, streams, params, conditions=(), guidance=<factory>, request=<factory>)"
    ),
    "RolloutTrajectory.cat": "(trajectories)",
    "RolloutTrajectory.load": "(path)",
    "RolloutTrajectory.pair": "(self, stream, step)",
    "RolloutTrajectory.save": "(self, path)",
    "RolloutTrajectory.score": "(self, step, velocities)",
    "RolloutTrajectory.select": "(self, samples)",
    "RolloutTrajectory.to": "(self, device)",
    "SharedPrefix": "()",
    "StreamReplay": "(*, velocity, mean, std, log_prob, mask=None)",
    "StreamTrajectory": (
        "(*, latents, latent_step_indices, timesteps, sigmas, log_probs, sde_step_indices, "
        "num_elements, mask=None, velocity_sign=1.0, means=<factory>, debug=<factory>)"
    ),
    "StreamTrajectory.latent": "(self, boundary)",
    "flow_step": (
        "(sde_type, sample, velocity, *, sigma, sigma_next, noise_level, sigma_max=None, "
        "noise=None, next_sample=None, mask=None, out_dtype=None)"
    ),
    "rollout": "(pipe, params, seeds, *, adapter=None, prefix=None)",
}

MODULES = {
    "hooks.Sharding": "(*, gather, shard)",
    "hooks.abort_rollout_if_enabled": "(request)",
    "hooks.accept_transition": "(scheduler, observer=None)",
    "hooks.finalize_rollout_if_enabled": "(request)",
    "hooks.init_rollout_env_if_enabled": "(request, conditions, *, batch_axes=None)",
    "hooks.prepare_rollout_if_enabled": (
        "(request, params, seeds=(), *, schedulers=None, build_controller=None, "
        "ode_transition=None, sharding=None)"
    ),
    "hooks.rollout_step_kwargs": "(request, *, stream)",
    "sglang_layout.from_sglang": (
        "(responses, *, params, velocity_sign=None, one_minus_sigma=(), log_prob_no_const=None, "
        "calls=None, batch_axes=None, blocks=None, axis_orders=None, guidance=None, request=None)"
    ),
    "sglang_layout.to_sglang": (
        "(trajectory, *, stream=None, branches=None, per_step=('hidden_states', 'timestep'), "
        "wire=False)"
    ),
}

TRAINERS = {
    "advantages.best_and_worst": "(rewards, group_ids, *, best, worst)",
    "advantages.gdpo_advantages": ("(rewards, weights, group_ids, *, std='group', epsilon=0.0001)"),
    "advantages.group_advantages": "(rewards, group_ids, *, std='batch', epsilon=0.0001)",
    "advantages.zero_std_groups": "(rewards, group_ids)",
    "losses.diffusion_nft_loss": (
        "(velocity, old_velocity, ref_velocity, *, x0, xt, t, reward_prob, beta=1.0, "
        "adv_clip_max=5.0, adaptive_weight_min=1e-05, ref_kl_coef=0.0001)"
    ),
    "losses.grpo_guard_loss": (
        "(log_probs, old_log_probs, advantages, *, mean, old_mean, std_dev_t, sqrt_dt, clip_range, "
        "adv_clip_max)"
    ),
    "losses.grpo_loss": "(log_probs, old_log_probs, advantages, *, clip_range, adv_clip_max)",
    "losses.grpo_loss_terms": "(log_probs, old_log_probs, advantages, *, clip_range, adv_clip_max)",
    "losses.mean_kl": "(mean, ref_mean, std, *, mask=None)",
    "losses.reward_probability": "(advantages, *, adv_clip_max)",
    "losses.velocity_mse": "(velocity, ref_velocity, *, mask=None)",
}


def signature(thing: object) -> str:
    """Names, kinds and defaults; the types are the type checker's affair."""
    found = inspect.signature(thing)  # type: ignore[arg-type]
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def test_the_public_names_are_these():
    names = {name for name in SDK if "." not in name} | ERRORS.keys() | MADE_BY_ROLLOUT
    assert set(miles_rollout.__all__) == names
    assert sorted(miles_rollout.__all__) == miles_rollout.__all__


@pytest.mark.parametrize("name", SDK)
def test_a_signature_of_the_sdk(name):
    thing: object = miles_rollout
    for part in name.split("."):
        thing = getattr(thing, part)
    assert signature(thing) == SDK[name]


@pytest.mark.parametrize("name", MODULES)
def test_a_signature_of_a_module_for_embedders(name):
    module, _, function = name.partition(".")
    assert signature(getattr(import_module(f"miles_rollout.{module}"), function)) == MODULES[name]


@pytest.mark.parametrize("name", TRAINERS)
def test_a_signature_of_the_trainers(name):
    module, _, function = name.partition(".")
    assert signature(getattr(import_module(f"trainers.{module}"), function)) == TRAINERS[name]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_ours_and_the_standard_one_it_refines(name):
    error = getattr(miles_rollout, name)
    assert issubclass(error, miles_rollout.MilesRolloutError)
    assert issubclass(error, ERRORS[name])


@pytest.mark.parametrize("package", ["miles_rollout", "trainers"])
def test_type_checkers_may_read_the_annotations(package):
    assert (ROOT / package / "py.typed").is_file()


def test_the_sdk_imports_no_trainer_no_recipe_no_tracker_and_no_family_unasked():
    code = (
        "import sys, miles_rollout, miles_rollout.testing\n"
        "families = [f'miles_rollout.testing.{name}' for name in ('flux', 'sd3')]\n"
        "print([m for m in ('trainers', 'recipes', 'wandb', *families) if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_the_version_is_that_of_the_package():
    installed = metadata.version("miles-rollout")
    assert miles_rollout.__version__ == installed, "install again: touch setup.py && make test"


def test_the_changelog_has_the_version():
    headings = [
        line.removeprefix("## ").split(" ")[0]
        for line in (ROOT / "CHANGELOG.md").read_text().splitlines()
        if line.startswith("## ")
    ]
    assert headings[0] == "Unreleased"
    assert miles_rollout.__version__ in headings
