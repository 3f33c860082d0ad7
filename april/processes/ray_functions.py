"""Runs user functions in pools of Ray actors. If an actor dies, a rollout function begins again, and any other function
is called again.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import aiohttp

from april.agents.remote_llm import LLMServer, RemoteLLM
from april.core.whole_numbers import whole_number
from april.driver.detokenizer import Detokenizer
from april.driver.llm import LLM, as_coroutine
from april.driver.rewards import Response
from april.driver.user_calls import WorkerThreads
from april.driver.user_code import (
    FunctionLost,
    check_returns,
    describe,
    is_async,
    message_of,
    name_of,
    own_cancellation,
)
from april.errors import ConfigError, RolloutError

MAX_DEATHS = 3
"""Number of actors that die in a row during one call before the call fails."""
MAX_CONCURRENT_CALLS = 1000
"""Largest number of calls of an async function that run in one actor at the same time."""
RESERVED_OPTIONS = {"max_restarts", "max_task_retries", "name", "namespace", "lifetime", "get_if_exists"}


def require_ray() -> Any:
    """Return the package ``ray``; raises ConfigError if it is missing or not initialised."""
    try:
        import ray
    except ImportError:
        raise ConfigError("april.ray needs Ray 2.40 or newer: pip install ray") from None
    if not ray.is_initialized():
        raise ConfigError("april.ray: call ray.init() first; april does not start a cluster itself")
    return ray


def remote(
    function: Callable[..., Any], *, num_actors: int = 1, num_cpus: float = 1, **options: Any
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return an async function that runs ``function`` in Ray actors: a reward, filter, tool or rollout function.

    The async function takes the same arguments. Ray pickles arguments and results; an error of the function is raised
    in the caller. If an actor dies, a rollout function begins again and its calls get the same answers as before; any
    other function is called again. The actors start with the first call and end with the scheduler.

    Args:
        function: plain or async function. An actor runs a plain function in its main thread, one call at a time; calls
            of rollout functions and async functions run concurrently.
        num_actors: number of actors, each of which is a process.
        num_cpus: CPUs that Ray reserves for each actor.
        options: Ray's other options of actors, such as ``num_gpus``, ``resources``, ``runtime_env``;
            ``max_concurrency`` is the number of calls that an actor runs at a time.

    Raises:
        ConfigError: Ray is not initialised, ``function`` cannot be called or sent, or an option is wrong.
    """
    ray = require_ray()
    check_returns("the argument of april.ray.remote", function)
    if hasattr(function, "bind"):
        kind = type(function).__name__
        raise ConfigError(f"april.ray.remote: give a plain or async function that returns its result, got a {kind}")
    for what, count in (("num_actors", num_actors), ("max_concurrency", options.get("max_concurrency", 1))):
        if (number := whole_number(count)) is None or number < 1:
            raise ConfigError(f"{what}: expected a whole number and at least 1, got {count!r}")
    if own := RESERVED_OPTIONS & options.keys():
        raise ConfigError(
            f"april.ray.remote: april itself sets {min(own)} because it replaces actors that died; leave it out"
        )
    try:
        ray.remote(num_cpus=num_cpus, **options)(_PlainActor)
        ray.cloudpickle.dumps(function)
    except Exception as error:
        raise ConfigError(f"april.ray.remote: Ray rejects {name_of(function)}: {describe(error)}") from None
    return _RemoteFunction(function, num_actors, {"num_cpus": num_cpus, **options})


class _RemoteFunction:
    """The result of :func:`remote`; it may be sent to another process before its first call."""

    def __init__(self, function: Callable[..., Any], actors: int, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function, updated=())
        self.__qualname__ = name_of(function)
        with suppress(TypeError, ValueError):  # some builtins have no signature
            self.__signature__ = inspect.signature(function)
        self._pool_arguments = function, actors, options
        self._pools: dict[Any, _Pool] = {}

    def __reduce__(self) -> Any:
        return _RemoteFunction, self._pool_arguments

    async def __call__(self, *arguments: Any, **named: Any) -> Any:
        llm = next((a for a in arguments if isinstance(a, LLM)), None)
        pool = self._pool(arguments, side_by_side=llm is not None or is_async(self._pool_arguments[0]))
        if llm is not None:
            with _llm_server().serve(llm) as served:
                return await pool.call([served if a is llm else a for a in arguments], named)
        deaths = 0
        while True:
            try:
                return await pool.call(arguments, named)
            except FunctionLost as error:
                deaths += 1
                if deaths == MAX_DEATHS:
                    died = f"{deaths} actors in a row died while they ran {self.__qualname__}"
                    raise RolloutError(f"{died}, the last one: {error}") from None

    def _pool(self, arguments: Sequence[Any], *, side_by_side: bool) -> _Pool:
        key = asyncio.get_running_loop(), side_by_side
        if key not in self._pools:
            # Ray ends an actor when its last handle is dropped, so this ends the actors of closed schedulers
            self._pools = {of: pool for of, pool in self._pools.items() if not of[0].is_closed()}
            self._pools[key] = _Pool(*self._pool_arguments, _detokenizer_in(arguments), side_by_side=side_by_side)
        return self._pools[key]


