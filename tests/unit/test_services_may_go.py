"""What FastAPI remembers of services is found where `tests/conftest.py` looks for it, and is let go."""

from __future__ import annotations

import gc
import weakref

from fastapi import FastAPI

from tests.conftest import caches_of_fastapi, emptied


class Service:
    async def answer(self) -> None: ...


def remembered() -> weakref.ref[Service]:
    service = Service()
    FastAPI().add_api_route("/", service.answer)
    return weakref.ref(service)


def test_a_service_is_kept_until_the_caches_areemptied() -> None:
    service = remembered()
    gc.collect()
    assert service() is not None
    assert any([emptied(cache) for cache in caches_of_fastapi()])
    gc.collect()
    assert service() is None
    assert not any([emptied(cache) for cache in caches_of_fastapi()])
