import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from miles_rollout import RolloutBatch, RolloutEngine, RolloutParams
from miles_rollout.testing import tiny_qwen_image
from trainers.advantages import Advantages
from trainers.algorithms.base import Algorithm, LossTerms, Needs
from trainers.algorithms.grpo import GRPO, GRPOConfig
from trainers.lora import LoraConfig
from trainers.losses import grpo_loss_terms
from trainers.policy import Policy
from trainers.rewards.scoring import Scores
from trainers.trained_step import TrainedStep
from trainers.update import TrainChunk, TrainingError, UpdateMetrics, run_update

STEPS = (0, 2, 3)
CLIP = 1e-4
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, 3.0, 2.0, -0.7])
ALL = torch.ones(6)
WITHOUT_FOURTH = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0])


def move_adapter(policy: Policy, seed: int = 1) -> None:
    """B is zero at first, and then A has no gradient and the policy is the base."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if ".lora_B." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


@pytest.fixture(scope="module")
def setup() -> Any:
    engine = RolloutEngine(tiny_qwen_image())
    policy = Policy(engine, LoraConfig(rank=2, alpha=4.0), seed=0)
    move_adapter(policy)
    params = RolloutParams(sde_step_indices=STEPS)
    (batch,) = engine.generate(
        ["a cat", "a red circle on a blue background"],
        3,
        params,
        seed=0,
        chunk_size=6,
        decode=False,
        num_inference_steps=4,
        height=32,
        width=32,
    )
    return SimpleNamespace(engine=engine, policy=policy, batch=batch)


def _rows(batch: RolloutBatch, rows: list[int]) -> RolloutBatch:
    return replace(
        batch,
        trajectory=batch.trajectory.select(rows),
        prompts=[batch.prompts[i] for i in rows],
        group_ids=batch.group_ids[rows],
        sample_ids=batch.sample_ids[rows],
    )


def _chunk(batch: RolloutBatch, rows: list[int], weights: Tensor = ALL) -> TrainChunk:
    return TrainChunk(batch=_rows(batch, rows), advantages=ADVANTAGES[rows], weights=weights[rows])


def _whole(setup: Any, weights: Tensor = ALL) -> TrainChunk:
    return TrainChunk(batch=setup.batch, advantages=ADVANTAGES, weights=weights)


def _gradients(
    setup: Any,
    chunks: list[TrainChunk],
    *,
    micro: int | None = None,
    algorithm: Algorithm | None = None,
    max_grad_norm: float = 1e9,
) -> tuple[dict[str, Tensor], UpdateMetrics, float]:
    """At learning rate 0, so that every test finds the same weights."""
    steps = []
    optimizer = torch.optim.SGD(setup.policy.parameters.values(), lr=0.0)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    metrics, norm = run_update(
        setup.engine,
        setup.policy,
        algorithm or GRPO(GRPOConfig(clip_range=CLIP)),
        optimizer,
        chunks,
        micro_batch_size=micro,
        max_grad_norm=max_grad_norm,
    )
    live = any(chunk.weights.any() for chunk in chunks)
    assert steps == [1] * live, "one update is one optimizer step, if there is something to train"
    # The last block's text stream ends in nothing, so some parameters have no gradient at all.
    gradients = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in setup.policy.parameters.items()
    }
    return gradients, metrics, norm


def _gap(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Relative, over all parameters."""
    difference = sum((a[n] - b[n]).double().square().sum() for n in a)
    return float((difference / sum(t.double().square().sum() for t in a.values())).sqrt())


def _moving(gradients: Mapping[str, Tensor]) -> set[str]:
    return {name for name, gradient in gradients.items() if gradient.abs().max() > 0}


