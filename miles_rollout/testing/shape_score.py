"""How well a picture shows a scene: a score from pixels alone, without a model.

Each pixel is placed on the line between the two named colours, which gives a soft mask of the
shape; every known shape is fitted to the mask; then three factors in 0..1 are multiplied,
because a picture that misses one of them does not show the scene:

- the named colour inside the fitted shape,
- the named background everywhere outside it, border included,
- the fit of the named shape, absolute and against the other shapes.

A shape much smaller than any drawing counts for less: a dot would pass for all of them.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_rollout.shapes import Float
from miles_rollout.testing import shapes

_TOLERANCE = 0.25  # RGB distance at which a colour's score has fallen to 1/e
_CONTRAST = 0.04  # IoU lead over another shape that makes the named one e times as likely
_MIN_AREA = 0.05  # share of the picture, below that of any square drawing
_MAX_SIDE = 32  # larger pictures are averaged down: fitting needs no more
_SHIFTS = (-0.7, 0.0, 0.7)  # pixels around the centre of mass
_SCALES = (0.85, 0.92, 1.0, 1.08, 1.16)  # around the radius that the mask's area implies


def score(image: Float[Tensor, "3 height width"], scene: shapes.Scene) -> float:
    """In 0..1: 1 is a true render of ``scene``; noise, blank pictures and other scenes are near 0."""
    image = _shrink(image.detach().float().cpu())
    front = torch.tensor(shapes.PALETTE[scene.color]).view(3, 1, 1)
    back = torch.tensor(shapes.PALETTE[scene.background]).view(3, 1, 1)
    mask = _mask(image, front, back)
    if mask.max() < 0.5:
        return 0.0
    fits = {shape: _fit(mask, shape) for shape in shapes.SHAPES}
    iou, outline = fits[scene.shape]
    # A pixel away from the outline, where antialiasing mixes the two colours.
    inside, outside = outline < -1, outline > 1
    if not inside.any() or not outside.any():
        return 0.0
    color = _closeness(image - front)[inside].mean()
    background = _closeness(image - back)[outside].mean()
    leads = torch.stack([other - iou for other, _ in fits.values()])
    likeness = 1 / torch.exp(leads / _CONTRAST).sum()
    quality = ((iou - 0.4) / 0.45).clamp(0, 1)
    size = (mask.mean() / _MIN_AREA).clamp(max=1)
    return float(color * background * likeness * quality * size)


def _shrink(image: Float[Tensor, "3 height width"]) -> Float[Tensor, "3 small_height small_width"]:
    height, width = image.shape[1:]
    factor = max(height, width) / _MAX_SIDE
    if factor <= 1:
        return image
    size = (max(1, round(height / factor)), max(1, round(width / factor)))
    return F.adaptive_avg_pool2d(image, size)


def _closeness(difference: Float[Tensor, "3 height width"]) -> Float[Tensor, "height width"]:
    return torch.exp(-difference.square().sum(0) / _TOLERANCE**2)


def _mask(
    image: Float[Tensor, "3 height width"],
    front: Float[Tensor, "3 1 1"],
    back: Float[Tensor, "3 1 1"],
) -> Float[Tensor, "height width"]:
    """How much of each pixel is ``front``: its place on the line from ``back``, if it lies near it.

    For an antialiased edge this is the share of the pixel that the shape covers.
    """
    line = front - back
    place = (((image - back) * line).sum(0) / line.square().sum()).clamp(0, 1)
    return place * _closeness(image - back - place * line)


def _fit(
    mask: Float[Tensor, "height width"], shape: str
) -> tuple[Float[Tensor, ""], Float[Tensor, "height width"]]:
    """The best IoU of ``shape`` with the mask, and its signed distance in pixels."""
    height, width = mask.shape
    solid = mask * (mask > 0.5)
    grid_y = torch.arange(height).view(-1, 1) + 0.5
    grid_x = torch.arange(width).view(1, -1) + 0.5
    center_y = (solid * grid_y).sum() / solid.sum()
    center_x = (solid * grid_x).sum() / solid.sum()
    radius = (solid.sum() / shapes.AREAS[shape]).sqrt()
    candidates = torch.tensor(list(itertools.product(_SHIFTS, _SHIFTS, _SCALES)))
    shift_y, shift_x, scale = candidates.T.unsqueeze(-1).unsqueeze(-1)
    radii = radius * scale
    x = ((grid_x - center_x - shift_x) / radii).expand(-1, height, -1)
    y = ((grid_y - center_y - shift_y) / radii).expand(-1, -1, width)
    outlines = shapes.distance(shape, x, y) * radii
    coverage = (0.5 - outlines).clamp(0, 1)
    shared = torch.minimum(coverage, mask).sum((1, 2))
    either = torch.maximum(coverage, mask).sum((1, 2))
    iou, best = (shared / either).max(0)
    return iou, outlines[best]
