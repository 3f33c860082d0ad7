"""Starts a run whose scheduler is a Ray actor; a trainer's ranks attach to the run by its name."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

from april.concurrency.daemon_threads import DaemonPool
from april.config.settings import Config
from april.core.batch import SplitBy
from april.core.whole_numbers import whole_number
from april.engines.protocol import Engine
from april.errors import AprilError, ConfigError, EngineError, RankError
from april.processes.addresses import new_token
from april.processes.rank_client import RankClient
from april.processes.rank_packing import pack_call, pack_failure
from april.processes.rank_scheduler import RankScheduler, SharedScheduler
from april.processes.rank_server import RankServer
from april.processes.ranks import Ranks
from april.processes.ray_functions import require_ray

EngineFactory = Callable[[], Sequence[Engine]]

ACTOR_NAME = "core"


class SchedulerActor:
    """The Ray actor that holds the scheduler.

    Args:
        ip: address to listen on for ranks; None means the address of its node.
    """

    def __init__(self, ip: str | None = None) -> None:
        if ip is None:
            import ray

            ip = ray.util.get_node_ip_address()
        self._address = f"[{ip}]:0" if ":" in ip else f"{ip}:0"
        self._token = new_token()
        self._scheduler: SharedScheduler | None = None
        self.server: RankServer | None = None
        self._attachable = asyncio.Event()

    async def start(
        self, *, config: Config, ranks: Ranks, split_by: SplitBy, engines: EngineFactory | None,
        options: Mapping[str, Any],
    ) -> Exception | None:  # fmt: skip
        """Create the scheduler, with the engines that ``engines`` returns; returns the error if that fails."""
        # Use daemon threads: others would keep the process alive when Ray ends an actor that nobody has closed.
        asyncio.get_running_loop().set_default_executor(DaemonPool("april-core"))
        self._config = config

        def make() -> SharedScheduler:
            made = None if engines is None else list(engines())
            named = {**options, "ranks": ranks, "split_by": split_by, "engines": made}
            return SharedScheduler(config, crosses_processes=True, **named)

        try:
            self.server = RankServer(replace(ranks, address=self._address), name="the core", allow_rejoin=True)
            address = await asyncio.to_thread(self.server.listen, self._token)
            self._ranks = replace(ranks, address=address, token=self._token)
            self._attachable.set()
            self._scheduler = await asyncio.to_thread(make)
        except Exception as error:
            return error
        self.server.set_scheduler(self._scheduler)
        return None

    async def rank(self, rank: int) -> tuple[Config, Ranks] | Exception:
        """Return the Config and the Ranks for a rank, or a RankError if there is no such rank."""
        await self._attachable.wait()
        if not 0 <= rank < self._ranks.world_size:
            return RankError((
                f"rank {rank} is not one of {self._ranks.world_size} ranks, which are numbered from 0"
            ), (rank,))
        return self._config, replace(self._ranks, rank=rank)

    async def close(self) -> None:
        """Close the scheduler and its server."""
        with ExitStack() as ends:  # calls these functions in reverse order
            if self.server is not None:
                ends.callback(self.server.stop)
            if self._scheduler is not None:
                ends.callback(self._scheduler.close)
            if self.server is not None:
                ends.callback(self.server.close)
            await asyncio.to_thread(ends.pop_all().close)


log = logging.getLogger("april")

CLOSE_S = 30.0
"""Seconds to wait for the actor to close; an actor that Ray has not started yet would never answer."""
MAX_CONCURRENT_CALLS = 10_000
"""Largest number of the actor's calls that run at the same time."""


