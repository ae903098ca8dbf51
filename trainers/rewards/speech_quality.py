"""Reward: how good the speech in a video sounds, by DNSMOS P.835 (arXiv 2110.01763)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miles_rollout import Media
from trainers.config_loader import ConfigError
from trainers.rewards.pretrained import require
from trainers.rewards.sound import mono

_RATE = 16000
_WINDOW = 144160
"""Samples that the model hears at once: 9.01 s."""
_TO_OPINION = {
    "signal": (-0.08397278, 1.22083953, 0.0052439),
    "background": (-0.13166888, 1.60915514, -0.39604546),
    "total": (-0.06766283, 1.11546468, 0.04602535),
}
"""DNSMOS: from the model's numbers to opinions, coefficients of x^2, x, 1, in the model's order."""


class SpeechQuality:
    """Mean opinion scores of about 1..5: ``total`` (overall), ``signal`` and ``background``.

    The model is the file that the package speechmos holds, run without that package's code, which needs
    librosa and numba for a model that is not used here. Sound shorter than 9.01 s is repeated; of longer sound
    a window starts at every second, and the score is the mean over them.
    """

    def __init__(self) -> None:
        onnxruntime = require("speech_quality", "speech", "onnxruntime")
        self.soxr = require("speech_quality", "speech", "soxr")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            str(_model_file()), sess_options=options, providers=["CPUExecutionProvider"]
        )

    def __call__(
        self,
        media: Sequence[Media],
        prompts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]],
    ) -> dict[str, list[float]]:
        """One number a sample for each component; prompts are not looked at."""
        heard = [self._opinions(mono("speech_quality", m, _RATE, self.soxr)) for m in media]
        return {name: [opinions[name] for opinions in heard] for name in _TO_OPINION}

    def _opinions(self, sound: np.ndarray) -> dict[str, float]:
        windows = _windows(sound.clip(-1, 1))
        raw = np.stack([self.session.run(None, {"input_1": w[None]})[0][0] for w in windows])
        curves = zip(_TO_OPINION.items(), raw.T.astype(np.float64), strict=True)
        return {name: float(np.polyval(curve, values).mean()) for (name, curve), values in curves}


def _windows(sound: np.ndarray) -> list[np.ndarray]:
    """float32 [144160] each."""
    while len(sound) < _WINDOW:
        sound = np.concatenate([sound, sound])
    # DNSMOS counts whole seconds: a window that only the last fraction would fill is left out.
    count = int(len(sound) // _RATE - _WINDOW / _RATE) + 1
    return [sound[i * _RATE : i * _RATE + _WINDOW].astype(np.float32) for i in range(count)]


def _model_file() -> Path:
    found = importlib.util.find_spec("speechmos")
    folders = () if found is None else tuple(found.submodule_search_locations or ())
    for folder in folders:
        path = Path(folder) / "dnsmos_models" / "sig_bak_ovr.onnx"
        if path.is_file():
            return path
    raise ConfigError(
        f"reward 'speech_quality': needs the model in the package speechmos; got {folders or 'none'}; "
        "pip install 'miles-rollout[speech]'"
    )