class _Pool:
    """The actors of one function, for one event loop."""

    def __init__(
        self, function: Any, actors: int, options: Mapping[str, Any], detokenizer: Any, *, side_by_side: bool
    ) -> None:
        most = options.get("max_concurrency", MAX_CONCURRENT_CALLS if side_by_side else 1)
        kind = require_ray().remote(**{**options, "max_concurrency": most})(
            _AsyncActor if side_by_side else _PlainActor
        )
        self._make, self._side_by_side = functools.partial(kind.remote, function, detokenizer), side_by_side
        self._actors = {number: self._make() for number in range(actors)}
        self._free: asyncio.Queue[int] = asyncio.Queue()
        """Numbers of actors that can take a call; an actor is listed once for each further call that it can take."""
        for place in range(actors * most):
            self._free.put_nowait(place % actors)

    async def call(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call the function in an actor; raises what the function raises, and FunctionLost if the actor died."""
        ray = require_ray()
        number = await self._free.get()
        actor = self._actors.get(number) or self._actors.setdefault(number, self._make())
        answer = None
        try:
            answer = actor.call.remote([_without_tokenizer(a) for a in arguments], named)
            return deepcopy(await answer)  # Ray's arrays are read-only
        except asyncio.CancelledError:
            if self._side_by_side:
                ray.cancel(answer)
            else:
                self._end(number, actor)  # a plain function ends only with its actor
            raise
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayError):  # in place of an error that Ray cannot pickle
                raise RolloutError(message_of(error.cause)) from None
            error.cause.add_note(error.traceback_str)
            raise error.cause from None
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            self._end(number, actor)
            raise FunctionLost(message_of(error)) from None
        except ray.exceptions.RayError as error:
            raise RolloutError(message_of(error)) from None
        finally:
            self._free.put_nowait(number)

    def _end(self, number: int, actor: Any) -> None:
        if self._actors.get(number) is actor:
            del self._actors[number]
            require_ray().kill(actor)


@functools.cache
def _llm_server() -> LLMServer:
    return LLMServer(require_ray().util.get_node_ip_address())


def _without_tokenizer(value: Any) -> Any:
    """Return an argument as it is sent, without the tokenizer, which the actor has already."""
    if isinstance(value, list):
        return [_without_tokenizer(item) for item in value]
    return replace(value, detokenizer=None) if isinstance(value, Response) else value


def _detokenizer_in(arguments: Sequence[Any]) -> Detokenizer | None:
    items = [item for a in arguments for item in (a if isinstance(a, list) else [a])]
    return next((item.detokenizer for item in items if isinstance(item, Response)), None)


class _PlainActor:

    def __init__(self, function: Callable[..., Any], detokenizer: Detokenizer | None) -> None:
        self._function, self._detokenizer = function, detokenizer
        self._http: Any = None

    def call(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        try:
            value = self._function(*self._received(deepcopy(arguments)), **deepcopy(named))
            return asyncio.run(value) if inspect.iscoroutine(value) else value
        except Exception:
            raise
        except BaseException as error:  # some types of errors would end Ray's actor, others the scheduler's event loop
            raise RolloutError(f"it raised {describe(error)}") from error

    def _received(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._received(item) for item in value]
        if isinstance(value, RemoteLLM):
            return value.open(self._http)
        return replace(value, detokenizer=self._detokenizer) if isinstance(value, Response) else value


class _AsyncActor(_PlainActor):
    """An actor that calls an async function, or plain rollout functions in threads."""

    async def call(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if self._http is None:
            self._rollout = as_coroutine(self._function, WorkerThreads())
            unlimited = aiohttp.ClientTimeout(total=None)
            self._http = aiohttp.ClientSession(timeout=unlimited, connector=aiohttp.TCPConnector(limit=0))
        try:
            return await self._rollout(*self._received(deepcopy(arguments)), **deepcopy(named))
        except asyncio.CancelledError as error:
            raise own_cancellation(error) from None
        except Exception:
            raise
        except BaseException as error:
            raise RolloutError(f"it raised {describe(error)}") from error
