"""What the tests of the session, the trajectory and the engine share."""

import itertools

import torch

from miles_rollout import RolloutEngine, RolloutParams, rollout

PROMPTS = ["a red circle", "a blue square on a green background"]
SEEDS = [11, 12]
STEPS = 4
ODE = RolloutParams(sde_type="ode")


def generators(count=2, seed=0):
    return [torch.Generator().manual_seed(seed + i) for i in range(count)]


def call(pipe, prompts=PROMPTS, **kwargs):
    """The stock call at a test's size, with images out; ``scale`` above 1 turns CFG on."""
    scale = kwargs.pop("scale", 1.0)
    kwargs.setdefault("generator", generators(len(prompts)))
    kwargs.setdefault("num_inference_steps", STEPS)
    kwargs.setdefault("output_type", "latent")
    return pipe(
        prompts,
        negative_prompt=[" "] * len(prompts) if scale > 1 else None,
        true_cfg_scale=scale,
        height=32,
        width=32,
        **kwargs,
    ).images


def run(pipe, params=None, seeds=SEEDS, **kwargs):
    """One rollout of `call`: its trajectory and its output."""
    with rollout(pipe, params or RolloutParams(), seeds) as session:
        output = call(pipe, **kwargs)
    return session.trajectory, output


def rows_of(values):
    """Of the first tensor, or the length of the list of tensors that comes before it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return len(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return len(value)
    raise AssertionError(values)


def marked(pipe):
    """A pipeline of a subclass whose loop adds (1 + step) to its prompt after every step."""

    class Marked(type(pipe)):
        def __call__(self, *args, **kwargs):
            def mark(_, step, __, values):
                return {"prompt_embeds": values["prompt_embeds"] + step + 1}

            return super().__call__(
                *args,
                callback_on_step_end=mark,
                callback_on_step_end_tensor_inputs=["prompt_embeds"],
                **kwargs,
            )

    made = Marked(**pipe.components)
    made.set_progress_bar_config(disable=True)
    return made


def assert_marks(trajectory):
    """The denoiser was shown the prompt that `marked` made of it."""
    calls = trajectory.conditions[0].steps
    prompts = [calls[step][0].kwargs["encoder_hidden_states"] for step in sorted(calls)]
    assert len(prompts) > 1
    for step, (before, after) in enumerate(itertools.pairwise(prompts)):
        torch.testing.assert_close(after, before + step + 1)


class Calls:
    """Counts the calls of modules, and the rows of each."""

    def __init__(self, *modules, rows_of=rows_of):
        self.rows = []
        self._rows_of = rows_of
        self._handles = [
            m.register_forward_pre_hook(self._count, with_kwargs=True) for m in modules
        ]

    def _count(self, _, args, kwargs):
        self.rows.append(self._rows_of([*args, *kwargs.values()]))

    def __len__(self):
        return len(self.rows)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()


SIZE = {"height": 32, "width": 32, "num_inference_steps": STEPS}
DEBUG = RolloutParams(debug=True)
CFG = {"negative_prompt": " ", "true_cfg_scale": 3.0}


def generate(pipe, prompts=PROMPTS, group_size=1, params=DEBUG, **kwargs):
    engine = pipe if isinstance(pipe, RolloutEngine) else RolloutEngine(pipe)
    return list(
        engine.generate(
            prompts, group_size, params, **{"seed": 0, "decode": False, **SIZE, **kwargs}
        )
    )


def assert_same(ours, theirs):
    """Bitwise the same rollout. By states, too: a log-prob is that of the noise, whatever the
    denoiser says."""
    assert torch.equal(ours.log_probs, theirs.log_probs)
    assert ours.streams.keys() == theirs.streams.keys()
    for name, stream in ours.streams.items():
        assert torch.equal(stream.latents, theirs.streams[name].latents), name


def assert_replays(engine, trajectory, samples=None):
    """Bitwise the recorded velocity and log-prob of every stream in every replayable step."""
    rows = slice(None) if samples is None else samples
    assert trajectory.replayable_steps
    for step in trajectory.replayable_steps:
        replay = engine.replay(trajectory, step, samples)
        assert torch.equal(replay.log_prob, trajectory.log_probs[rows, step])
        for name, again in replay.streams.items():
            stream = trajectory.streams[name]
            assert torch.equal(again.log_prob, stream.log_probs[rows, step])
            if stream.debug:
                assert torch.equal(again.velocity.float(), stream.debug["velocity"][rows, step])
                assert torch.equal(again.mean, stream.debug["mean"][rows, step])
                assert torch.equal(again.std, stream.debug["std"][rows, step])
