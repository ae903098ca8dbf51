"""What the tests of SGLang's layout share."""

from miles_rollout.conditions import DenoiserCall, StreamState


def qwen_calls(s):
    """What `QwenImagePipeline` gives its transformer; the branches are calls of their own."""
    dtype = s.pos_cond_kwargs["encoder_hidden_states"].dtype
    each_step = {
        "hidden_states": StreamState("image", dtype),
        "timestep": s.timesteps["image"].expand(s.num_samples).to(dtype) / 1000,
        "guidance": s.guidance,
    }
    branches = [s.pos_cond_kwargs, s.neg_cond_kwargs]
    return [DenoiserCall("transformer", (), each_step | kw) for kw in branches if kw]
