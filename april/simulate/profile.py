"""Measures the decode and prefill cost of a server for ``april profile``: sends requests, and fits a cost to them.

The fit is the same as for a run (:mod:`april.engines.simulated.fitted_cost`), but the requests are made for it: short
and long prompts and responses, and from one to many requests at a time. The last round of requests is not used for the
fit, but measures its error.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from april.config.engines import key_of_variable
from april.config.settings import Config
from april.core.event_pump import EndedRequest
from april.core.sampling import SamplingParams
from april.core.types import SampleId
from april.engines.kinds.factory import open_servers
from april.engines.protocol import Engine, Request
from april.engines.simulated.decode_cost import DecodeCost
from april.engines.simulated.fitted_cost import MIN_REQUESTS, Requests, fit, predicted_s
from april.errors import EngineError
from april.serialization.state_file import write_atomic
from april.view.bars import bars
from april.view.units import cost_of_a_step, short_time

ROUNDS = 4
"""Number of rounds; each measures every number of requests in flight. The first round is discarded, because a server is
slow at first; the last round measures the error of the fit."""
PROMPTS = (32, 512)
"""Prompt lengths in tokens, used in turn."""
LEAST_ID = 3
"""Smallest token id in prompts; smaller ids are often special tokens."""


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """The result of a measurement.

    Attributes:
        cost: fitted cost of one engine.
        requests: number of requests to which the cost was fitted.
        held_out: relative error of the predicted durations in the last round, averaged over the number in flight.
        speeds: measured tokens per second of one engine, by the number of requests in flight.
    """

    cost: DecodeCost
    requests: int
    held_out: float
    speeds: dict[int, float]

    def write(self, path: Path) -> None:
        """Write the profile to a file as JSON. Raises OSError if that fails."""
        write_atomic(path, msgspec.json.format(msgspec.json.encode(self), indent=1))


def read_cost(path: Path) -> DecodeCost:
    """Read the cost from a file written by :meth:`CostProfile.write`.

    Raises:
        ValueError: the file cannot be read or is not a profile; the message is one sentence.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostProfile).cost
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} was not written by april profile: {error}") from None


def in_flight_points(most: int) -> list[int]:
    """Return the numbers of requests in flight to measure: powers of two up to ``most``, and ``most`` itself."""
    return sorted({*(2**i for i in range(most.bit_length()) if 2**i <= most), most})


async def profile(
    engine: Engine, most: int, tokens: int, now: Callable[[], float],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CostProfile:
    """Measure one engine, which must have no other requests during the measurement.

    Args:
        engine: engine to measure; the caller closes it.
        most: largest number of requests in flight.
        tokens: length of the longest response; the shortest response has a quarter of it.
        now: clock in seconds.
        progress: function that is called with the number of finished measurements and the number of all measurements.

    Raises:
        EngineError: the engine failed, or generated too few tokens for a fit.
    """
    names, numbers = itertools.count(), in_flight_points(most)
    run = uuid.uuid4().hex[:12]
    seen: list[list[list[EndedRequest]]] = []
    done = 0

    async def measure_request(length: int, prompt: int) -> EndedRequest:
        number = next(names)
        # every profile draws new prompts, because the server's prefix cache may hold the prompts of an earlier profile
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
            waves.append(list(await asyncio.gather(*map(measure_request, lengths, prompts))))
            done += 1
            progress(done, ROUNDS * len(numbers))
        seen.append(waves)
    return _fitted(numbers, seen)


def _fitted(numbers: Sequence[int], seen: list[list[list[EndedRequest]]]) -> CostProfile:
    used = [ran for waves in seen[1:-1] for wave in waves for ran in wave]
    found = fit(Requests.of(used))
    if found is None:
        raise EngineError(
            f"{len(used)} requests made {sum(ran.generated for ran in used)} tokens, which does not show what a step "
            f"costs; at least {MIN_REQUESTS} requests are needed, with more than a few tokens each"
        )
    errors, speeds = [], {}
    for number, wave in zip(numbers, seen[-1], strict=True):
        requests = Requests.of(wave)
        took = float((requests.ended_s - requests.began_s).sum())
        if took <= 0.0:
            raise EngineError(f"{len(wave)} requests took no time, which does not show what a step costs")
        errors.append(abs(float(predicted_s(requests, found.cost).sum()) / took - 1.0))
        seconds = float(requests.ended_s.max() - requests.began_s.min())
        speeds[number] = float(requests.generated.sum()) / seconds
    return CostProfile(cost=found.cost, requests=found.requests, held_out=sum(errors) / len(errors), speeds=speeds)


def profile_server(
    url: str, kind: str, api_key_env: str | None, model: str | None, most: int, tokens: int, out: Path, console: Console
) -> CostProfile:
    """Measure a server, show the result and write it to ``out``, as ``april profile`` does.

    Raises:
        ConfigError: an argument is wrong, or the server lacks something that april needs.
        EngineError: the server could not be reached, or failed.
        OSError: ``out`` cannot be written.
    """
    if api_key_env is not None:
        key_of_variable(api_key_env, "--api-key-env")
    engine = {"kind": kind, "urls": [url], "api_key_env": api_key_env, "model": model}
    engine = {name: value for name, value in engine.items() if value is not None}
    config = Config(rollout_batch_size=1, n_samples_per_prompt=1, max_response_len=tokens, engine=engine)
    _require_writable(out)

    async def measured() -> CostProfile:
        (opened,) = await open_servers(config.engine)  # type: ignore[arg-type]  # Config has converted the mapping
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
        f"a step takes {cost_of_a_step(cost)}; a prefilled token takes {short_time(cost.per_prefill_token_s)}. Fitted "
        f"to {found.requests:,} requests; the error is {found.held_out:.0%} on the last round, which was not used for "
        "the fit", soft_wrap=True,
    )  # fmt: skip
    found.write(out)
    console.print(f"wrote {out}: april plan LENGTHS --cost {out}", soft_wrap=True)
    return found


def _require_writable(out: Path) -> None:
    """Raise OSError if ``out`` cannot be written; called before the measurement, which takes minutes."""
    there = out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.open("a").close()
    if not there:
        out.unlink()
