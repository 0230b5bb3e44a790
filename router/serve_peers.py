"""The other Routers, asked through Serve: one call to every running replica of this Router's own deployment.

`DeploymentHandle.broadcast` is public but all or nothing: with one Router hung it would time out without the
answers of the others. So the results are awaited one by one, which is private (ray 2.60): `_results_of`.
So is that a handle is made without asking Serve's controller whether the deployment exists: that waits for
its answer, on the event loop, and as long as the controller is away no stream would go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cache.types import PinId
from router.prefixes.tombstones import GivenBack

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

METHOD = "fleet_report"  # of the Ingress
KEPT = "kept_prefixes"  # likewise
GIVEN_BACK = "prefix_given_back"
HANDED_ON = "prefixes_handed_on"
NOTHING = "check_health"  # what costs a Router nothing to answer


class ServePeers:
    """`Peers` and `OtherRouters` among the replicas of one deployment. Use it on its event loop."""

    def __init__(self, deployment: str, application: str) -> None:
        self._deployment = deployment
        self._application = application
        self._handle: DeploymentHandle | None = None
        # Routers of the deployment, this one included, as of the latest call; None: not known yet.
        self.num_running: int | None = None

    async def ask(self, asker: str, wanted: Sequence[str], timeout_s: float) -> list[bytes]:
        """See `Peers`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        return await _in_time(await self._call(deadline, METHOD, asker, list(wanted)), deadline)

    async def kept_prefixes(self, asker: str, timeout_s: float) -> list[bytes | None]:
        """See `OtherRouters`. Where Serve does not say whom to ask, somebody does not answer."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        results = await self._call(deadline, KEPT, asker)
        done = await _done_in_time(results, deadline)
        answers: list[bytes] = [task.result() for task in done if task.exception() is None]
        # A Router of an older version, for the moment of a rolling update, says that it has none to tell.
        answers += [b"" for task in done if _lacks(task.exception(), KEPT)]
        return [*answers, *[None] * (max(1, len(results)) - len(answers))]

    async def prefix_given_back(self, asker: str, pin_id: PinId, timeout_s: float) -> list[bool]:
        """See `OtherRouters`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        return await _in_time(await self._call(deadline, GIVEN_BACK, asker, pin_id), deadline)

    async def prefixes_handed_on(self, asker: str, given_back: GivenBack, timeout_s: float) -> bool:
        """See `OtherRouters`. It travels as plain values: a Router of another version reads them, too."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        told = given_back.seconds, list(given_back.replicas)
        results = await self._call(deadline, HANDED_ON, asker, *told)
        return 0 < len(results) == len(await _in_time(results, deadline))

    async def count(self, timeout_s: float) -> None:
        """Learn how many there are now. Raises nothing."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        await _in_time(await self._call(deadline, NOTHING), deadline)

    async def _call(self, deadline: float, method: str, *args: object) -> list[Any]:
        """The results to come, of each that is running; none if Serve does not say in time who that is."""
        try:
            if self._handle is None:  # not earlier: a handle needs the running loop
                self._handle = serve.get_deployment_handle(
                    self._deployment, self._application, _check_exists=False
                )
            async with asyncio.timeout_at(deadline):
                results = await _results_of(self._handle.broadcast(method, *args))
        except (TimeoutError, RayServeException, RayError):
            return []  # the first call waits until Serve has told who there is
        self.num_running = len(results) or None
        return results


async def _results_of(response: Any) -> list[Any]:
    results: list[Any] = await response._fetch_replica_results_async()
    return results


async def _in_time(results: Sequence[Any], deadline: float) -> list[Any]:
    """What has come by then. A Router that died under the call does not answer, like one that is too slow."""
    return [task.result() for task in await _done_in_time(results, deadline) if task.exception() is None]


async def _done_in_time(results: Sequence[Any], deadline: float) -> list[asyncio.Future[Any]]:
    """What has come by then, or failed. The others are cancelled: a hung Router must not collect calls."""
    if not results:
        return []
    tasks = {asyncio.ensure_future(result.get_async()): result for result in results}
    try:
        done, late = await asyncio.wait(tasks, timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
    finally:
        for task, result in tasks.items():
            if not task.done():
                result.cancel()
                task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [task for task in done if not task.cancelled()]


def _lacks(error: BaseException | None, method: str) -> bool:
    """Whether Serve says so of whom it asked. That has no type of its own, only a sentence (ray 2.60)."""
    return isinstance(error, RayServeException) and f"method '{method}' that does not exist" in str(error)


def among_routers() -> ServePeers | None:
    """The Routers of this process's deployment; None outside Serve."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    return ServePeers(context.deployment, context.app_name)