def test_the_gradient_is_that_of_the_mean_over_all_sample_step_pairs(setup: Any) -> None:
    gradients, metrics, norm = _gradients(setup, [_whole(setup)])
    parameters = setup.policy.parameters
    terms = []
    for step in STEPS:
        replay = setup.engine.replay(setup.batch.trajectory, step)
        old = setup.batch.trajectory.log_probs[:, step]
        terms.append(
            grpo_loss_terms(replay.log_prob, old, ADVANTAGES, clip_range=CLIP, adv_clip_max=5.0)[0]
        )
    loss = torch.stack(terms).mean()
    expected = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    assert _gap(gradients, dict(zip(parameters, expected, strict=True))) < 1e-6
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-6)
    assert norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in expected)))
    assert _moving(gradients) == _moving(dict(zip(parameters, expected, strict=True)))
    assert len(_moving(gradients)) > 30


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("weights", [ALL, WITHOUT_FOURTH], ids=["all", "masked"])
def test_micro_batches_accumulate_to_the_whole_batch(
    setup: Any, micro: int, weights: Tensor
) -> None:
    whole, expected, _ = _gradients(setup, [_whole(setup, weights)])
    parts, metrics, _ = _gradients(setup, [_whole(setup, weights)], micro=micro)
    assert _gap(whole, parts) < 2e-6
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-4)
    assert metrics.reduce().keys() == expected.reduce().keys()
    live = int(weights.sum()) * len(STEPS)
    assert metrics.ratios.shape == expected.ratios.shape == (live,)


@pytest.mark.parametrize("weights", [ALL, WITHOUT_FOURTH], ids=["all", "masked"])
def test_ragged_chunks_weigh_as_one_batch(setup: Any, weights: Tensor) -> None:
    whole, _, _ = _gradients(setup, [_whole(setup, weights)])
    rows = [[4, 0, 3], [5], [2, 1]]
    parts, _, _ = _gradients(setup, [_chunk(setup.batch, r, weights) for r in rows])
    assert _gap(whole, parts) < 2e-6


def test_a_masked_sample_is_as_if_left_out(setup: Any) -> None:
    # Its advantage is 3 here, which a live sample would be trained with.
    masked, metrics, _ = _gradients(setup, [_whole(setup, WITHOUT_FOURTH)])
    left_out, expected, _ = _gradients(setup, [_chunk(setup.batch, [0, 1, 2, 4, 5])])
    assert _gap(left_out, masked) < 2e-6
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-4)
    whole, _, _ = _gradients(setup, [_whole(setup)])
    assert _gap(whole, masked) > 0.05


def test_all_samples_masked_gives_zero_and_not_nan(setup: Any) -> None:
    gradients, metrics, norm = _gradients(setup, [_whole(setup, torch.zeros(6))])
    assert norm == metrics.loss == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients.values())
    assert metrics.reduce() == {}


def test_replay_in_the_rollout_batch_has_ratio_one(setup: Any) -> None:
    _, metrics, _ = _gradients(setup, [_whole(setup)])
    assert metrics.reduce()["ratio_abs_minus_1"] == 0
    assert metrics.step_gaps() == {f"step_{step}": 0.0 for step in STEPS}


@pytest.mark.parametrize("kind", ["mean", "velocity"])
def test_the_kl_alone_gives_a_gradient(setup: Any, kind: Any) -> None:
    still = TrainChunk(batch=setup.batch, advantages=torch.zeros(6), weights=ALL)
    flags = {n: p.requires_grad for n, p in setup.engine.pipe.transformer.named_parameters()}
    with_kl, metrics, norm = _gradients(
        setup, [still], algorithm=GRPO(GRPOConfig(kl_beta=1.0, kl=kind))
    )
    assert norm > 0
    assert len(_moving(with_kl)) > 30
    assert metrics.loss == pytest.approx(metrics.reduce()["kl"], rel=1e-5)
    after = {n: p.requires_grad for n, p in setup.engine.pipe.transformer.named_parameters()}
    assert after == flags
    _, _, norm = _gradients(setup, [still])
    assert norm == 0


def test_gradient_checkpointing_changes_no_bit(setup: Any) -> None:
    plain, _, _ = _gradients(setup, [_whole(setup)], algorithm=GRPO(GRPOConfig(kl_beta=0.1)))
    transformer = setup.engine.pipe.transformer
    transformer.enable_gradient_checkpointing()
    try:
        saved, metrics, _ = _gradients(
            setup, [_whole(setup)], algorithm=GRPO(GRPOConfig(kl_beta=0.1))
        )
    finally:
        transformer.disable_gradient_checkpointing()
    assert metrics.reduce()["ratio_abs_minus_1"] == 0
    assert all(torch.equal(plain[n], saved[n]) for n in plain)


def test_the_gradient_is_clipped_and_its_norm_is_told_before(setup: Any) -> None:
    _, _, norm = _gradients(setup, [_whole(setup)])
    clipped, _, told = _gradients(setup, [_whole(setup)], max_grad_norm=norm / 10)
    assert told == norm
    after = math.sqrt(sum(g.square().sum().item() for g in clipped.values()))
    assert after == pytest.approx(norm / 10, rel=1e-4)


