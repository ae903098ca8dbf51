"""Load a config: YAML files, then ``key.path=value`` overrides, into one frozen dataclass.

    config = load(TrainConfig, ["configs/qwen_image/ocr.yaml"], ["optim.lr=1e-4"])

Later sources win: mappings merge onto each other and onto the defaults, lists are replaced (an
override may set an item of a given list: ``rewards.0.weight=2``). Every mistake in every source is
reported at once, each with its key, its value, where it came from and the nearest valid key.

Types are strict where a conversion would hide a mistake: ``true`` is no int, ``1`` is no bool,
``10.5`` is no int and ``123`` is no text. An override is typed text, so there the field decides:
``flag=0`` is False and ``name=123`` is text. NaN and infinity are refused unless the field says
``Annotated[float, Field(allow_inf_nan=True)]``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from miles_rollout.errors import MilesRolloutError
from trainers.config_messages import Key, describe, meant, short
from trainers.config_yaml import MAX_DEPTH, ConfigYAMLError, dump_yaml, parse_yaml

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
"""Set as ``__pydantic_config__`` on every config dataclass."""

ConfigT = TypeVar("ConfigT")


class ConfigError(MilesRolloutError, ValueError):
    """A config file or an override is wrong. The message is for the person who wrote it."""


class _Source(NamedTuple):
    label: str
    raw: str | None = None
    """What an override says before YAML reads it, for a field that wants text or a bool."""


_DEFAULTS = _Source("the defaults")


def load(cls: type[ConfigT], paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> ConfigT:
    """Merge ``paths`` left to right, apply ``overrides``, and validate as ``cls``."""
    draft = _Draft(cls)
    for path in paths:
        draft.read(path)
    for override in overrides:
        draft.override(override)
    return draft.finish()


def from_tree(cls: type[ConfigT], tree: Mapping[str, Any], label: str) -> ConfigT:
    """The config that `to_tree` gave, e.g. back from a checkpoint; ``label`` says whose, in errors."""
    draft = _Draft(cls)
    draft.merge(draft.tree, tree, (), _Source(label))
    return draft.finish()


def to_tree(config: Any) -> dict[str, Any]:
    """The resolved config as plain mappings, lists, numbers and text."""
    kind: Any = type(config)
    return _adapter(kind).dump_python(config, mode="json")


def to_yaml(config: Any) -> str:
    """The resolved config, to write next to the checkpoints; ``load`` reads it back equal."""
    return dump_yaml(to_tree(config))


def json_schema(cls: type) -> dict[str, Any]:
    """The JSON schema of ``cls``: editors complete and check YAML with it, ``--help`` lists it."""
    return _adapter(cls).json_schema()


@functools.cache
def _adapter(cls: Any) -> Any:
    """Building one takes some milliseconds."""
    return TypeAdapter(cls)


class _Draft:
    """The merged sources before validation, with the origin of every key."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.tree: dict[str, Any] = {}
        self.origin: dict[Key, _Source] = {}
        self.problems: list[str] = []
        self.unread = False
        for field in dataclasses.fields(cls):
            # A section's keys refine its default; they do not start over from its class.
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if dataclasses.is_dataclass(default) and not isinstance(default, type):
                self.merge(self.tree, {field.name: to_tree(default)}, (), _DEFAULTS)

    def read(self, path: str | Path) -> None:
        """Merge a YAML file; an empty one says nothing."""
        try:
            tree, repeated = parse_yaml(Path(path).read_bytes(), str(path))
        except (OSError, ConfigYAMLError, ValueError) as error:
            self.unread = True
            reason = error.strerror if isinstance(error, OSError) else error
            known = isinstance(error, ConfigYAMLError)
            self.problems.append(f"{error}" if known else f"{path}: cannot be read: {reason}")
            return
        self.problems += repeated
        if isinstance(tree, dict):
            self.merge(self.tree, tree, (), _Source(str(path)))
        elif tree is not None:
            self.problems.append(f"{path}: must be a mapping of keys; got {short(tree)}")

    def override(self, text: str) -> None:
        """Set one dotted key; a value that is not YAML is text."""
        dotted, equals, raw = text.partition("=")
        key = tuple(part.strip() for part in dotted.split("."))
        if not equals or not all(key) or len(key) > MAX_DEPTH:
            wrong = "a part of the key is empty" if equals else "there is no '='"
            wrong = wrong if len(key) <= MAX_DEPTH else "the key is too deep"
            self.problems.append(f"override {text!r}: {wrong}; write key.path=value")
            return
        try:
            value, repeated = parse_yaml(raw.encode(), f"override {text!r}")
            self.problems += repeated
        except UnicodeEncodeError:
            self.problems.append(f"override {text!r}: not valid text; write it in UTF-8")
            return
        except ConfigYAMLError:
            value = raw
        is_scalar = not isinstance(value, (dict, list))
        source = _Source(f"override {text!r}", raw if is_scalar else None)
        node: Any = self.tree
        depth, holder = 0, node
        for n, part in enumerate(key):
            if isinstance(node, list):
                depth, holder = n, node
            node = _child(node, part)
        for part in reversed(key[depth + 1 :]):
            value = {part: value}
        self.put(holder, key[depth], value, key[:depth], source)

    def put(self, node: Any, part: str, value: Any, at: Key, source: _Source) -> None:
        """Set ``part`` of a mapping or of a list."""
        if isinstance(node, dict):
            self.merge(node, {part: value}, at, source)
        elif part.isdecimal() and int(part) < len(node):
            item = {"item": node[int(part)]}
            self.merge(item, {"item": value}, at, source)
            node[int(part)] = item["item"]
            self.origin[(*at, part)] = self.origin[(*at, "item")]
        else:
            self.problems.append(
                f"{'.'.join((*at, part))}: no such item; {'.'.join(at)} has {len(node)}, "
                f"numbered from 0 (from {source.label})"
            )

    def merge(self, into: dict[str, Any], new: Mapping[str, Any], at: Key, source: _Source) -> None:
        """Put ``new`` onto ``into``, mapping by mapping."""
        for key, value in new.items():
            here = (*at, key)
            old = into.get(key)
            if not isinstance(value, dict):
                self.origin[here] = source
                into[key] = value
                continue
            self.origin[here] = _Source(source.label)
            if not isinstance(old, dict):
                old = into[key] = {}
            elif value.get("type", old.get("type")) != old.get("type"):
                # Another variant: the default one's keys mean nothing to it.
                for name in [n for n in old if self.origin.get((*here, n)) == _DEFAULTS]:
                    del old[name]
            self.merge(old, value, here, source)

    def finish(self) -> Any:
        """The config, or ``ConfigError`` with every mistake."""
        try:
            config = self.validate()
        except ValidationError as error:
            try:
                config = self.reread(error).validate()
            except ValidationError as again:
                raise ConfigError("\n".join(self.problems + self.explain(again))) from None
        if self.problems:
            raise ConfigError("\n".join(self.problems))
        return config

    def validate(self) -> Any:
        """As JSON: strict, and yet lists become tuples and mappings become dataclasses."""
        text = json.dumps(self.tree)
        return _adapter(self.cls).validate_json(text, strict=True, extra="forbid")

    def locate(self, problem: Any) -> tuple[Key, Any]:
        """The key of ``problem`` without the union tags that pydantic puts in, and its parent."""
        at: list[str] = []
        node, parent = self.tree, self.tree
        for n, part in enumerate(problem["loc"]):
            child = _child(node, str(part))
            is_named = problem["type"] in ("missing", "unexpected_keyword_argument")
            if child is not _ABSENT:
                parent, node = node, child
                at.append(str(part))
            elif is_named and n == len(problem["loc"]) - 1:
                parent = node
                at.append(str(part))
        return tuple(at), parent

    def reread(self, error: ValidationError) -> _Draft:
        """Read values anew whose field says what was meant: 1e3 is an int, ``name=123`` text."""
        for problem in error.errors():
            at, parent = self.locate(problem)
            source = self.origin.get(at, _DEFAULTS)
            new = meant(problem["type"], problem["input"], source.raw)
            if new is not None and at:
                parent[int(at[-1]) if isinstance(parent, list) else at[-1]] = new
        return self

    def explain(self, error: ValidationError) -> list[str]:
        """One line a wrong key."""
        lines: dict[tuple[str, str], list[str]] = {}
        for problem in error.errors():
            at, _ = self.locate(problem)
            if self.unread and problem["type"] == "missing":
                continue  # it may well be in the file that could not be read
            dotted, text, got = describe(self.cls, at, problem)
            known = (at[:n] for n in range(len(at), 0, -1) if at[:n] in self.origin)
            source = self.origin[found].label if (found := next(known, None)) else self.labels()
            ending = f"{got} (from {source})" if problem["type"] != "missing" else ""
            lines.setdefault((dotted, ending), []).append(text)
        return [
            (f"{dotted}: " if dotted else "") + " or ".join(dict.fromkeys(texts)) + ending
            for (dotted, ending), texts in lines.items()
        ]

    def labels(self) -> str:
        """Every source, for a mistake that lies in no single key."""
        labels = dict.fromkeys(s.label for s in self.origin.values() if s != _DEFAULTS)
        return ", ".join(labels) or _DEFAULTS.label


_ABSENT = object()


def _child(node: Any, part: str) -> Any:
    if isinstance(node, dict):
        return node.get(part, _ABSENT)
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return node[int(part)]
    return _ABSENT
