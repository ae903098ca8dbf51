from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from miles_rollout.errors import MilesRolloutError
from trainers.config_loader import STRICT, ConfigError, json_schema, load, to_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Grpo:
    __pydantic_config__ = STRICT
    type: Literal["grpo"] = "grpo"
    beta: float = 0.0
    clip_range: float | tuple[float, float] = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Nft:
    __pydantic_config__ = STRICT
    type: Literal["nft"] = "nft"
    decay: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    __pydantic_config__ = STRICT
    name: str
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    __pydantic_config__ = STRICT
    num_steps: int = 10
    """Evaluations of the denoiser."""
    sde_type: Literal["sde", "cps"] = "sde"
    group_size: int = 4

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"a group needs 2 samples; got {self.group_size}; set group_size >= 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ema:
    __pydantic_config__ = STRICT
    decay: float = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    __pydantic_config__ = STRICT
    seed: int = 42
    name: str = "run"
    resume: bool = False
    max_norm: Annotated[float, Field(allow_inf_nan=True)] = 1.0
    output_dir: Path = Path("runs")
    rollout: Rollout = field(default_factory=lambda: Rollout(num_steps=20))
    algo: Annotated[Grpo | Nft, Field(discriminator="type")] = field(
        default_factory=lambda: Grpo(beta=0.1)
    )
    rewards: tuple[Item, ...] = ()
    ema: Ema | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed: must not be negative; got {self.seed}; set seed >= 0")


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "a.yaml") -> str:
        data = text.encode() if isinstance(text, str) else text
        Path(name).write_bytes(data)
        return name

    return write


def load_one(*overrides: str) -> Config:
    return load(Config, [], overrides)


def test_no_sources_give_the_defaults():
    assert load(Config, []) == Config()


def test_an_empty_file_says_nothing(write):
    assert load(Config, [write(""), write("# only a comment\n", "b.yaml")]) == Config()


def test_later_sources_win_key_by_key(write):
    first = write("seed: 1\nrollout: {num_steps: 5, group_size: 8}\n")
    second = write("rollout:\n  num_steps: 6\n", "b.yaml")
    config = load(Config, [first, second], ["rollout.sde_type=cps"])
    assert config.seed == 1
    assert config.rollout == Rollout(num_steps=6, group_size=8, sde_type="cps")


def test_a_section_refines_its_default_not_its_class():
    # Config's default rollout has 20 steps; Rollout's own has 10.
    assert load_one("rollout.group_size=8").rollout == Rollout(num_steps=20, group_size=8)
    assert load_one("algo.clip_range=1e-5").algo == Grpo(beta=0.1, clip_range=1e-5)


def test_type_chooses_the_variant_and_drops_the_default_ones_keys(write):
    assert load_one("algo.type=nft").algo == Nft()
    assert load_one("algo.decay=0.9", "algo.type=nft").algo == Nft(decay=0.9)
    assert load(Config, [write("algo: {type: nft, decay: 0.3}")]).algo == Nft(decay=0.3)


def test_keys_of_the_other_variant_that_were_written_are_errors(write):
    path = write("algo: {beta: 0.2}\n")
    with pytest.raises(ConfigError, match=r"^algo\.beta: no such key.* \(from a\.yaml\)$"):
        load(Config, [path], ["algo.type=nft"])


def test_an_unknown_variant_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"algo\.type: must be one of 'grpo', 'nft'; got 'ppo'"):
        load_one("algo.type=ppo")


def test_lists_become_tuples_and_are_replaced(write):
    first = write("rewards: [{name: a}, {name: b}]")
    second = write("rewards:\n- name: c\n  kwargs: {size: 3, deep: {x: [1, null]}}\n", "b.yaml")
    item = Item(name="c", kwargs={"size": 3, "deep": {"x": [1, None]}})
    assert load(Config, [first, second]).rewards == (item,)


def test_an_override_sets_an_item_of_a_given_list(write):
    path = write("rewards: [{name: a}, {name: b}]")
    config = load(Config, [path], ["rewards.1.weight=2", "rewards.0.kwargs.size=3"])
    assert config.rewards == (Item(name="a", kwargs={"size": 3}), Item(name="b", weight=2.0))
    with pytest.raises(ConfigError, match=r"rewards\.2: no such item; rewards has 2, numbered"):
        load(Config, [path], ["rewards.2={name: c}"])


