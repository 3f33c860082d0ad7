"""A run as actors of Ray: one has the scheduler, others may be its hosts. A trainer's ranks attach to it by its name.

Ray does what it is there for: it places actors, names them, and starts hosts anew that died. What happens in them, and
between them, is april as everywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from april.agents.gateway import OPTIONS
from april.config.engines import EngineConfig
from april.config.settings import Config
from april.core.batch import SplitBy
from april.daemon_pool import DaemonPool
from april.driver.loop_thread import LoopThread
from april.engines.kinds.factory import create_engines
from april.engines.protocol import Engine
from april.errors import AprilError, ConfigError, EngineError, RankError, SchedulerClosed
from april.processes import content
from april.processes.center import Center
from april.processes.content import pack_call, pack_failure
from april.processes.host import Host
from april.processes.link import new_token
from april.processes.member import Member
from april.processes.rank_host import FUNCTIONS
from april.processes.rank_scheduler import Looks, OpenCall, OwnScheduler, RankScheduler
from april.processes.ranks import Ranks
from april.processes.remote_hosts import HostListener

EngineFactory = Callable[[int], Sequence[Engine]]

CORE = "core"
"""Name of the actor in the run's namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The engines and functions of a host."""

    engine: EngineConfig
    """describes its engines, where there is no ``factory``"""
    factory: EngineFactory | None
    seed: int
    functions: Mapping[str, Any]


class CoreActor:
    """The actor with the scheduler.

    Args:
        ip: where it listens for hosts and ranks; None means the address of its node.
    """

    def __init__(self, ip: str | None = None) -> None:
        if ip is None:
            import ray

            ip = ray.util.get_node_ip_address()
        self._address = f"[{ip}]:0" if ":" in ip else f"{ip}:0"
        self._token = new_token()
        self._scheduler: OwnScheduler | None = None
        self._door: HostListener | None = None
        self.center: Center | None = None
        self._there = asyncio.Event()
        """Hosts and ranks can come."""

    async def start(
        self, *, config: Config, ranks: Ranks, split_by: SplitBy, engines: EngineFactory | None,
        hosts: Sequence[HostSpec], options: Mapping[str, Any],
    ) -> Exception | None:  # fmt: skip
        """Make the scheduler, which waits for the first of its hosts, if there are any; returns what went wrong.

        ``engines``: given number 0 it makes those of this process; with hosts there are none here.
        """
        # no thread may keep the process alive that nobody has closed: Ray lets it end by itself
        asyncio.get_running_loop().set_default_executor(DaemonPool("april-core"))
        self._config, self._hosts = config, hosts

        def make() -> OwnScheduler:
            made = [] if hosts else None if engines is None else list(engines(0))
            return OwnScheduler(
                config, ranks=ranks, split_by=split_by, engines=made, hosts=self._door, travels=True, **options
            )

        try:
            self.center = Center(replace(ranks, address=self._address), name="the core", returns=True)
            address = await asyncio.to_thread(self.center.listen, self._token)
            self._ranks = replace(ranks, address=address, token=self._token)
            if hosts:
                self._door = HostListener(self._token, self._address)
            self._there.set()
            self._scheduler = await asyncio.to_thread(make)
        except Exception as error:
            return error
        self.center.begin(self._scheduler)
        return None

    async def look(self, method: str, arguments: list[Any]) -> bytes | Exception:
        """Answer what a rank may ask for, for whoever has made the run."""
        try:
            if self._scheduler is None:
                raise SchedulerClosed("the core's actor has no scheduler (yet)")
            return await asyncio.to_thread(self._scheduler.look, method, arguments)
        except Exception as error:
            return error

    async def host(self, index: int) -> tuple[HostSpec, str, str]:
        """Return the part of a host, and the address and token with which it joins."""
        await self._there.wait()
        assert self._door is not None
        return self._hosts[index], self._door.address, self._token

    async def rank(self, rank: int) -> tuple[Config, Ranks] | Exception:
        """Return what a rank must know, or why there is no such rank."""
        await self._there.wait()
        if not 0 <= rank < self._ranks.world_size:
            return RankError(f"rank {rank} is none of {self._ranks.world_size}; ranks count from 0", (rank,))
        return self._config, replace(self._ranks, rank=rank)

    async def close(self) -> None:
        """End everything."""
        for part in (self.center, self._scheduler):
            if part is not None:
                await asyncio.to_thread(part.close)


