"""Quantities as Kubernetes writes them."""

from __future__ import annotations

import pytest

from k8s.quantities import quantity


@pytest.mark.parametrize(
    ("text", "value"), [("500m", "0.5"), ("2", "2"), (4, "4"), ("1Gi", str(2**30)), ("5M", "5000000")]
)
def test_quantities(text: str | int, value: str) -> None:
    assert str(quantity(text).normalize()) in {value, f"{quantity(value).normalize()}"}


@pytest.mark.parametrize("text", ["", "Gi", "5Zi", "two"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity"):
        quantity(text)
