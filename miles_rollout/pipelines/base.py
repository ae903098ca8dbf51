"""The adapter's interface: a model family's facts that no code can find out by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from miles_rollout.conditions import DenoiserCall
from miles_rollout.media import Media
from miles_rollout.pipelines.latent_sizes import elements_by_vae

Encoding = Mapping[str, Any]
"""What one prompt and its inputs become, without a batch axis: [tokens, channels] and the like."""


@dataclass(frozen=True, kw_only=True)
class DenoisingStep:
    """What the velocities of one step are made from; rows are those of one rollout."""

    index: int
    """The step, 0-based."""
    calls: Sequence[DenoiserCall]
    """The denoiser calls of the step, in order, with the states filled in."""
    outputs: Sequence[Any]
    """What each call returned."""
    states: Mapping[str, Tensor]
    """Stream -> its state before the step, [rows, ...]."""
    sigmas: Mapping[str, Tensor]
    """Stream -> its schedule, [T + 1]."""
    timesteps: Mapping[str, Tensor]
    """Stream -> its timesteps in the scheduler's convention, [T + 1]."""
    guidance: Mapping[str, float | bool]
    """What the adapter's ``guidance`` said of the request."""


class PipelineAdapter(ABC):
    """Facts and small conversions of one pipeline family; holds no state."""

    streams: ClassVar[tuple[str, ...]]
    """Names of all latent streams that a request can have."""
    denoisers: ClassVar[tuple[str, ...]]
    """Components whose calls are recorded and replayed."""
    batch_axes: ClassVar[Mapping[str, int | None]]
    """Denoiser argument -> batch axis, None for what all rows share; a positional one by its index.

    0 for a list that has one entry a row."""
    sampling: ClassVar[frozenset[str]]
    """Pipeline arguments that a caller of the engine may set."""
    scale_argument: ClassVar[str | None]
    """The pipeline argument that turns guidance by a negative prompt on, with a value above
    ``scale_off``; None where the model is never guided."""
    scale_off: ClassVar[float] = 1.0
    """The largest scale at which guidance is off."""
    more_scale_arguments: ClassVar[tuple[str, ...]] = ()
    """Further ones, where another stream is guided by a scale of its own."""
    implied_negative: ClassVar[str | None]
    """The negative prompt where guidance is asked for without one; None: guidance is off then."""
    scheduler_streams: ClassVar[Mapping[str, str]] = {}
    """Scheduler component -> its stream, for a pipeline with several; else streams go in order."""
    cuts_prompts: ClassVar[bool] = True
    """What is longer than ``max_sequence_length``, or else the pipeline's ``tokenizer_max_length``, is
    not seen by the text encoder."""
    one_sample: ClassVar[bool] = False
    """The pipeline takes one sample a call."""
    packed: ClassVar[bool] = False
    """The pipeline steps [tokens, channels] without a batch axis; it takes one sample a call then."""
    sees_state: ClassVar[bool] = True
    """Without guidance the denoiser's argument is the state itself, so it can be called on another one
    (`RolloutEngine.velocities`); False where it is made of the state and more."""
    inputs: ClassVar[frozenset[str]] = frozenset()
    """What a prompt may come with, such as images: names of the entries of the engine's ``inputs``."""
    prepared_for: ClassVar[frozenset[str]] = frozenset()
    """Sampling arguments that ``prepare`` reads."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Pipeline argument -> why no call may give it, then "; " and what to do instead of leaving it
    out. Told in the message and in ``docs/models.md``."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Pipeline arguments in place of its defaults, which ``collate`` gives too: without some a call
    cannot be rolled out, and others turn off what was not asked for."""

    @abstractmethod
    def check_request(self, pipe: Any, request: Mapping[str, Any]) -> None:
        """Refuse a pipeline call that would be rolled out wrongly."""

    def check_sampling(self, sampling: Mapping[str, Any]) -> None:  # noqa: B027
        """Refuse sampling arguments that are wrong for every pipeline of the family, if any are."""

    def num_steps(self, num_inference_steps: int) -> int:
        """T, the denoiser evaluations that ``num_inference_steps`` asks for."""
        return num_inference_steps

    def base_sigmas(self, num_inference_steps: int) -> list[float] | None:
        """The ``sigmas`` that the pipeline gives its scheduler where a call gives none, before any
        shift: one a step, falling. None where it gives none, or a call cannot give them."""
        return None

    def latent_elements(
        self, components: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> dict[str, int] | None:
        """Stream -> latent elements of one sample, where modules without weights tell; else None.

        ``components`` are the pipeline's modules, perhaps on the meta device, and ``sampling`` the
        arguments of the call with the pipeline's defaults.
        """
        if len(self.streams) > 1 or "vae" not in components:
            return None
        elements = elements_by_vae(components["vae"], sampling)
        return None if elements is None else {self.streams[0]: elements}

    def check_stochastic(self, pipe: Any, request: Mapping[str, Any]) -> None:  # noqa: B027
        """Refuse a request with a stochastic step, of a pipeline whose steps have no density.

        Asked once a schedule with such a step is known, before the denoiser runs.
        """

    def resolve_request(self, pipe: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the pipeline will take them, where it fills in or rounds some."""
        return dict(request)

    def request_streams(self, request: Mapping[str, Any]) -> tuple[str, ...]:
        """The streams of this request: the scheduler's own, then its copies in the order made."""
        return self.streams

    def masks(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], request: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Stream -> what of its state is live (True), from the first denoiser call of a request.

        Broadcast against the stepped sample. The rest is neither noised, scored nor counted, and the
        pipeline may change it between steps.
        """
        return {}

    @abstractmethod
    def num_rows(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], guidance: Mapping[str, float | bool]
    ) -> int | None:
        """How many samples a denoiser call holds; None where it cannot be told."""

    @abstractmethod
    def guidance(self, request: Mapping[str, Any]) -> dict[str, float | bool]:
        """How the pipeline will combine its denoiser calls, from the call's arguments."""

    @abstractmethod
    def blocks(self, guidance: Mapping[str, float | bool]) -> dict[str, int]:
        """Denoiser argument -> blocks of rows in it at most, for those that hold more than one."""

    @abstractmethod
    def calls_per_step(self, guidance: Mapping[str, float | bool]) -> int | None:
        """How many denoiser calls a step makes; None where it cannot be told."""

    @abstractmethod
    def combine(self, step: DenoisingStep) -> dict[str, Tensor]:
        """What the pipeline hands to the scheduler of each stream, [rows, ...], bit for bit."""

    def check_inputs(
        self, pipe: Any, inputs: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> None:
        """Refuse what a prompt comes with, before any model runs; asked with none as well."""
        return None

    def prepare(
        self, pipe: Any, inputs: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """What a prompt comes with, as ``encode`` takes it: made once for all prompts with it."""
        return inputs

    @abstractmethod
    def encode(
        self,
        pipe: Any,
        prompt: str,
        max_sequence_length: int | None,
        inputs: Mapping[str, Any],
    ) -> Encoding:
        """Encode one prompt, with what ``prepare`` made of its inputs, by the pipeline's own code."""

    @abstractmethod
    def collate(
        self, encodings: Sequence[Encoding], negatives: Sequence[Encoding] | None
    ) -> dict[str, Any]:
        """The pipeline's arguments for a batch of encoded prompts, padded and masked."""

    def denoising_part(self, pipe: Any) -> Any:
        """What runs from encoded prompts to latents: the pipeline, or a part of it."""
        return pipe

    def denoise(self, part: Any, arguments: Mapping[str, Any], generators: Sequence[Any]) -> Any:
        """Call the denoising part, with one generator a row and latents out."""
        return part(**arguments, generator=generators, output_type="latent")

    def small_request(self, pipe: Any) -> dict[str, Any]:
        """Sampling arguments of a request that is quick to try, without steps and guidance."""
        side = pipe.vae_scale_factor * 16
        return {"height": side, "width": side}

    def sample_inputs(self, pipe: Any) -> Mapping[str, Any]:
        """Inputs of one prompt to try the pipeline with, where it needs some."""
        return {}

    @abstractmethod
    def latents(self, output: Any) -> dict[str, Tensor]:
        """The final latents of each stream from the pipeline's latent output."""

    @abstractmethod
    def decode(
        self, pipe: Any, latents: Mapping[str, Tensor], request: Mapping[str, Any]
    ) -> list[Media]:
        """Decode final latents as the pipeline does, one `Media` a sample."""