class HostActor:
    """An actor with engines and functions. Started anew by Ray, it joins anew.

    Args:
        namespace: of the run; the core's actor says what belongs to this host, also to one that was started anew.
        index: number of this host.
    """

    def __init__(self, namespace: str, index: int) -> None:
        import ray

        core = ray.get_actor(CORE, namespace)
        spec, address, token = ray.get(core.host.remote(index))
        self._thread = LoopThread("april-host")
        self._threads = DaemonPool("april-host-to-thread")  # none keeps the process alive when Ray lets it end
        if spec.factory is not None:
            made = spec.factory(index)
        else:
            made = create_engines(spec.engine, None, spec.seed, self._thread.run)
        self._engines = list(made)
        self._host = Host(f"host{index}", engines=self._engines, address=address, token=token, **spec.functions)
        self._joined = self._thread.submit(self._host.astart)

    async def joined(self) -> Exception | None:
        """Returns when it has joined; what went wrong."""
        try:
            await self._in_thread(self._joined.result)
        except Exception as error:
            return error
        return None

    async def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(engines, *arguments)``, in a thread, for a trainer that hands weights over."""
        return await self._in_thread(function, self._engines, *arguments)

    async def close(self) -> None:
        """Leave."""
        await self._thread.run_async(self._host.aclose)
        await self._in_thread(self._thread.stop)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


log = logging.getLogger("april")

OF_HOSTS = frozenset((*FUNCTIONS, *OPTIONS, "tokenizer"))
"""Options of the scheduler that its hosts have, too."""
CLOSE_S = 30.0
"""The wait for the core's actor to close, and then for its hosts; one that Ray has not placed yet never does."""
CALLS_AT_ONCE = 10_000
"""The most calls of an actor at a time."""


class ActorScheduler(RankScheduler):
    """The face of :class:`april.RolloutScheduler` for one rank of a run, from :func:`april.ray.attach`.

    A call that changes something is made by every rank, in the same order and with the same arguments; a call that only
    looks is answered to whoever asks. Prompts for ``evaluate`` and ``extend`` and the state for ``load_state_dict``
    are those that rank 0 gives.
    """

    _unpacked: Exception | None = None
    """The error with which rank 0's arguments could not be packed."""

    def __init__(self, config: Config, ranks: Ranks, tokenizer: Any = None) -> None:
        self._sit_down(config, ranks, Member(ranks, "the core"), tokenizer)
        point = ranks.meeting_point()
        point.listens = True
        self._seat.open(point)

    @property
    def engines(self) -> list[Engine]:
        """None: they are in other processes."""
        return []

    def _weights(self, given: Any) -> None:
        if given is not None:
            raise ConfigError(
                "weights=: the engines of a run are in other processes, and weights go to engines of rank 0's; give "
                "path=, or transfer="
            )

    def _weight_update(self, path: Any, transfer: Any, trained: int | None, weights: Any = None) -> Any:
        if path is None and transfer is None and weights is None:
            raise ConfigError(
                "weight_update: the engines of a run are in other processes and cannot read the trainer's model in "
                "place; give path=, or transfer="
            )
        return super()._weight_update(path, transfer, trained, weights)

    def _arguments(self, made: Any, call: OpenCall) -> bytes:
        if self.ranks.rank:
            return b""
        try:
            return pack_call(made.method, made.arguments, made.named)
        except Exception as error:
            self._unpacked = error
            return pack_failure(error)

    def _body(self, made: Any, call: OpenCall) -> Any:
        self._unpacked = None
        try:
            return super()._body(made, call)
        except AprilError as told:
            raise self._unpacked or told from None

    def __repr__(self) -> str:
        return f"<ActorScheduler rank {self.ranks.rank} of {self.ranks.world_size}>"


