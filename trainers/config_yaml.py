"""The YAML that configs are written in: YAML 1.1 without its traps.

PyYAML reads ``1e-4`` as text, ``010`` as 8, ``1:30`` as 90 and a date as a date, and keeps the last
of two equal keys in silence. Here the first is a float, the next three are text, and equal keys are
reported. Keys are text. Anchors, aliases and tags are refused: files are merged instead.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from miles_rollout.errors import MilesRolloutError


class ConfigYAMLError(MilesRolloutError, ValueError):
    """A text is not the YAML that configs are written in."""


MAX_DEPTH = 50

_SCALARS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (
        r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        list("yYnNtTfFoO"),
    ),
    # At most 30 digits: Python refuses to read thousands, and no field wants them.
    "int": (r"[-+]?(?:0|[1-9](?:_?[0-9]){0,29})", list("-+0123456789")),
    "float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own name)

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name
        self.depth = 0
        self.repeated: list[str] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
            self.refuse("aliases and tags are not supported; merge files instead", event.start_mark)
        if self.depth >= MAX_DEPTH:
            self.refuse(f"nested more than {MAX_DEPTH} deep", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key, mark = key_node.value, key_node.start_mark
            if key_node.tag != "tag:yaml.org,2002:str":
                self.refuse("a key must be text; put it in quotes", mark)
            if key in seen:
                self.repeated.append(f"{mark.name}:{mark.line + 1}: key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def refuse(self, problem: str, mark: Any) -> None:
        raise yaml.constructor.ConstructorError(None, None, problem, mark)


class _Dumper(yaml.SafeDumper):
    # The same table, so that text which the loader would read as a number is quoted.
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})\Z"), _first
    )


def parse_yaml(data: bytes, name: str) -> tuple[Any, list[str]]:
    """The value of one document (None if empty) and a line for every repeated key.

    ``name`` is what messages call the text.
    """
    try:
        loader = _Loader(data, name)
        tree = loader.get_single_data()
        _check_text(tree)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigYAMLError(f"{where}: invalid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigYAMLError(f"{name}: invalid YAML: {reason}") from None
    except RecursionError:
        raise ConfigYAMLError(f"{name}: invalid YAML: nested too deeply") from None
    return tree, loader.repeated


def _check_text(tree: Any) -> None:
    """Raise ``UnicodeError`` for text that no file can hold: half of a surrogate pair."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            _check_text(key)
            _check_text(value)
    elif isinstance(tree, list):
        for value in tree:
            _check_text(value)
    elif isinstance(tree, str):
        tree.encode()


def dump_yaml(tree: Any) -> str:
    """YAML that ``parse_yaml`` reads back equal."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