class ActorScheduler(RankScheduler):
    """The interface of :class:`april.RolloutScheduler` for one rank of a run, from :func:`april.ray.attach`.

    Every rank makes each call that changes something, in the same order and with the same arguments. A call that
    changes nothing may be made by a single rank. Prompts for ``evaluate`` and ``extend`` and the state for
    ``load_state_dict`` are taken from rank 0.
    """

    _packing_error: Exception | None = None
    """Error because of which rank 0's arguments could not be packed."""

    def __init__(self, config: Config, ranks: Ranks, tokenizer: Any = None) -> None:
        self._set_up(config, ranks, RankClient(ranks, "the core"), tokenizer)
        point = ranks.rendezvous()
        point.server_listens = True
        self._client.join(point)

    @property
    def engines(self) -> list[Engine]:
        """Always empty, because the engines are in other processes."""
        return []

    def _weights_to_send(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(
                "weights=: the engines of a run are in other processes, but weights can only be sent to engines in "
                "rank 0's process; give path=, or transfer="
            )

    def _method_call(self, method: str, bound: inspect.BoundArguments) -> Any:
        method_call = super()._method_call(method, bound)
        given = method_call.arguments
        if method == "weight_update" and given.get("path") is given.get("transfer") is None:
            raise ConfigError(
                "weight_update: the engines of a run are in other processes and cannot read the trainer's model in "
                "place; give path=, or transfer="
            )
        return method_call

    def _packed_arguments(self, method_call: Any) -> bytes:
        if self.ranks.rank:
            return b""
        try:
            return pack_call(method_call.method, method_call.arguments)
        except Exception as error:
            self._packing_error = error
            return pack_failure(error)

    def _run_steps(self, method_call: Any, call: Any) -> Any:
        self._packing_error = None
        try:
            return super()._run_steps(method_call, call)
        except AprilError as error:
            raise self._packing_error or error from None

    def __repr__(self) -> str:
        return f"<ActorScheduler rank {self.ranks.rank} of {self.ranks.world_size}>"


class Run:
    """A run that :func:`scheduler` has started; a ``with`` block closes it at its end."""

    def __init__(self, name: str, core: Any) -> None:
        self.name = name
        self.core = core
        """Handle of the scheduler's actor."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<april.ray.Run {self.name!r}>"

    def close(self) -> None:
        """End the scheduler, its engines and the actor; idempotent."""
        import ray

        if self._closed:
            return
        self._closed = True
        try:
            closing = self.core.close.remote()
            closed, late = ray.wait([closing], timeout=CLOSE_S)
            if late:
                log.warning("run %s: its actor did not close in %g s and is killed", self.name, CLOSE_S)
            for one in closed:
                ray.get(one)
        except ray.exceptions.RayActorError as error:
            log.warning("run %s: its actor was gone already (%s)", self.name, type(error).__name__)
        finally:
            ray.kill(self.core)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()


def scheduler(
    config: Config,
    *,
    name: str,
    prompts: Iterable[Any],
    ranks: int = 1,
    engines: EngineFactory | None = None,
    split_by: SplitBy = "samples",
    rank_timeout_s: float = 1800.0,
    rank_deadline_s: float = 60.0,
    actor_options: Mapping[str, Any] | None = None,
    detached: bool = False,
    **options: Any,
) -> Run:
    """Start a run: an actor with the scheduler. Ray must be initialised.

    The actor lives as long as the process that starts the run. Ray pickles the arguments for it.

    Args:
        config: see :class:`april.Config`; the actor connects to the servers in ``config.engine`` from its own node.
        name: name of the run, unique in the cluster while the run lives; :func:`attach` takes it.
        prompts: as for :class:`april.RolloutScheduler`. Their ``data`` goes to the ranks, so it must be plain: numbers,
            text, bytes, lists and dicts.
        ranks: number of the trainer's ranks, which attach as 0 to ``ranks - 1``.
        engines: function that is called in the actor and returns engine objects; None means those of ``config.engine``.
        split_by: how batches are split; see :meth:`april.Batch.split`.
        rank_timeout_s: seconds that ranks wait for others at a call, and for one that died to come back.
        rank_deadline_s: seconds without a heartbeat after which a rank counts as dead. The exit of a rank's process is
            noticed at once, because its connection closes.
        actor_options: Ray's options for the scheduler's actor, such as ``{"resources": {"head": 1}}``.
        detached: True if the actor outlives the process that started it, until :meth:`Run.close` or ``ray.kill``.
        options: all other arguments of :class:`april.RolloutScheduler` (``reward``, ``rollout``, ``tokenizer``, ...).

    Raises:
        ConfigError: Ray is not installed or not initialised, there is a run of this name, or
            :class:`april.RolloutScheduler` raises it.
        EngineError: the actor, or its engines, could not be created.
    """
    ray = require_ray()
    if not isinstance(config, Config):
        raise ConfigError(f"config must be an april.Config, got {type(config).__name__}")
    if (number := whole_number(ranks)) is None or number < 1:
        raise ConfigError(f"ranks: expected a whole number and at least 1, got {ranks!r}")
    if (actor_options or {}).get("max_restarts"):
        raise ConfigError(
            "actor_options: max_restarts must stay 0, because a core that Ray restarts has lost what it held; make a "
            "new run and load the saved state with load_state_dict"
        )
    group = Ranks(
        world_size=number, address=f"ray:{name}", token=new_token(), rank_timeout_s=rank_timeout_s,
        rank_deadline_s=rank_deadline_s,
    )  # fmt: skip
    lives = {"namespace": _namespace(name), **({"lifetime": "detached"} if detached else {})}
    actor = ray.remote(num_cpus=0, max_concurrency=MAX_CONCURRENT_CALLS)(SchedulerActor)
    try:
        core = actor.options(**{**(actor_options or {}), **lives, "name": ACTOR_NAME}).remote()
    except ValueError:
        raise ConfigError(f"name: a run named {name!r} exists already in this cluster") from None
    run = Run(name, core)
    try:
        error = ray.get(
            core.start.remote(
                config=config, ranks=group, split_by=split_by, engines=engines, options={**options, "prompts": prompts}
            )
        )
        if isinstance(error, Exception):
            raise error
    except ray.exceptions.RayActorError as error:
        run.close()
        raise EngineError(f"the actor of the run could not be made: {error}") from None
    except BaseException:
        run.close()
        raise
    return run


def attach(name: str, rank: int, *, tokenizer: Any = None) -> ActorScheduler:
    """Return the scheduler of a run for one rank of the trainer, in any process of the cluster; close it at the end.

    A rank that was restarted attaches again under its number. It gets its share of the oldest batch that is not
    committed, and the results of all calls that the ranks have completed after that batch. The other ranks wait up to
    ``rank_timeout_s`` for this.

    Args:
        name: name of the run.
        rank: number of this rank.
        tokenizer: tokenizer for the text of evaluations.

    Raises:
        ConfigError: there is no such run.
        RankError: there is no such rank.
    """
    ray = require_ray()
    try:
        core = ray.get_actor(ACTOR_NAME, _namespace(name))
    except ValueError:
        raise ConfigError(f"there is no run {name!r} in this cluster (any more)") from None
    found = ray.get(core.rank.remote(rank))
    if isinstance(found, Exception):
        raise found
    config, ranks = found
    return ActorScheduler(config, ranks, tokenizer)


def _namespace(name: str) -> str:
    return f"april/{name}"
