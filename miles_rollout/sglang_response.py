"""One SGLang rollout response: reading its fields, and its tensors as they go over the wire."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from miles_rollout.errors import RolloutParamsError

_MARK, _KEY = "__tensor__", "t"
_ADVICE = {
    "rollout_log_probs": "ask the server with rollout=True",
    "dit_trajectory": "ask the server with rollout_return_dit_trajectory=True",
    "denoising_env": "ask the server with rollout_return_denoising_env=True",
    "rollout_debug_tensors": "ask the server with rollout_debug_mode=True",
}


def as_wire(tree: Any) -> Any:
    """A tree with every tensor as the server sends it; tuples become lists."""
    if isinstance(tree, Tensor):
        data = save({_KEY: tree.detach().cpu().contiguous()})
        return {
            _MARK: True,
            "data": base64.b64encode(data).decode("ascii"),
            "shape": list(tree.shape),
            "dtype": str(tree.dtype),
        }
    if isinstance(tree, Mapping):
        return {name: as_wire(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_wire(value) for value in tree]
    return tree


class ResponseReader:
    """Reads sample ``index`` of ``stream``; mappings and objects alike. Fields are dotted names.

    Every method raises ``RolloutParamsError`` naming the sample and the field.
    """

    def __init__(self, stream: str, index: int, response: Any) -> None:
        self.stream = stream
        self.index = index
        self._response = response

    def refuse(self, problem: str, value: object, advice: str) -> NoReturn:
        """Raise for this response."""
        raise RolloutParamsError(
            f"sglang response {self.index} of stream {self.stream!r}: {problem}; got {value}; "
            f"{advice}"
        )

    def has(self, field: str) -> bool:
        """Whether a field is there and not None."""
        return self._find(field) is not None

    def require(self, field: str) -> Any:
        """A field as it stands."""
        value = self._find(field)
        if value is None:
            self.refuse(f"{field} is missing", None, _ADVICE[field.split(".")[0]])
        return value

    def tree(self, field: str) -> Any:
        """A field with its tensors decoded; None where it is missing."""
        return self._decode(field, self._find(field))

    def tensor(
        self, field: str, *, shape: Sequence[int] | None = None, ndim: int | None = None
    ) -> Tensor:
        """A finite tensor, on the CPU."""
        tensor = self._decode(field, self.require(field))
        if not isinstance(tensor, Tensor):
            self.refuse(f"{field} is a tensor", type(tensor).__name__, "pass the response whole")
        if (shape is not None and tuple(tensor.shape) != tuple(shape)) or (
            ndim is not None and tensor.ndim != ndim
        ):
            expected = f"has shape {tuple(shape)}" if shape is not None else f"has {ndim} axes"
            self.refuse(
                f"{field} {expected}, with T = len(sigmas) - 1 steps and the terminal boundary",
                tuple(tensor.shape),
                "ask a server that returns whole schedules, and pass one sample a response",
            )
        if not torch.isfinite(tensor).all():
            where = torch.isfinite(tensor).logical_not().nonzero()[0].tolist()
            self.refuse(
                f"{field} is not finite", f"{tensor[tuple(where)].item()} at {where}", "drop it"
            )
        return tensor.detach().cpu()

    def boundaries(self, num_steps: int) -> list[int]:
        """``latent_step_indices``; without them only a full capture tells which latent is which."""
        field = "dit_trajectory.latent_step_indices"
        if not self.has(field):
            kept = len(self.tensor("dit_trajectory.latents"))
            if kept != num_steps + 1:
                self.refuse(
                    f"{field} is missing, so nothing tells which boundaries the latents are",
                    f"{kept} latents for {num_steps + 1} boundaries",
                    "ask a server that returns it, or for all boundaries",
                )
            return list(range(num_steps + 1))
        indices = self.tensor(field, ndim=1)
        if indices.is_floating_point() or indices.dtype == torch.bool:
            self.refuse(f"{field} holds ints", indices.dtype, "pass boundaries in 0..T")
        found = indices.tolist()
        if any(b <= a for a, b in itertools.pairwise(found)):
            self.refuse(f"{field} does not rise", found, "pass each boundary once, in loop order")
        if found and not 0 <= found[0] <= found[-1] <= num_steps:
            self.refuse(f"{field} is out of range", found, f"pass boundaries in 0..{num_steps}")
        return found

    def same_as(self, first: ResponseReader, field: str, expected: Tensor) -> None:
        """Refuse a field that differs from that of the first sample."""
        tensor = self.tensor(field)
        if not torch.equal(tensor, expected):
            self.refuse(
                f"{field} differs from that of response {first.index}",
                tensor.tolist(),
                "pass samples of one request; RolloutTrajectory.cat joins those of one plan",
            )

    def _find(self, field: str) -> Any:
        found = self._response
        for name in field.split("."):
            if found is None:
                return None
            found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
        return found

    def _decode(self, field: str, tree: Any) -> Any:
        if isinstance(tree, Mapping):
            if tree.get(_MARK):
                return self._decode_tensor(field, tree)
            return {name: self._decode(f"{field}.{name}", value) for name, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree)(self._decode(field, value) for value in tree)
        return tree

    def _decode_tensor(self, field: str, marked: Mapping[str, Any]) -> Tensor:
        try:
            tensor = load(base64.b64decode(marked["data"], validate=True))[_KEY]
        except (KeyError, TypeError, ValueError, binascii.Error, SafetensorError) as error:
            self.refuse(f"{field} is damaged", repr(error), "pass the server's message as it is")
        said = marked.get("shape"), marked.get("dtype")
        if said != (list(tensor.shape), str(tensor.dtype)):
            self.refuse(
                f"{field} is not what it says",
                f"{list(tensor.shape)} {tensor.dtype} for {said[0]} {said[1]}",
                "pass the server's message as it is",
            )
        return tensor
