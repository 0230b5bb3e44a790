"""YAML as its specification has it, where PyYAML says nothing.

No mapping has a key twice, and no text half a surrogate pair: nothing that is sent or written can have one.
"""

from __future__ import annotations

from typing import Any

import yaml


def load(text: str) -> Any:
    """Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None


class _Loader(yaml.SafeLoader):
    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise yaml.composer.ComposerError(
                None, None, f"{node.value!r} has half a surrogate pair", node.start_mark
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    "in a mapping", node.start_mark, f"the key {key.value!r} is there twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add((key.tag, key.value))
        return node