def test_a_mistake_in_a_list_names_its_item(write):
    path = write("rewards: [{name: a}, {name: b, weight: high, wieght: 1}]")
    with pytest.raises(ConfigError) as caught:
        load(Config, [path], ["rewards.0.weight=low"])
    assert str(caught.value).splitlines() == [
        "rewards.0.weight: input should be a valid number; got 'low' "
        "(from override 'rewards.0.weight=low')",
        "rewards.1.weight: input should be a valid number; got 'high' (from a.yaml)",
        "rewards.1.wieght: no such key; did you mean rewards.1.weight? (from a.yaml)",
    ]


def test_all_mistakes_are_told_at_once(write):
    path = write("sead: 1\nrollout: {num_stpes: 3, sde_type: flow, num_steps: 1.5}\nresume: 1\n")
    with pytest.raises(ConfigError) as caught:
        load(Config, [path], ["rewards=[{}]", "group_size=8", "algo.clip_range=x", "novalue"])
    assert str(caught.value).splitlines() == [
        "override 'novalue': there is no '='; write key.path=value",
        "resume: input should be a valid boolean; got 1 (from a.yaml)",
        "rollout.num_steps: input should be a valid integer; got 1.5 (from a.yaml)",
        "rollout.sde_type: input should be 'sde' or 'cps'; got 'flow' (from a.yaml)",
        "rollout.num_stpes: no such key; did you mean rollout.num_steps? (from a.yaml)",
        "algo.clip_range: input should be a valid number or input should be a valid array; "
        "got 'x' (from override 'algo.clip_range=x')",
        "rewards.0.name: required, and no source sets it",
        "sead: no such key; did you mean seed? (from a.yaml)",
        "group_size: no such key; did you mean rollout.group_size? (from override 'group_size=8')",
    ]


def test_a_rule_across_fields_is_one_clean_line(write):
    path = write("rollout: {group_size: 1}\n")
    message = "rollout: a group needs 2 samples; got 1; set group_size >= 2 (from a.yaml)"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load(Config, [path])
    message = "seed: must not be negative; got -1; set seed >= 0 (from override 'seed=-1')"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_one("seed=-1")


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "+1e-4", "0.0001"])
def test_scientific_notation_is_a_number(write, text):
    assert load(Config, [write(f"algo: {{beta: {text}}}")]).algo == Grpo(beta=1e-4)
    assert load_one(f"algo.beta={text}").algo == Grpo(beta=1e-4)


@pytest.mark.parametrize("text", ["False", "false", "0", "no", "off", "FALSE"])
def test_an_override_reads_false_in_every_spelling(write, text):
    assert load(Config, [write("resume: true")], [f"resume={text}"]).resume is False


@pytest.mark.parametrize("text", ["True", "true", "1", "yes", "on"])
def test_an_override_reads_true_in_every_spelling(text):
    assert load_one(f"resume={text}").resume is True


def test_an_override_of_text_is_taken_as_typed():
    for text in ["123", "1e5", "no", "", "[x", "a=b", "@x"]:
        assert load_one(f"name={text}").name == text
    assert load_one("name='1'").name == "1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: true", "seed: input should be a valid integer; got True"),
        ("seed: 10.5", "seed: input should be a valid integer; got 10.5"),
        ("seed: '3'", "seed: input should be a valid integer; got '3'"),
        ("seed: 010", "seed: input should be a valid integer; got '010'"),
        ("seed: 1:30", "seed: input should be a valid integer; got '1:30'"),
        ("resume: 0", "resume: input should be a valid boolean; got 0"),
        ("resume: 'no'", "resume: input should be a valid boolean; got 'no'"),
        ("name: 123", "name: input should be a valid string; got 123"),
        ("algo: {beta: .nan}", "algo.beta: input should be a finite number; got nan"),
        ("algo: {beta: -.inf}", "algo.beta: input should be a finite number; got -inf"),
        ("algo: {beta: true}", "algo.beta: input should be a valid number; got True"),
        ("rollout:", "rollout: must be a mapping of keys; got None"),
        ("rewards: {}", "rewards: input should be a valid array; got {}"),
    ],
)
def test_no_value_is_converted_in_silence(write, text, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)} \\(from a.yaml\\)$"):
        load(Config, [write(text)])


def test_a_whole_float_is_an_int_and_infinity_is_allowed_where_a_field_says_so(write):
    config = load(Config, [write("seed: 1e3\nmax_norm: .inf\n")])
    assert config.seed == 1000
    assert isinstance(config.seed, int)
    assert config.max_norm == float("inf")