class Run(Looks):
    """A run that :func:`scheduler` has started; ``with`` closes it."""

    def __init__(self, name: str, core: Any, hosts: list[Any]) -> None:
        self.name = name
        self.core = core
        """Handle of the core's actor."""
        self.hosts = hosts
        """Handles of the hosts' actors. ``actor.apply.remote(function, *arguments)`` calls
        ``function(engines, *arguments)`` there: so a ``transfer`` hands weights over."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<april.ray.Run {self.name!r}>"

    def _look(self, method: str, *arguments: Any) -> Any:
        import ray

        found = ray.get(self.core.look.remote(method, list(arguments)))
        if isinstance(found, Exception):
            raise found
        return content.LOOKS[method][1](found)

    def close(self) -> None:
        """End the scheduler, its engines and the actor; idempotent."""
        import ray

        if self._closed:
            return
        self._closed = True
        try:
            for actors in ([self.core], self.hosts):
                closing = [actor.close.remote() for actor in actors]
                closed, late = ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S) if closing else ([], [])
                if late:
                    log.warning("run %s: %d actors did not close in %g s and are killed", self.name, len(late), CLOSE_S)
                for one in closed:
                    try:
                        ray.get(one)
                    except ray.exceptions.RayActorError as error:
                        log.warning("run %s: an actor was gone already (%s)", self.name, type(error).__name__)
        finally:
            for actor in (self.core, *self.hosts):
                ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def scheduler(
    config: Config,
    *,
    name: str,
    prompts: Iterable[Any],
    ranks: int = 1,
    hosts: int = 0,
    engines: EngineFactory | None = None,
    split_by: SplitBy = "samples",
    rank_timeout_s: float = 1800.0,
    rank_deadline_s: float = 60.0,
    actor_options: Mapping[str, Any] | None = None,
    host_options: Mapping[str, Any] | None = None,
    detached: bool = False,
    **options: Any,
) -> Run:
    """Start a run: an actor with the scheduler, and one for each host. Ray must be initialised.

    The actors live as long as the process that makes them, and Ray carries over what is given here.

    Args:
        config: see :class:`april.Config`; servers of ``config.engine`` are read by the actor.
        name: of the run, unique in the cluster while it lives; :func:`attach` takes it.
        prompts: as for :class:`april.RolloutScheduler`. Their ``data`` goes to the ranks, so it must be plain: numbers,
            text, bytes, lists and dicts.
        ranks: how many of the trainer attach, as 0 to ``ranks - 1``.
        hosts: actors that have the engines and run the functions, each in a process of its own; 0: the scheduler's
            actor does it all. Servers of ``config.engine`` are dealt out, an embedded model is loaded by each.
        engines: called in host number i with i (without hosts: with 0), returns its engine objects: instead of what
            ``config.engine`` describes.
        split_by: how batches are split; see :meth:`april.Batch.split`.
        rank_timeout_s: how long ranks wait for others at a call, and for one that died to come back.
        rank_deadline_s: after so long without a sign of life a rank counts as dead. The end of an actor is seen at
            once.
        actor_options: Ray's options for the scheduler's actor, such as ``{"resources": {"head": 1}}``.
        host_options: the same for each host, such as ``{"num_gpus": 1}``.
        detached: they outlive the process that made them, until :meth:`Run.close` or ``ray.kill``.
        options: all else that :class:`april.RolloutScheduler` takes (``reward``, ``rollout``, ``tokenizer``, ...).

    Raises:
        ConfigError: Ray is not installed or not initialised, there is a run of this name, or as in
            :class:`april.RolloutScheduler`.
        EngineError: an actor, or its engines, could not be made.
    """
    ray = _ray()
    if not isinstance(config, Config):
        raise ConfigError(f"config must be an april.Config, got {type(config).__name__}")
    for what, count, least in (("ranks", ranks, 1), ("hosts", hosts, 0)):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ConfigError(f"{what}: expected a whole number and at least {least}, got {count!r}")
    if (actor_options or {}).get("max_restarts"):
        raise ConfigError(
            "actor_options: a core that Ray starts anew has lost what it held, so max_restarts stays 0; make a new run "
            "and give it the saved state with load_state_dict"
        )
    group = Ranks(
        world_size=ranks, address=f"ray:{name}", token=CORE, rank_timeout_s=rank_timeout_s,
        rank_deadline_s=rank_deadline_s,
    )  # fmt: skip
    lives = {"namespace": _namespace(name), **({"lifetime": "detached"} if detached else {})}
    functions = {key: value for key, value in options.items() if key in OF_HOSTS}
    specs = [
        HostSpec(
            engine=config.engine if engines else _dealt(config.engine, i, hosts), factory=engines, seed=config.seed,
            functions=functions,
        )
        for i in range(hosts)
    ]
    actor = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(CoreActor)
    try:
        core = actor.options(**{**(actor_options or {}), **lives, "name": CORE}).remote()
    except ValueError:
        raise ConfigError(f"name: there is a run {name!r} in this cluster already") from None
    run = Run(name, core, [])
    try:
        started = core.start.remote(
            config=config, ranks=group, split_by=split_by, engines=engines, hosts=specs,
            options={**options, "prompts": prompts},
        )  # fmt: skip
        host = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE, max_restarts=-1)(HostActor)
        for i in range(hosts):
            placed = host.options(**{**(host_options or {}), **lives, "name": f"host{i}"})
            run.hosts.append(placed.remote(lives["namespace"], i))
        _wait_for(ray, [started, *(made.joined.remote() for made in run.hosts)])
    except BaseException:
        run.close()
        raise
    return run


def attach(name: str, rank: int, *, tokenizer: Any = None) -> ActorScheduler:
    """The scheduler of a run for one rank of the trainer, in whatever process of the cluster; close it at the end.

    A rank that was started anew attaches again under its number. It gets its share of the oldest batch that is not
    committed, and what all ranks were answered since; the others wait for it, ``rank_timeout_s`` at most.

    Args:
        name: of the run.
        rank: number of this rank.
        tokenizer: for the text of evaluations.

    Raises:
        ConfigError: there is no such run.
        RankError: there is no such rank.
    """
    ray = _ray()
    try:
        core = ray.get_actor(CORE, _namespace(name))
    except ValueError:
        raise ConfigError(f"there is no run {name!r} in this cluster (any more)") from None
    seat = ray.get(core.rank.remote(rank))
    if isinstance(seat, Exception):
        raise seat
    config, ranks = seat
    return ActorScheduler(config, ranks, tokenizer)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("april.ray needs Ray 2.40 or newer: pip install ray") from None
    if not ray.is_initialized():
        raise ConfigError("april.ray: call ray.init() first; april begins no cluster of its own")
    return ray


def _namespace(name: str) -> str:
    return f"april/{name}"


def _dealt(engine: EngineConfig, index: int, hosts: int) -> EngineConfig:
    """Return the part of one host in the engines."""
    urls = getattr(engine, "urls", None)
    if urls is None:
        return engine
    if len(urls) < hosts:
        raise ConfigError(f"hosts: {hosts} hosts cannot share {len(urls)} servers; set hosts to {len(urls)} at most")
    return engine.model_copy(update={"urls": urls[index::hosts]})


def _wait_for(ray: Any, waiting: list[Any]) -> None:
    """Until the scheduler and all hosts are there; raises what went wrong, whatever came first."""
    while waiting:
        (there, *_), waiting = ray.wait(waiting, num_returns=1)
        try:
            wrong = ray.get(there)
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"an actor of the run could not be made: {error}") from None
        if isinstance(wrong, Exception):
            raise wrong
