"""Measure decoding and prefilling on servers: requests at several numbers in flight, and a cost fitted to them.

The fit is that of a run (:mod:`april.engines.simulated.fitted_cost`), to requests that are made for it: short and long
prompts and responses, from one in flight to many. The last round is left out of the fit, and says how far off it is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from april.config.settings import Config
from april.core.event_pump import EndedRequest
from april.core.sampling import SamplingParams
from april.core.types import SampleId
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Engine, Request
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.fitted_cost import FEWEST, Requests, fit, predicted_s
from april.errors import ConfigError, EngineError
from april.state_file import write_atomic
from april.view.bars import bars

FORMAT = 1
ROUNDS = 4
"""Rounds over all numbers in flight; the first is thrown away, as a server is slow at first, the last held out."""
PROMPTS = (32, 512)
"""Tokens of the prompts, in turn."""
LEAST_ID = 3
"""Token ids below are often special."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The result of a measurement.

    Attributes:
        cost: of one engine.
        requests: so many it was fitted to.
        held_out: mean error of the time that requests of the last round took, by the number in flight.
        speeds: tokens per second of one engine, by the number in flight, as seen.
    """

    cost: DecodeCost
    requests: int
    held_out: float
    speeds: dict[int, float]

    def write(self, path: Path) -> None:
        """As JSON; raises OSError."""
        plain = {"format": FORMAT, **asdict(self), "cost": asdict(self.cost)}
        write_atomic(path, (json.dumps(plain, indent=1) + "\n").encode())


def read_cost(path: Path) -> DecodeCost:
    """The cost in what :meth:`Profile.write` has written.

    Raises:
        ValueError: it is none; one sentence.
    """
    try:
        found: Any = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError("no format that this april knows")
        return DecodeCost(**{str(name): value for name, value in found["cost"].items()})
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not what april profile has written: {error}") from None


def points(most: int) -> list[int]:
    """Numbers in flight: powers of two, and the most."""
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})


async def profile(
    engine: Engine, most: int, tokens: int, now: Callable[[], float],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Measure one engine, which nobody else uses meanwhile.

    Args:
        engine: to be closed by the caller.
        most: requests in flight.
        tokens: of the longest response; the shortest has a quarter.
        now: clock, in seconds.
        progress: told how many measurements of how many are done.

    Raises:
        EngineError: it failed, or too little came to tell.
    """
    names, numbers = itertools.count(), points(most)
    run = uuid.uuid4().hex[:12]
    seen: list[list[list[EndedRequest]]] = []
    done = 0

    async def one(length: int, prompt: int) -> EndedRequest:
        number = next(names)
        # of this profile alone: a server may remember the prompts of the one before
        ids = np.random.default_rng((int(run, 16), number)).integers(
            LEAST_ID, max(LEAST_ID + 1, engine.capabilities.vocab_size), prompt, dtype=np.int32
        )
        sampling = SamplingParams(length, seed=number)
        began, count = now(), 0
        request = Request(attempt_id=f"profile-{run}-{number:06d}", token_ids=ids, sampling=sampling)
        async with aclosing(engine.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                count += len(chunk.tokens)
        return EndedRequest("", SampleId(0, 0), False, 0, began, now(), prompt, count)

    for _ in range(ROUNDS):
        waves: list[list[EndedRequest]] = []
        for in_flight in numbers:
            lengths = [tokens - (tokens - tokens // 4) * i // max(1, in_flight) for i in range(in_flight)]
            prompts = [PROMPTS[(i + len(seen)) % len(PROMPTS)] for i in range(in_flight)]
            waves.append(list(await asyncio.gather(*map(one, lengths, prompts))))
            done += 1
            progress(done, ROUNDS * len(numbers))
        seen.append(waves)
    return _fitted(numbers, seen)


def _fitted(numbers: Sequence[int], seen: list[list[list[EndedRequest]]]) -> Profile:
    used = [ran for waves in seen[1:-1] for wave in waves for ran in wave]
    found = fit(Requests.of(used))
    if found is None:
        raise EngineError(
            f"{len(used)} requests brought {sum(ran.generated for ran in used)} tokens, which does not tell what a "
            f"step costs; at least {FEWEST} are needed, and more than a few tokens each"
        )
    errors, speeds = [], {}
    for number, wave in zip(numbers, seen[-1], strict=True):
        requests = Requests.of(wave)
        took = float((requests.ended_s - requests.began_s).sum())
        if took <= 0.0:
            raise EngineError(f"{len(wave)} requests took no time, which does not tell what a step costs")
        errors.append(abs(float(predicted_s(requests, found.cost).sum()) / took - 1.0))
        seconds = float(requests.ended_s.max() - requests.began_s.min())
        speeds[number] = float(requests.generated.sum()) / seconds
    return Profile(cost=found.cost, requests=found.requests, held_out=sum(errors) / len(errors), speeds=speeds)


def profile_server(
    url: str, kind: str, api_key_env: str | None, model: str | None, most: int, tokens: int, out: Path, console: Console
) -> Profile:
    """Run ``april profile``.

    Raises:
        ConfigError: an argument is wrong, or the server cannot do what april needs.
        EngineError: the server could not be asked, or failed.
        OSError: nothing can be written there.
    """
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ConfigError(f"--api-key-env: the environment variable {api_key_env} is not set")
    engine = {"kind": kind, "urls": [url], "api_key_env": api_key_env, "model": model}
    engine = {name: value for name, value in engine.items() if value is not None}
    config = Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=tokens, engine=engine)
    _require_writable(out)

    async def measured() -> Profile:
        (opened,) = await open_servers(config.engine)  # type: ignore[arg-type]  # a kind of server, by then
        try:
            with bars(console) as begin:
                most_here = min(most, opened.capabilities.max_in_flight or most)
                now = asyncio.get_running_loop().time
                return await profile(opened, most_here, tokens, now, begin("measuring", 0))
        finally:
            await opened.close()

    found = asyncio.run(measured())
    table = Table("in flight", "tokens per second")
    for number, speed in found.speeds.items():
        table.add_row(f"{number:,}", f"{speed:,.0f}")
    console.print(table)
    cost = found.cost
    console.print(
        f"a step takes {cost.base_s * 1e3:.2f} ms, + {cost.per_sequence_s * 1e6:.1f} \N{MICRO SIGN}s per sequence, "
        f"+ {cost.per_kv_token_s * 1e9:.1f} ns per token in memory; a prefilled token "
        f"{cost.per_prefill_token_s * 1e6:.1f} \N{MICRO SIGN}s. Fitted to {found.requests:,} requests, off by "
        f"{found.held_out:.0%} in the last round, which was left out of that", soft_wrap=True,
    )  # fmt: skip
    found.write(out)
    console.print(f"wrote {out}: april plan LENGTHS --cost {out}", soft_wrap=True)
    return found


def _require_writable(out: Path) -> None:
    """Fail now if ``out`` cannot be written: the measurement takes minutes."""
    there = out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.open("a").close()
    if not there:
        out.unlink()
