from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainers.ema import EMA, EMAConfig, EMAError

PLAIN = EMAConfig(decay=0.9, every=1, warmup=False)


def _named(*values: float, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {
        f"p{i}": nn.Parameter(torch.full((2,), value, dtype=dtype))
        for i, value in enumerate(values)
    }


def _set(parameters: dict[str, nn.Parameter], value: float) -> None:
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(value)


def _shadow(ema: EMA, name: str = "p0") -> float:
    return ema.tensors()[name][0].item()


def test_the_average_by_hand() -> None:
    parameters = _named(1.0)
    ema = EMA(PLAIN, parameters)
    for value, expected in ((2.0, 1.1), (3.0, 1.29)):  # 0.9 * 1.1 + 0.1 * 3
        _set(parameters, value)
        ema.update(parameters)
        assert _shadow(ema) == pytest.approx(expected)


def test_warm_up_by_hand_and_never_above_the_decay() -> None:
    parameters = _named(1.0)
    ema = EMA(EMAConfig(decay=0.25, every=1), parameters)
    expected = 1.0
    # (1 + n) / (10 + n): 1/10, 2/11, 3/12 = 0.25, and 4/13 is above it.
    for value, decay in ((2.0, 1 / 10), (3.0, 2 / 11), (4.0, 0.25), (5.0, 0.25)):
        _set(parameters, value)
        ema.update(parameters)
        expected = decay * expected + (1 - decay) * value
        assert _shadow(ema) == pytest.approx(expected)


def test_it_steps_at_every_nth_update_and_warms_up_by_updates() -> None:
    parameters = _named(0.0)
    ema = EMA(EMAConfig(decay=0.9, every=3), parameters)
    _set(parameters, 1.0)
    seen = []
    for _ in range(6):
        ema.update(parameters)
        seen.append(_shadow(ema))
    first = 1 - 3 / 12  # after update 2, counted from 0
    second = 6 / 15 * first + 1 - 6 / 15
    assert seen == pytest.approx([0, 0, first, first, first, second])
    assert ema.num_updates == 6


def test_it_is_kept_in_float32() -> None:
    parameters = _named(1.0, dtype=torch.bfloat16)
    ema = EMA(EMAConfig(decay=0.999, every=1, warmup=False), parameters)
    _set(parameters, 2.0)
    for _ in range(3):
        ema.update(parameters)
    # In bfloat16 1 + 0.001 is 1.
    assert _shadow(ema) == pytest.approx(2 - 0.999**3)


def test_it_goes_by_name() -> None:
    parameters = _named(1.0, 10.0)
    ema = EMA(PLAIN, parameters)
    ema.update(dict(reversed(parameters.items())))
    assert (_shadow(ema, "p0"), _shadow(ema, "p1")) == (1.0, 10.0)


def _raise() -> None:
    raise KeyError


@pytest.mark.parametrize("inside", [lambda: None, _raise], ids=["ends", "raises"])
def test_the_parameters_are_back_bitwise(inside: Callable[[], None]) -> None:
    parameters = _named(1.0, 1 / 3)
    ema = EMA(PLAIN, parameters)
    with torch.no_grad():
        parameters["p0"].copy_(torch.tensor([0.1, 7.0]))
    before = {name: p.detach().clone() for name, p in parameters.items()}
    objects = dict(parameters)
    try:
        with ema.applied(parameters):
            assert parameters["p0"].tolist() == [1.0, 1.0]
            inside()
    except KeyError:
        pass
    assert all(torch.equal(parameters[name], value) for name, value in before.items())
    assert all(parameters[name] is p and p.requires_grad for name, p in objects.items())


def test_a_saved_average_goes_on_as_if_it_had_not_been_saved() -> None:
    parameters = _named(1.0)
    whole = EMA(EMAConfig(decay=0.9, every=2), parameters)
    for value in (2.0, 3.0, 5.0):
        _set(parameters, value)
        whole.update(parameters)
    resumed = EMA(whole.config, _named(99.0))
    saved = whole.tensors()
    resumed.load(saved, whole.num_updates)
    for name in saved:  # neither keeps what was handed over
        saved[name].fill_(-1.0)
    for value in (7.0, 8.0, 9.0):
        _set(parameters, value)
        whole.update(parameters)
        resumed.update(parameters)
    assert torch.equal(whole.tensors()["p0"], resumed.tensors()["p0"])
    assert resumed.num_updates == 6


def test_other_weights_are_refused_by_name() -> None:
    parameters = _named(1.0, 2.0)
    ema = EMA(PLAIN, parameters)
    message = (
        r"ema: its weights are not these; got other names or shapes in \['p1'\] \(2 averaged, "
    )
    with pytest.raises(EMAError, match=message + "1 given"):
        ema.update({"p0": parameters["p0"]})
    with pytest.raises(EMAError, match=message + "2 given"):
        ema.load({"p0": torch.zeros(2), "p1": torch.zeros(3)}, 1)
    with pytest.raises(EMAError, match=r"in \['p2'\]"):
        ema.copy_to({**parameters, "p2": parameters["p0"]})
    with pytest.raises(EMAError), ema.applied({}):
        pass
    assert ema.num_updates == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decay": 1.0}, r"decay must be within 0\.\.1, 1 excluded, .* got 1\.0, 8"),
        ({"decay": -0.1}, "decay must be within"),
        ({"every": 0}, r"every at least 1; got 0\.9, 0"),
        ({"evaluate": False, "export": False}, "ema has no effect: neither evaluate nor export"),
    ],
)
def test_settings_without_sense_are_refused(wrong: dict[str, float | bool], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EMAConfig(**wrong)  # type: ignore[arg-type]
