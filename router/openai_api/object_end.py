"""Where a JSON object ends that comes in parts, and is known to be one."""

from __future__ import annotations


class ObjectEnd:
    """Looks at each character once."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0  # braces that are open
        self._is_in_string = False
        self._is_escaped = False  # the next character is, whatever it is

    def find(self, part: str) -> int:
        """Characters of the part that belong to the object. part: what follows the last one, from `{` on."""
        if self.is_over:
            return 0
        for at, character in enumerate(part):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = character == "\\"
                self._is_in_string = character != '"'
            elif character == '"':
                self._is_in_string = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return at + 1
        return len(part)
