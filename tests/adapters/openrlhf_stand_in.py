"""Stands in for OpenRLHF and Ray: what april's adapter meets there, by the same names, without vLLM or processes.

Written from their contract: the loader of prompts and its state, the samples generator, the trainers' loops, the engine
actor and its executor. The real ones are in real_openrlhf/.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from real_schedulers import LENGTHS, VOCAB

import april.adapters.openrlhf
from april.adapters.openrlhf.arguments import config_of
from april.adapters.openrlhf.rollouts import OpenRLHFRollouts
from april.engines.protocol import Chunk, Request
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.engine import SimulatedEngine, by_sample_key

from . import modules, tree

ROWS, GROUPS, SAMPLES = 24, 4, 2


def namespace(**changes: Any) -> SimpleNamespace:
    """OpenRLHF's flags as its command line leaves them; ``rollout__top_p=0.9`` changes one."""
    values: dict[str, Any] = {
        "data.max_len": 200, "data.max_images_per_prompt": 0, "rollout.batch_size": GROUPS,
        "rollout.n_samples_per_prompt": SAMPLES, "rollout.max_new_tokens": 100, "rollout.temperature": 1.0,
        "rollout.top_p": 1.0, "rollout.vllm_generate_batch_size": GROUPS, "train.seed": 42, "train.num_episodes": 1,
        "train.agent_func_path": None, "train.async_enable": False, "train.async_queue_size": 1,
        "train.partial_rollout_enable": False, "train.colocate_all": False,
        "vllm.num_engines": 2, "vllm.enable_sleep": False, "reward.remote_url": ["reward.py"],
        "algo.dynamic_filtering_enable": False, "algo.dynamic_filtering_range": (0.0, 1.0),
        "algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "mask",
        "algo.advantage.is_correction_threshold": [0.5, 5.0], "actor.eps_clip_low_high": [0.2, 0.2],
    }  # fmt: skip
    return tree(values, changes)


class Tokenizer:
    """Each token is a word, its number."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


def row(number: int) -> tuple[str, str]:
    """Prompt and label."""
    return f"{100 + number} 7", str(number)


class Loader:
    """OpenRLHF's StatefulDataLoader of batches of one: a state is that of the newest iterator, and the state of one
    that has ended begins the next pass."""

    def __init__(self, rows: int = ROWS) -> None:
        self._rows = rows
        self._pass = -1
        self._at = 0
        self._resumed = False

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed or self._at > self._rows:
            self._pass, self._at = self._pass + 1, 0
        self._resumed = False
        order = list(range(self._rows))
        random.Random(self._pass).shuffle(order)
        return self._iterate(order)

    def _iterate(self, order: list[int]) -> Iterator[Any]:
        while self._at < len(order):
            self._at += 1
            prompt, label = row(order[self._at - 1])
            yield ["default"], [prompt], [label], [None]
        self._at = len(order) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"pass": self._pass, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert set(state) == {"pass", "at"}
        self._pass, self._at, self._resumed = state["pass"], state["at"], True


class Engine(SimulatedEngine):
    """0.5 ms a token, so that steps end in the middle of responses; with what OpenRLHF's actor adds to an engine."""

    def __init__(self, name: str) -> None:
        cost = DecodeCost(5e-4, 0.0, 0.0)
        super().__init__(name, cost, by_sample_key(LENGTHS), max_running=64, vocab_size=VOCAB)
        self.counted = 0
        self.running = 0
        """Requests that have begun and not ended."""
        self.judged: list[tuple[str, str, Any]] = []
        self.answer: Callable[[str, str, Any], Any] = lambda query, prompt, label: {
            "rewards": [float(len(query.split()))], "scores": [0.5], "extra_logs": {"words": [1.0]}
        }  # fmt: skip

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.running += 1
        try:
            async for chunk in super().generate(request):
                yield chunk
        finally:
            self.running -= 1

    def receive(self) -> None:
        """The trainer puts weights here, which OpenRLHF's actor lets it do with april's requests gone only."""
        assert self.running == 0
        self.counted += 1

    async def pushes(self) -> int:
        return self.counted

    async def judge(self, query: str, prompt: str, label: Any) -> Any:
        self.judged.append((query, prompt, label))
        return self.answer(query, prompt, label)