def test_an_optional_section_can_be_switched_on_and_off(write):
    assert load_one("ema.decay=0.5").ema == Ema(decay=0.5)
    assert load(Config, [write("ema: {decay: 0.5}")], ["ema=null"]).ema is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nname: x\nseed: 2\n", "a.yaml:3: key 'seed' is given twice"),
        ("rollout:\n  num_steps: 1\n  num_steps: 1\n", "a.yaml:3: key 'num_steps' is given twice"),
        ("seed: [1\nname: x\n", "a.yaml:2: invalid YAML: "),
        ("- 1\n", "a.yaml: must be a mapping of keys; got [1]"),
        ("just text", "a.yaml: must be a mapping of keys; got 'just text'"),
        ("1: x", "a.yaml:1: invalid YAML: a key must be text; put it in quotes"),
        ("a: &x {b: 1}\nc: *x\n", "a.yaml:2: invalid YAML: aliases and tags are not supported"),
        ("seed: !!int x", "a.yaml:1: invalid YAML: aliases and tags are not supported"),
        ("seed: 1\n---\nseed: 2\n", "a.yaml:2: invalid YAML: but found another document"),
        ("a: " + "[" * 100, "a.yaml:1: invalid YAML: nested more than 50 deep"),
        (
            b"name: \xff\n",
            "a.yaml: invalid YAML: unacceptable character #x00ff: invalid start byte",
        ),
        ('name: "\\ud800"', "a.yaml: invalid YAML: 'utf-8' codec can't encode"),
    ],
)
def test_a_file_that_is_not_such_yaml_is_named_with_its_line(write, text, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        load(Config, [write(text)])


def test_a_missing_file_is_told_with_the_other_mistakes(write):
    with pytest.raises(ConfigError) as caught:
        load(Config, ["none.yaml", write("sead: 1"), "."])
    assert str(caught.value).splitlines() == [
        "none.yaml: cannot be read: No such file or directory",
        ".: cannot be read: Is a directory",
        "sead: no such key; did you mean seed? (from a.yaml)",
    ]


@pytest.mark.parametrize("text", ["=1", "rollout.=1", ".seed=1", "rollout..num_steps=1", " = "])
def test_an_override_needs_a_key(text):
    message = f"override {text!r}: a part of the key is empty; write key.path=value"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_one(text)


def test_a_flag_in_the_style_of_another_program_finds_its_key():
    with pytest.raises(ConfigError, match="--seed: no such key; did you mean seed"):
        load_one("--seed=3")


def test_the_error_is_one_of_ours_and_a_value_error():
    assert issubclass(ConfigError, MilesRolloutError)
    assert issubclass(ConfigError, ValueError)


texts = st.text(max_size=8)
names = st.sampled_from(["seed", "name", "rollout", "algo", "type", "rewards", "ema", "kwargs"])
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), texts, st.dates(), st.binary(max_size=3)
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names | texts | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(trees, st.lists(texts | st.builds("{}={}".format, names, texts), max_size=3))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_random_trees_load_or_raise_a_config_error(tmp_path_factory, tree, overrides):
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_text(yaml.safe_dump(tree))
    with contextlib.suppress(ConfigError):
        assert isinstance(load(Config, [path], overrides), Config)


@given(st.text(alphabet="ab:-{}[]'\"\\,#&*!|>%@` \n\t0u1x.=?~\ud800\x00", max_size=20))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_random_text_loads_or_raises_a_config_error(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with contextlib.suppress(ConfigError):
        assert isinstance(load(Config, [path], [text]), Config)


@given(
    st.builds(
        Config,
        seed=st.integers(0, 2**63),
        name=st.text(st.characters(codec="utf-8"), max_size=8)
        | st.sampled_from(["1e-4", "no", "~", "", "010", "1:30", "2001-01-01", "<<", "=", ".inf"]),
        resume=st.booleans(),
        max_norm=st.floats(allow_nan=False),
        algo=st.one_of(
            st.builds(Grpo, beta=st.floats(allow_nan=False, allow_infinity=False)),
            st.builds(Nft, decay=st.floats(0, 1)),
        ),
        rewards=st.lists(
            st.builds(
                Item, name=st.just("a"), kwargs=st.dictionaries(names, st.integers(-(2**63), 2**63))
            ),
            max_size=3,
        ).map(tuple),
        ema=st.none() | st.builds(Ema, decay=st.floats(0, 1)),
    )
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_written_config_loads_equal(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    path.write_text(to_yaml(config))
    assert load(Config, [path]) == config


def test_the_schema_holds_the_docs_of_the_fields():
    schema = json_schema(Config)
    steps = schema["$defs"]["Rollout"]["properties"]["num_steps"]
    assert steps["description"] == "Evaluations of the denoiser."
    assert schema["additionalProperties"] is False
