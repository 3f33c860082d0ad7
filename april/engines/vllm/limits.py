"""What a vLLM server may lack, and what to do about it."""

from __future__ import annotations

from april.engine_limits import Limit, LimitCode, no_experts, raw_logprobs
from april.engines.protocol import AbortMeans
from april.engines.vllm.plugin import BACKEND
from april.server_text import clean

EXPERTS_NEED = "start the server with --enable-return-routed-experts and --enable-scale-out"
_DEVELOPER = "VLLM_SERVER_DEV_MODE=1"
TOKEN_ROUTE_CLOSED = Limit(
    LimitCode.NO_VERSION_SPANS,
    "The route with token ids and version spans is closed: april uses /v1/completions, where every token gets the "
    "version at submission and no request lives through a weight update",
    "start the server with --enable-scale-out",
    ("--enable-scale-out",),
)
NO_LABELS = Limit(
    LimitCode.NO_LABELS,
    "The server's weights have no label: every token gets the version at submission, new weights are unverified, and a "
    "restart of the server is seen only by the time at which its process began",
    f"start the server with {_DEVELOPER}",
    (_DEVELOPER,),
)
NO_DISK_UPDATES = Limit(
    LimitCode.NO_DISK_UPDATES,
    "Weights cannot be loaded from a directory, and the cache cannot be emptied, through april: the trainer has to do "
    "both",
    f"start the server with {_DEVELOPER}, bound to a private address, as its key does not guard those routes",
    (_DEVELOPER,),
)
NO_TRANSFERS = Limit(
    LimitCode.NO_TRANSFERS,
    "Weights cannot be sent to the server from the trainer's process (weight_update(weights=...))",
    f"""start it with --weight-transfer-config '{{"backend": "nccl"}}', or, with april installed beside vLLM, """
    f"""'{{"backend": "{BACKEND}"}}', which needs no GPU""",
    ("--weight-transfer-config",),
)
NO_ABORT_BY_ID = Limit(
    LimitCode.NO_ABORT_BY_ID,
    "Requests cannot be aborted by id: april streams every token and closes the stream, and tokens that were made and "
    "not sent yet are lost",
    f"start the server with {_DEVELOPER}, or with --enable-scale-out",
    (_DEVELOPER,),
)
RAW_LOGPROBS = raw_logprobs(
    "start the server with --logprobs-mode processed_logprobs", "--logprobs-mode processed_logprobs"
)
NO_EXPERTS = no_experts(EXPERTS_NEED, "--enable-return-routed-experts", "--enable-scale-out")
CHUNKED_PREFILL = Limit(
    LimitCode.CHUNKED_PREFILL,
    "The server runs on a CPU with chunked prefill: it dies of a request with a seed whose prompt it reads in chunks, "
    "so april sends no seeds, and runs do not repeat",
    "start the server with --no-enable-chunked-prefill, and with --max-num-batched-tokens of at least its context",
    ("--no-enable-chunked-prefill",),
)


def no_attachments(why: str, open_route: bool) -> Limit:
    """It takes no images from april, and its model some."""
    return Limit(
        LimitCode.NO_ATTACHMENTS,
        f"The model takes images, and the server none from april: {why}",
        "start the server without --language-model-only, and with --limit-mm-per-prompt above 0" if open_route
        else "start the server with --enable-scale-out",
        () if open_route else ("--enable-scale-out",),
    )  # fmt: skip


def paused(url: str) -> Limit:
    """Somebody has paused it."""
    how = "is paused: no request runs until somebody resumes it (POST /resume)"
    return Limit(LimitCode.PAUSED, how, server=url)


def several_processes(processes: int, means: AbortMeans) -> Limit:
    """Several processes answer at its port."""
    how = (
        "by pausing the whole server, which ends the requests of others too" if means is AbortMeans.PAUSE
        else "by closing streams, which loses tokens that were not sent yet"
    )  # fmt: skip
    return Limit(
        LimitCode.SEVERAL_PROCESSES,
        f"There are {processes} or more API processes behind the port, and an abort by id reaches only one of them: "
        f"april ends requests {how}",
        "start the server with --api-server-count 1, or one server per engine",
        ("--api-server-count 1",),
    )


def several_copies(copies: int) -> Limit:
    """It runs several copies."""
    return Limit(
        LimitCode.SEVERAL_COPIES,
        f"The server runs {copies} data-parallel copies: aborts and weights were right with two of them behind one API "
        "process on a CPU, nothing else was tried",
        "start one server per copy, and name all of them",
    )


def speculation(method: object) -> Limit:
    """It speculates."""
    return Limit(
        LimitCode.SPECULATION,
        f"The server speculates ({clean(method)}): on a CPU n-gram speculation gave wrong tokens at temperatures above "
        "0, with log-probabilities of -9999, and nothing else was tried",
        "start the server without --speculative-config",
    )