class Run:
    """Rollouts over two simulated engines, driven as OpenRLHF's loop drives its generator; a context manager."""

    def __init__(
        self, settings: dict[str, Any] | None = None, *, rows: int = ROWS, loader: type[Loader] = Loader,
        engine: type[Engine] = Engine, tokenizer: Any = None, **flags: Any,
    ) -> None:  # fmt: skip
        self.args = namespace(**flags)
        self.engines = [engine("e0"), engine("e1")]
        self.loader: Any = loader(rows)
        own = {"over_sampling_batch_size": 2 * GROUPS} if settings is None else settings

        async def opened(actors: Any) -> list[Engine]:
            return self.engines

        from april.adapters.common.data_loader import CheckpointedLoader

        config = config_of(self.args, own)
        tokenizer = tokenizer or Tokenizer()
        self.rollouts = OpenRLHFRollouts(self.args, config, tokenizer, [], open_engines=opened, check=True)
        self.loader = CheckpointedLoader(self.loader, self.rollouts.save, self.rollouts.load)
        self.rows: Any = None
        self.labels: list[str] = []
        """Of the groups that were delivered."""
        self.responses: list[dict[str, Any]] = []

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollouts.close()

    def step(self, pushes: int = 1) -> bool:
        """One batch, which is trained on; False: the episode is over."""
        if self.rows is None:
            self.rows = iter(self.loader)
        responses, self.drawn, ended = self.rollouts.next(self.rows)
        if ended:
            assert not responses
            self.rows = None
            return False
        groups = [responses[i : i + SAMPLES] for i in range(0, len(responses), SAMPLES)]
        assert all(len({r["label"] for r in group}) == 1 and len(group) == SAMPLES for group in groups)
        self.labels += [group[0]["label"] for group in groups]
        self.responses += responses
        self.push(pushes)
        return True

    def push(self, times: int = 1) -> None:
        """The trainer puts weights into the engines."""
        for _ in range(times):
            self.rollouts.hand_over(lambda: [engine.receive() for engine in self.engines] and None)

    def episode(self) -> None:
        while self.step():
            pass


class Handle:
    """Of an actor: its methods run in threads of its own, as many at once as its class was made for."""

    def __init__(self, cls: type, options: dict[str, Any], args: Any, kwargs: Any) -> None:
        self._threads = ThreadPoolExecutor(options.get("max_concurrency", 1))
        self.object_ = cls(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.object_, name)
        return SimpleNamespace(remote=lambda *args: self._threads.submit(method, *args))

    def end(self) -> None:
        self._threads.shutdown()


def get(reply: Any) -> Any:
    """``ray.get``: of a list, all of them; what one raises comes when it is raised, whatever the others do."""
    return [get(one) for one in reply] if isinstance(reply, list) else reply.result(timeout=60)


def remote(*args: Any, **options: Any) -> Any:
    """``ray.remote``: the class below is found where Ray keeps it, and ``.remote()`` makes an actor."""

    def decorate(cls: type) -> Any:
        modified = SimpleNamespace(__ray_actor_class__=cls)
        actor = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=modified), options_=options)
        actor.remote = lambda *args, **kwargs: Handle(cls, options, args, kwargs)
        return actor

    return decorate(args[0]) if args else decorate


class SamplesGenerator:
    """The generator's contract: lazy iterator, training batches by ``_generate_vllm``, evaluation by the same."""

    def __init__(
        self, strategy: Any, prompts_dataloader: Any, eval_dataloader: Any, tokenizer: Any, vllm_engines: Any
    ) -> None:
        self.strategy, self.args, self.tokenizer, self.vllm_engines = strategy, strategy.args, tokenizer, vllm_engines
        self.prompts_dataloader, self.eval_dataloader = prompts_dataloader, eval_dataloader
        self.stock_calls = 0

    def generate_eval_samples(self, **generate_kwargs: Any) -> Any:
        return self._generate_vllm(iter(self.eval_dataloader), 4, False, **generate_kwargs)

    def generate_samples(self, **generate_kwargs: Any) -> Any:
        if getattr(self, "_dataloader_iter", None) is None:
            self._dataloader_iter = iter(self.prompts_dataloader)
        samples, drawn, exhausted = self._generate_vllm(
            dataloader_iter=self._dataloader_iter, num_prompts=self.args.rollout.batch_size,
            dynamic_filtering=self.args.algo.dynamic_filtering_enable, **generate_kwargs,
        )  # fmt: skip
        if exhausted:
            self._dataloader_iter = None
        return samples, None, drawn, self._dataloader_iter is None

    def _generate_vllm(
        self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: Any, **generate_kwargs: Any
    ) -> Any:
        self.stock_calls += 1
        return ["stock"] * num_prompts, num_prompts, True

    def _process_response_into_experience(self, response: Any, **generate_kwargs: Any) -> Any:
        return SimpleNamespace(**response)


