"""What diffusers can do to a pipeline, inside a rollout: bitwise stock and bitwise replay, or refused.

The names are those of the table in ``docs/models.md``, which is made from `FEATURES`.
"""

import accelerate
import pytest
import torch
import torch._dynamo
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
)
from diffusers.hooks import apply_first_block_cache
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from peft import LoraConfig

from miles_rollout import (
    RolloutEngine,
    RolloutParams,
    RolloutParamsError,
    RolloutStateError,
    rollout,
)
from miles_rollout.noise import keyed_noise
from miles_rollout.pipelines.docs import FEATURES
from miles_rollout.testing import tiny_qwen_image
from tests.miles_rollout.tiny import (
    DEBUG,
    ODE,
    PROMPTS,
    SEEDS,
    Calls,
    assert_replays,
    call,
    generators,
    run,
)

CPU = torch.device("cpu")


def lora(pipe):
    """With a LoRA that does something, the only weights that are trained."""
    with torch.random.fork_rng(devices=[]):
        pipe.transformer.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_k"]))
    for name, weight in pipe.transformer.named_parameters():
        if ".lora_" in name:
            weight.data.copy_(0.05 * keyed_noise([0], weight.shape, "features", name)[0])
            weight.data = weight.data.to(pipe.dtype)


def offload(module, kind):
    module.enable_group_offload(
        onload_device=CPU, offload_device=CPU, offload_type=kind, num_blocks_per_group=1
    )


def casting(pipe):
    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=pipe.transformer.dtype
    )


def compiled(pipe):
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


def tiles(pipe):
    pipe.vae.enable_slicing()
    pipe.vae.enable_tiling(
        tile_sample_min_height=16,
        tile_sample_min_width=16,
        tile_sample_stride_height=8,
        tile_sample_stride_width=8,
    )


def torchao(pipe):
    library = pytest.importorskip("torchao.quantization")
    library.quantize_(pipe.transformer, library.Int8WeightOnlyConfig())
    lora(pipe)


def quanto(pipe):
    library = pytest.importorskip("optimum.quanto")
    library.quantize(pipe.transformer, weights=library.qint8)
    library.freeze(pipe.transformer)
    lora(pipe)


def bitsandbytes(pipe):
    library = pytest.importorskip("bitsandbytes")
    blocks = pipe.transformer.transformer_blocks
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                with torch.random.fork_rng(devices=[]):
                    made = library.nn.Linear4bit(
                        child.in_features, child.out_features, compute_dtype=child.weight.dtype
                    )
                made.load_state_dict(child.state_dict())
                setattr(parent, name, made.to("cpu"))
    pipe.transformer.requires_grad_(False)
    lora(pipe)


BEFORE_LORA = {"torchao base": torchao, "quanto base": quanto, "bitsandbytes base": bitsandbytes}
ALLOWED = {
    "model CPU offload": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential CPU offload": lambda pipe: accelerate.cpu_offload(pipe.transformer, CPU),
    "group offload, blocks": lambda pipe: offload(pipe.transformer, "block_level"),
    "group offload, leaves": lambda pipe: offload(pipe, "leaf_level"),
    "layerwise casting": casting,
    "fused QKV": lambda pipe: pipe.transformer.fuse_qkv_projections(),
    "compiled denoiser": lambda pipe: pipe.transformer.compile(backend="aot_eager"),
    "compiled blocks": lambda pipe: pipe.transformer.compile_repeated_blocks(backend="eager"),
    "compiled copy": compiled,
    "attention slicing": lambda pipe: pipe.enable_attention_slicing(),
    "attention backend": lambda pipe: pipe.transformer.set_attention_backend("_native_math"),
    "VAE tiling and slicing": tiles,
    "gradient checkpointing": lambda pipe: pipe.transformer.enable_gradient_checkpointing(),
    "channels last": lambda pipe: pipe.transformer.to(memory_format=torch.channels_last),
    "fused LoRA": lambda pipe: pipe.transformer.fuse_lora(),
    **BEFORE_LORA,
}

BLOCKS = {
    "spatial_attention_block_skip_range": 2,
    "spatial_attention_timestep_skip_range": (-1, 1001),
    "current_timestep_callback": lambda: 500,
    "spatial_attention_block_identifiers": ("transformer_blocks",),
}
CACHES = {
    "FirstBlockCache": FirstBlockCacheConfig(threshold=0.1),
    "TaylorSeer": TaylorSeerCacheConfig(),
    "MagCache": MagCacheConfig(mag_ratios=[1.0] * 4, num_inference_steps=4),
    "SeaCache": SeaCacheConfig(),
    "TextKVCache": TextKVCacheConfig(),
    "FasterCache": FasterCacheConfig(
        **BLOCKS,
        tensor_format="BCHW",
        is_guidance_distilled=True,
        attention_weight_callback=lambda _: 0.5,
    ),
    "PyramidAttentionBroadcast": PyramidAttentionBroadcastConfig(**BLOCKS),
}
BY_HAND = "a cache applied by hand"
TRAINS = {feature.name: feature.trains for feature in FEATURES}


@pytest.fixture(autouse=True)
def _attention_backend():
    """Setting one on a model sets it for all that have none of their own."""
    before, _ = _AttentionBackendRegistry.get_active_backend()
    yield
    _AttentionBackendRegistry.set_active_backend(before)


