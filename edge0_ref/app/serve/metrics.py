"""`/metrics`, in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge0_ref.app.serve.worker import Worker
from edge0_ref.contract import Counters
from edge0_ref.engine.memory import resident_bytes

MEDIA_TYPE = "text/plain; version=0.0.4"
Sample = tuple[Mapping[str, object], float | int]

TOTALS = {
    "texts_finished": "Texts that came to their end; only their tokens are counted.",
    "texts_failed": "Texts that an error ended.",
    "texts_abandoned": "Texts begun and not ended: their client left, or their time was over.",
    "prompt_tokens": "Tokens of prompts, reused ones included.",
    "cached_tokens": "Tokens of prompts that were not computed again.",
    "completion_tokens": "Tokens generated.",
}
STREAMING = {
    "bytes_read": "Bytes of experts asked of the disk.",
    "reads": "Reads of experts.",
    "hits": "Experts needed that were in a slot already.",
    "read_ahead": "Experts needed that had been read ahead.",
    "on_demand": "Experts needed that had to be waited for.",
    "drops": "Experts dropped; always 0.",
    "wait_seconds": "Seconds waited for reads.",
}


class CountedResponses:
    """The whole application, and every response that it begins, those of the guards included."""

    def __init__(self, app: ASGIApp, responses: Counter[tuple[str, int]]) -> None:
        self._app, self._responses = app, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # once there is one: a client cannot make up labels
                self._responses[route.path if isinstance(route, Route) else "other", message["status"]] += 1
            await send(message)

        await self._app(scope, receive, send_counted)


def metrics_text(worker: Worker, counters: Counters, responses: Mapping[tuple[str, int], int]) -> str:
    """All of them. responses: (path, status) -> how many."""
    counted, read = worker.totals, asdict(counters)
    families = [family(f"edge0_{name}_total", "counter", text, [({}, counted[name])]) for name, text in TOTALS.items()]
    families += [family(f"edge0_{name}_total", "counter", text, [({}, read[name])]) for name, text in STREAMING.items()]
    families += [
        family("edge0_requests_waiting", "gauge", "Requests in the queue.", [({}, worker.waiting)]),
        family("edge0_requests_running", "gauge", "Requests being answered.", [({}, int(worker.running is not None))]),
        family("edge0_resident_bytes", "gauge", "Memory of the process.", [({}, resident_bytes())]),
        family(
            "edge0_responses_total",
            "counter",
            "Responses by path and status; other: refused before the path was read, or none of this server's.",
            [({"path": path, "status": status}, count) for (path, status), count in sorted(responses.items())],
        ),
    ]
    return "".join(families)


def family(name: str, kind: str, text: str, samples: Iterable[Sample]) -> str:
    """One metric. Label values here hold nothing that needs escaping.

    >>> print(family("edge0_reads_total", "counter", "Reads.", [({}, 3)]), end="")
    # HELP edge0_reads_total Reads.
    # TYPE edge0_reads_total counter
    edge0_reads_total 3
    """
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{label}="{content}"' for label, content in labels.items())
        lines.append(f"{name}{{{inside}}} {value}" if inside else f"{name} {value}")
    return "\n".join(lines) + "\n"