class BasePPOTrainer:
    """What both trainers have: an update, and the broadcast after it."""

    def __init__(self, strategy: Any, vllm_engines: Any) -> None:
        self.args, self.vllm_engines = strategy.args, vllm_engines
        self.update = getattr(strategy, "update", lambda samples: None)
        """The optimizer's step, of the test."""
        self.trained: list[Any] = []
        self.checkpoints: list[Any] = []

    def train_step(self, samples: Any) -> None:
        self.update(samples)
        self.trained.append(samples)
        self.broadcast_to_vllm()

    def broadcast_to_vllm(self) -> None:
        for engine in self.vllm_engines:
            engine.receive()


class PPOTrainer(BasePPOTrainer):
    """The synchronous loop: a batch, an update, weights into the engines, the loader's state into a checkpoint."""

    def __init__(self, strategy: Any, vllm_engines: Any) -> None:
        super().__init__(strategy, vllm_engines)
        self.prompts_dataloader: Any = Loader()
        self.samples_generator = SamplesGenerator(strategy, self.prompts_dataloader, [1], Tokenizer(), vllm_engines)
        self.start: Any = None

    def fit(self, global_step: int = 0) -> None:
        if self.start is not None:
            self.prompts_dataloader.load_state_dict(self.start)
            self.broadcast_to_vllm()
        while True:
            samples, _, _, exhausted = self.samples_generator.generate_samples(max_len=200)
            if samples:
                self.train_step(samples)
                self.checkpoints.append(self.prompts_dataloader.state_dict())
                self.samples_generator.generate_eval_samples()
            if exhausted:
                break


class GenerateSamplesActor:
    """The half of the asynchronous trainer that generates."""

    def __init__(self, strategy: Any, vllm_engines: Any, *, lock: Any, batches: Any, slots: Any) -> None:
        self.prompts_dataloader: Any = Loader()
        self.samples_generator = SamplesGenerator(strategy, self.prompts_dataloader, [1], Tokenizer(), vllm_engines)
        self._partial_rollout = strategy.args.train.partial_rollout_enable
        self.lock, self.batches, self.slots = lock, batches, slots

    def load_state_dict(self, state_dict: Any) -> None:
        self.prompts_dataloader.load_state_dict(state_dict)

    def fit(self, episode: int, total_consumed_prompts: int) -> None:
        exhausted = False
        while not exhausted:
            if self.slots.get() == "killed":
                return
            if not self._partial_rollout:
                self.lock.acquire()
            try:
                samples, _, _, exhausted = self.samples_generator.generate_samples()
            finally:
                if not self._partial_rollout:
                    self.lock.release()
            if samples:
                self.batches.put((samples, self.prompts_dataloader.state_dict()))
            else:
                self.slots.put(None)
        self.batches.put("done")


class TrainingActor(BasePPOTrainer):
    """The half that trains; its broadcast waits for what holds the lock."""

    def __init__(self, strategy: Any, vllm_engines: Any, *, lock: Any, batches: Any, slots: Any) -> None:
        super().__init__(strategy, vllm_engines)
        self.lock, self.batches, self.slots = lock, batches, slots

    def fit(self, global_step: int = 0) -> None:
        while (payload := self.batches.get()) != "done":
            self.slots.put(None)
            self.train_step(payload[0])
            self.checkpoints.append(payload[1])

    def broadcast_to_vllm(self) -> None:
        with self.lock:
            super().broadcast_to_vllm()