class _Broken(Algorithm):
    """A loss that is not finite, or whose gradient is not."""

    reductions: ClassVar[Mapping[str, str]] = {}
    needs = Needs()

    def __init__(self, broken: str) -> None:
        self.broken = broken

    def advantages(self, scores: Scores, group_ids: Tensor) -> Advantages:
        raise NotImplementedError

    def terms(self, step: TrainedStep) -> LossTerms:
        loss = step.replay().log_prob
        if self.broken == "loss" and len(loss) > 1:
            loss = loss + torch.tensor([0.0, math.nan])
        if self.broken == "gradient":
            loss = (loss - loss.detach()).sqrt()
        return LossTerms(loss=loss)


def test_a_loss_that_is_not_finite_stops_with_step_and_sample(setup: Any) -> None:
    with pytest.raises(
        TrainingError,
        match=r"loss of step 0 is not finite for prompt 1 \('a red .*'\) sample 0; got",
    ):
        _gradients(setup, [_whole(setup)], micro=2, algorithm=_Broken("loss"))


def test_a_gradient_that_is_not_finite_moves_no_weight(setup: Any) -> None:
    before = setup.policy.tensors()
    optimizer = torch.optim.SGD(setup.policy.parameters.values(), lr=1.0)
    with pytest.raises(TrainingError, match="the gradient is not finite; got norm"):
        run_update(
            setup.engine,
            setup.policy,
            _Broken("gradient"),
            optimizer,
            [_whole(setup)],
            micro_batch_size=None,
            max_grad_norm=1.0,
        )
    assert all(torch.equal(t, before[n]) for n, t in setup.policy.tensors().items())


def test_reduction_weighs_every_row_alike() -> None:
    metrics = UpdateMetrics({"a": "mean", "b": "max"})
    for values in ([1.0, 2.0, 3.0], [10.0]):
        rows = torch.tensor(values)
        metrics.add({"a": rows, "b": rows}, {"step_0": rows})
    assert metrics.reduce() == {"a": 4.0, "b": 10.0}


def test_an_update_without_a_live_sample_moves_no_weight_by_momentum(setup: Any) -> None:
    before = setup.policy.tensors()
    optimizer = torch.optim.AdamW(setup.policy.parameters.values(), lr=1e-2)
    how = {"micro_batch_size": None, "max_grad_norm": 1.0}
    arguments = (setup.engine, setup.policy, GRPO(GRPOConfig(clip_range=CLIP)), optimizer)
    try:
        run_update(*arguments, [_whole(setup)], **how)
        moved = setup.policy.tensors()
        assert any(not torch.equal(moved[n], before[n]) for n in before)
        run_update(*arguments, [_whole(setup, torch.zeros(6))], **how)
        now = setup.policy.tensors()
        assert all(torch.equal(moved[n], now[n]) for n in moved)
    finally:
        setup.policy.load(before)


def test_metrics_are_of_the_live_rows_alone(setup: Any) -> None:
    """Two rows of which one is masked: what is told is of the other."""
    _, metrics, _ = _gradients(setup, [_whole(setup, WITHOUT_FOURTH)])
    assert metrics.ratios is not None
    assert len(metrics.ratios) == 5 * len(STEPS)


def test_chosen_rows_are_replayed_and_a_chunk_without_one_is_left_out(setup: Any) -> None:
    calls: list[int] = []
    hook = setup.engine.pipe.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    chosen = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    some = replace(_whole(setup, chosen), rows=[0, 4])
    none = replace(_whole(setup, torch.zeros(6)), rows=[])
    try:
        gradients, metrics, _ = _gradients(setup, [some, none])
    finally:
        hook.remove()
    assert calls == [2] * len(STEPS)
    expected, _, _ = _gradients(setup, [_chunk(setup.batch, [0, 4])])
    assert _gap(expected, gradients) < 2e-6
    assert metrics.ratios is not None
    assert len(metrics.ratios) == 2 * len(STEPS)


def test_a_metric_without_a_reduction_is_named(setup: Any) -> None:
    metrics = UpdateMetrics({"a": "mean"})
    with pytest.raises(
        TrainingError, match=r"the rows of b become one number; got reductions of a,"
    ):
        metrics.add({"b": torch.zeros(1)}, {})
