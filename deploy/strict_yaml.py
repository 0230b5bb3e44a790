"""YAML as its specification has it: no mapping has a key twice, where PyYAML takes the last in silence."""

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
