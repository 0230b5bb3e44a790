"""YAML as its specification has it, where PyYAML says nothing, or raises what is no error of YAML.

No mapping has a key twice, and no text half a surrogate pair: nothing that is sent or written can have one.
"""

from __future__ import annotations

from typing import Any

import yaml

try:
    from yaml import CSafeLoader as _FastLoader
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeLoader as _FastLoader  # type: ignore[assignment]


def load(text: str) -> Any:
    """Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None


def load_all(text: str | bytes) -> list[Any]:
    """Its documents, by libyaml where it is there: ten times as fast. Raises yaml.YAMLError."""
    try:
        return list(yaml.load_all(text, Loader=_LibyamlLoader if yaml.__with_libyaml__ else _Loader))
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None


class _Constructor(yaml.constructor.SafeConstructor):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # of text that looks like a date, and of wrong tags
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r:.80} is not what {node.tag} stands for", node.start_mark
            ) from None


class _Loader(_Constructor, yaml.SafeLoader):
    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise yaml.composer.ComposerError(
                None, None, f"{node.value!r} has half a surrogate pair", node.start_mark
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        _refuse_twice(node)
        return node


class _LibyamlLoader(_Constructor, _FastLoader):
    """Composes where Python cannot look, and refuses half a surrogate pair by itself."""

    def __init__(self, stream: str | bytes) -> None:
        super().__init__(stream)
        self._seen: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if node not in self._seen:  # the second time it has what `<<` names besides
            self._seen.add(node)
            _refuse_twice(node)
        super().flatten_mapping(node)


def _refuse_twice(node: yaml.MappingNode) -> None:
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
            raise yaml.composer.ComposerError(
                "in a mapping", node.start_mark, f"the key {key.value!r} is there twice", key.start_mark
            )
        if isinstance(key, yaml.ScalarNode):
            seen.add((key.tag, key.value))