class PPOTrainerAsync:
    """Makes its halves by the names that stand in its module; a batch that is taken from the queue frees a place."""

    def __init__(self, strategy: Any, vllm_engines: Any) -> None:
        module: Any = sys.modules["openrlhf.trainer.ppo_trainer_async"]
        size = strategy.args.train.async_queue_size
        self.slots: queue.SimpleQueue[Any] = queue.SimpleQueue()
        shared = {"lock": threading.Lock(), "batches": queue.SimpleQueue(), "slots": self.slots}
        for _ in range(size):
            self.slots.put(None)
        self.generator_actor = module.GenerateSamplesActor.remote(strategy, vllm_engines, **shared)
        self.trainer_actor = module.TrainingActor.remote(strategy, vllm_engines, **shared)
        self.start: Any = None

    def fit(self) -> None:
        if self.start is not None:
            get(self.generator_actor.load_state_dict.remote(self.start))
            get(self.trainer_actor.broadcast_to_vllm.remote())
        get([self.trainer_actor.fit.remote(0), self.generator_actor.fit.remote(0, 0)])

    def kill(self) -> None:
        """Both halves, wherever they are; april is closed by the test."""
        self.slots.put("killed")
        for actor in (self.generator_actor, self.trainer_actor):
            actor.end()


class Executor:
    """The executor of single turns: a function in threads, or servers."""

    reward_func: Any = None

    async def _fetch_rewards_via_func(self, queries_list: Any, prompts_list: Any, labels_list: Any) -> Any:
        return [self.reward_func(queries_list, prompts_list, labels_list)]

    async def _fetch_rewards_via_http(self, queries_list: Any, prompts_list: Any, labels_list: Any) -> Any:
        return [{"rewards": 2.0}]


class RolloutRayActor:
    """The engine actor; the test gives it an AsyncLLM."""

    llm: Any = None

    async def __init__(self, llm: Any) -> None:  # type: ignore[misc]
        self.llm, self.executor, self.written = llm, Executor(), []

    async def update_weight(self, name: str, dtype: Any, shape: Any, empty_cache: bool = False) -> str:
        self.written.append(name)
        return "written"

    async def update_weight_cuda_ipc(
        self, name: str, dtype: Any, shape: Any, ipc_handles: Any, empty_cache: bool = False
    ) -> str:
        self.written.append(name)
        return "written"


HOMES = {
    "PPOTrainer": "ppo_trainer", "BasePPOTrainer": "ppo_trainer", "GenerateSamplesActor": "ppo_trainer_async",
    "TrainingActor": "ppo_trainer_async", "PPOTrainerAsync": "ppo_trainer_async", "RolloutRayActor": "ray.vllm_engine",
    "SamplesGenerator": "ppo_utils.samples_generator",
}  # fmt: skip
"""Where OpenRLHF's classes stand."""


@contextmanager
def installed(**changes: Any) -> Iterator[dict[str, ModuleType]]:
    """OpenRLHF and Ray as modules; ``SamplesGenerator=...`` puts another class in a place."""
    classes = {**globals(), **changes}
    made = modules({
        "ray": {"remote": remote, "get": get},
        "openrlhf.trainer.ppo_utils.samples_generator": {"SamplesGenerator": classes["SamplesGenerator"]},
        "openrlhf.utils.agent": {"SingleTurnAgentExecutor": classes["Executor"]},
        "openrlhf.trainer.ppo_trainer": {
            "PPOTrainer": remote(classes["PPOTrainer"]), "BasePPOTrainer": classes["BasePPOTrainer"],
        },
        "openrlhf.trainer.ppo_trainer_async": {
            "GenerateSamplesActor": remote(classes["GenerateSamplesActor"]),
            "TrainingActor": remote(classes["TrainingActor"]),
            "PPOTrainerAsync": remote(classes["PPOTrainerAsync"]),
        },
        "openrlhf.trainer.ray.vllm_engine": {"RolloutRayActor": remote(classes["RolloutRayActor"])},
        "openrlhf.utils": {"get_strategy": lambda args: SimpleNamespace(args=args)},
        "openrlhf.cli.train_ppo_ray": {},
    })  # fmt: skip
    for name, home in HOMES.items():
        classes[name].__module__ = f"openrlhf.trainer.{home}"
    before = {name: sys.modules.get(name) for name in (*made, "april.adapters.openrlhf.actors")}
    sys.modules.update(made)
    sys.modules.pop("april.adapters.openrlhf.actors", None)
    vars(april.adapters.openrlhf).pop("actors", None)
    try:
        yield made
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
