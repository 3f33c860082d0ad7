"""In the place of Ray: actors are threads of this process, arguments and results travel as Ray carries them."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """What a function has raised."""

    def __init__(self, cause: Exception, trace: str) -> None:
        super().__init__("a dual of Ray's")
        self.cause, self.traceback_str = cause, trace


class RayActorError(RayError):
    """An actor has died."""


class ObjectLostError(RayError):
    """As Ray's."""


def carried(value: Any) -> Any:
    """As another process has it: arrays cannot be written to."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(content, buffers=[bytes(buffer) for buffer in buffers])  # noqa: S301 - its own


class Actor:
    """A handle, and the process behind it; one function of a class is called, ``call``."""

    def __init__(self, of: type, arguments: tuple[Any, ...]) -> None:
        self.made = of(*carried(arguments))
        self.running: set[Future[Any]] = set()
        self.dead = False
        self.call = SimpleNamespace(remote=self._called)
        self._threads = ThreadPoolExecutor(1)
        self.loop: asyncio.AbstractEventLoop | None = None
        if inspect.iscoroutinefunction(self.made.call):
            self.loop = asyncio.new_event_loop()
            self._runs = threading.Thread(target=self.loop.run_forever, daemon=True)
            self._runs.start()

    def _called(self, *arguments: Any) -> Reference:
        answer: Future[Any] = Future()
        given = carried(arguments)
        if self.dead:
            answer.set_exception(RayActorError("killed with -9"))
        elif self.loop is not None:
            self.running.add(answer)
            task = asyncio.run_coroutine_threadsafe(self.made.call(*given), self.loop)
            task.add_done_callback(lambda done: self._ended(answer, done))
            return Reference(answer, task)
        else:
            self.running.add(answer)
            done = self._threads.submit(self.made.call, *given)
            done.add_done_callback(lambda done: self._ended(answer, done))
        return Reference(answer, None)

    def _ended(self, answer: Future[Any], done: Future[Any]) -> None:
        self.running.discard(answer)
        if answer.done():
            return
        if done.cancelled():
            answer.set_exception(RayError("it was cancelled"))
        elif (error := done.exception()) is None:
            answer.set_result(carried(done.result()))
        else:
            try:
                cause = carried(error)
            except Exception as why:
                cause = RayError(f"Exception isn't serializable: {why}")
            answer.set_exception(RayTaskError(cause, "".join(traceback.format_exception(error))))

    def die(self, why: str = "killed with -9") -> None:
        """The end of its process: what ran there is heard of no more."""
        if self.dead:
            return
        self.dead = True
        for answer in list(self.running):
            if not answer.done():
                answer.set_exception(RayActorError(why))
        self.running.clear()
        self._threads.shutdown(wait=False)
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        assert self.loop is not None
        if self.made._http is not None:
            for connection in list(self.made._http.connector._acquired):
                connection.transport.abort()
            self.made._http._connector._close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_later(0, self.loop.call_soon, self.loop.call_soon, self.loop.stop)  # once all this is done

    def end(self) -> None:
        """After the test: nothing of it is left."""
        self.die()
        if self.loop is not None:
            self._runs.join()
            self.loop.close()


class Reference:
    """To what a call will return."""

    def __init__(self, answer: Future[Any], task: Future[Any] | None) -> None:
        self.answer, self.task = answer, task

    def __await__(self) -> Any:
        return asyncio.wrap_future(self.answer).__await__()


class StandIn:
    """What april asks of the package, and the actors that there are."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, RayActorError=RayActorError, ObjectLostError=ObjectLostError
    )
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    cloudpickle = SimpleNamespace(dumps=pickle.dumps)

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.options: list[dict[str, Any]] = []
        self.cancelled = 0

    def is_initialized(self) -> bool:
        """There is a cluster."""
        return True

    def remote(self, **options: Any) -> Callable[[type], Any]:
        for name in options.keys() - {"num_cpus", "num_gpus", "resources", "runtime_env", "max_concurrency"}:
            raise ValueError(f"Invalid option keyword {name} for actors.")

        def made(of: type) -> Any:
            def begin(*arguments: Any) -> Actor:
                self.options.append(options)
                self.actors.append(Actor(of, arguments))
                return self.actors[-1]

            return SimpleNamespace(remote=begin)

        return made

    def cancel(self, reference: Reference) -> None:
        assert reference.task is not None
        self.cancelled += 1
        reference.task.cancel()

    def kill(self, actor: Actor) -> None:
        actor.die()