@pytest.fixture(name="_fresh_dynamo")
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(name="dtype", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def _dtype(request):
    return request.param


def pipe_with(name, dtype):
    pipe = tiny_qwen_image(dtype=dtype)
    if name not in BEFORE_LORA:
        lora(pipe)
    ALLOWED[name](pipe)
    return pipe


def test_the_table_is_what_is_tried():
    allowed = {feature.name for feature in FEATURES if feature.allowed}
    assert allowed == set(ALLOWED)
    assert {feature.name for feature in FEATURES} - allowed == {*CACHES, BY_HAND}


def assert_promises(name, dtype, scale):
    pipe = pipe_with(name, dtype)
    stock = call(pipe, scale=scale)
    trajectory, inside = run(pipe, ODE, scale=scale)
    assert torch.equal(inside, stock)
    trajectory, noisy = run(pipe, DEBUG, scale=scale)
    assert not torch.equal(noisy, stock)
    assert torch.equal(call(pipe, scale=scale), stock)
    engine = RolloutEngine(pipe)
    with torch.no_grad():
        assert_replays(engine, trajectory)
    if TRAINS[name]:
        assert_replays(engine, trajectory)
        trained = [p for n, p in pipe.transformer.named_parameters() if ".lora_" in n]
        assert all(p.requires_grad for p in trained)
        gradients = torch.autograd.grad(engine.replay(trajectory, 1).log_prob.sum(), trained)
        assert all(torch.isfinite(g).all() for g in gradients)
        assert sum(bool(g.abs().sum() > 0) for g in gradients) >= len(trained) // 2


@pytest.mark.parametrize("name", [name for name in ALLOWED if "compiled" not in name])
def test_a_rollout_is_bitwise_stock_and_its_replay_bitwise_the_rollout(name, dtype):
    assert_promises(name, dtype, scale=3.0)


# Dynamo looks at .grad of non-leaf tensors and hides the warning by its text.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("name", [name for name in ALLOWED if "compiled" in name])
def test_a_compiled_denoiser_keeps_the_promises(name):
    """In float32 and without guidance: each graph costs seconds."""
    assert_promises(name, torch.float32, scale=1.0)


def test_the_denoiser_computes_otherwise_with_the_features_that_change_it():
    """What the test above rests on: these are on, and are seen in the latents."""
    plain = call(pipe_with("attention slicing", torch.float32), scale=3.0)
    for name in ("layerwise casting", "fused LoRA"):
        assert not torch.equal(call(pipe_with(name, torch.float32), scale=3.0), plain)


def test_weights_that_leave_the_device_get_no_gradient_and_that_is_said():
    pipe = pipe_with("sequential CPU offload", torch.float32)
    trajectory, _ = run(pipe, DEBUG)
    with pytest.raises(RolloutStateError, match=r"offloaded between its calls.*torch.no_grad\(\)"):
        RolloutEngine(pipe).replay(trajectory, 1)


def test_a_fused_lora_is_not_trained_and_that_is_seen():
    pipe = pipe_with("fused LoRA", torch.float32)
    trajectory, _ = run(pipe, DEBUG)
    log_prob = RolloutEngine(pipe).replay(trajectory, 1).log_prob
    with pytest.raises(RuntimeError, match="does not require grad"):
        log_prob.sum().backward()


def test_tiles_decode_as_the_pipeline_does(dtype):
    pipe = pipe_with("VAE tiling and slicing", dtype)
    pictures = call(pipe, output_type="pt")
    (latents,) = (call(pipe),)
    media = RolloutEngine(pipe).decode({"image": latents}, height=32, width=32)
    for picture, made in zip(pictures, media, strict=True):
        assert torch.equal(picture.float(), made.image)
    pipe.vae.disable_tiling()
    assert not torch.equal(call(pipe, output_type="pt"), pictures)


@pytest.mark.parametrize("name", [*CACHES, BY_HAND])
def test_a_cache_is_refused_by_name_before_the_denoiser_runs(name):
    pipe = tiny_qwen_image()
    trajectory, _ = run(pipe, DEBUG)
    if name == BY_HAND:
        apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.1))
        expected = "fbc_leader_block_hook"
    else:
        pipe.transformer.enable_cache(CACHES[name])
        expected = type(CACHES[name]).__name__
    message = rf"a cache changes what transformer .*; got {expected}; call transformer.disable_c"
    with Calls(pipe.transformer) as calls, Calls(pipe.text_encoder) as texts:
        with pytest.raises(RolloutParamsError, match=message), rollout(pipe, ODE, SEEDS):
            pipe(PROMPTS, num_inference_steps=4, height=32, width=32, generator=generators())
        with pytest.raises(RolloutParamsError, match=message):
            RolloutEngine(pipe).replay(trajectory, 1)
        assert len(calls) == len(texts) == 0


def test_a_cache_that_was_disabled_is_no_obstacle():
    pipe = tiny_qwen_image()
    before = call(pipe)
    pipe.transformer.enable_cache(CACHES["FirstBlockCache"])
    pipe.transformer.disable_cache()
    _, inside = run(pipe, RolloutParams(sde_type="ode"))
    assert torch.equal(inside, before)
