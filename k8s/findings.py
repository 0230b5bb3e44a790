"""What is wrong with a manifest: where, and what would be right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake. Printed as `cpu-demo: RayService/warmpath: spec.x: says y; should be z`."""

    where: str  # overlay or file
    object_name: str  # Kind/name
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.object_name}: {self.message}"
