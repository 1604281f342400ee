"""The proxy of `examples/vllm/disaggregated.py` between pretended engines and a client of OpenAI, for its tests."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import selectors
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from aiohttp.test_utils import TestServer

_spec = importlib.util.spec_from_file_location(
    "disaggregated", Path(__file__).parents[3] / "examples/vllm/disaggregated.py"
)
assert _spec is not None and _spec.loader is not None
disaggregated = sys.modules["disaggregated"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(disaggregated)

PIECE = bytes(1 << 18)


def openai() -> Any:
    """OpenAI's package: it takes a second to import, also where its tests are only collected."""
    return importlib.import_module("openai")


MESSAGES: Any = [{"role": "user", "content": "hello"}]


class Engine:
    """Answers as vLLM does, as far as the tests need it, and keeps what it was asked."""

    def __init__(self, name: str) -> None:
        self.name, self.bodies, self.headers, self.paths = name, [], [], []  # type: ignore[var-annotated]
        self.fault, self.pieces = "", 1 << 20
        self.cancelled, self.go_on = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json() if request.can_read_body else None
        except (ValueError, RecursionError):
            return web.json_response({"error": {"message": "no JSON", "code": 400}}, status=400)
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.paths.append(request.path_qs)
        if self.fault in ("computes", "never ends", "dies") and request.method == "POST":
            await self.go_on.wait()
        if self.fault in ("computes", "never ends") and request.path == "/health":
            if self.fault == "computes":
                self.go_on.set()
            return web.Response()
        if self.fault == "dies":  # after it has said once that it is alive
            if self.paths.count("/health") > 1:
                await asyncio.sleep(60)
            return web.Response()
        if self.fault == "hangs":
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled.set()
        if self.fault == "goes on":
            return await self._endless(request)
        if self.fault.isdigit():
            return web.json_response({"error": {"message": "as the test says", "code": 1}}, status=int(self.fault))
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": self.name, "object": "model"}]})
        if body.get("stream_options") and not body.get("stream"):
            return web.json_response({"error": {"message": "stream_options without stream"}}, status=400)
        return await self._stream(request, body) if body.get("stream") else web.json_response(self._whole(body))

    def _whole(self, body: Any) -> Any:
        many = range(body.get("n") or 1)
        if "messages" in body:
            choices: Any = [{"index": at, "message": {"role": "assistant", "content": self.name}} for at in many]
            return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
        choices = [{"index": at, "text": self.name} for at in many]
        return {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": choices}

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(self.pieces):
            await response.write(PIECE)
        return response

    async def _stream(self, request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(3):
            choice = {"index": 0, "delta": {"content": f"{self.name}{at} "}, "text": f"{self.name}{at} "}
            event = {"id": "1", "object": "chunk", "created": 1, "model": "m", "choices": [choice]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if self.fault == "breaks off":
                assert request.transport is not None
                request.transport.close()
                return response
            if self.fault == "stalls":
                try:
                    await asyncio.sleep(60)
                finally:
                    self.cancelled.set()
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
            event = {"id": "1", "object": "chunk", "created": 1, "model": "m", "choices": [], "usage": usage}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


class Both:
    """Two engines, and the proxy between them and `client`."""

    def __init__(self) -> None:
        self.prefill, self.decode = Engine("prefill"), Engine("decode")
        self.address = ""
        self.servers: dict[str, TestServer] = {}
        self.proxy: Any = None
        self.clients: list[Any] = []

    @property
    def client(self) -> Any:
        """A new one, with connections of its own."""
        made = openai().AsyncOpenAI(base_url=f"{self.address}/v1", api_key="secret", max_retries=0, timeout=30)
        self.clients.append(made)
        return made


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Both]:
    both = Both()
    for engine in (both.prefill, both.decode):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", engine.answer)
        both.servers[engine.name] = server = TestServer(app)
        await server.start_server()
    ports: asyncio.Queue[int] = asyncio.Queue()
    addresses = {name: f"http://127.0.0.1:{server.port}" for name, server in both.servers.items()}
    both.proxy = disaggregated.Proxy(disaggregated.Settings(**addresses, **settings))
    task = asyncio.create_task(both.proxy.serve("127.0.0.1", 0, ready=ports.put_nowait))
    both.address = f"http://127.0.0.1:{await ports.get()}"
    try:
        yield both
    finally:
        for client in both.clients:
            await client.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for server in both.servers.values():
            await server.close()


class _Skipping(selectors.DefaultSelector):
    """Waits for no timer: where nothing comes for a moment, the time until the next one counts as over."""

    _MOMENT = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(timeout if timeout is None else min(timeout, self._MOMENT))
        if not events and timeout is not None and timeout > self._MOMENT:
            self.skipped += timeout - self._MOMENT
        return events


class _Loop(asyncio.SelectorEventLoop):
    """Clients, proxy and engines run in it, so that nobody computes while it waits: however busy the machine is, each
    has all the time that it needs before a timer ends."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return super().time() + self._skipping.skipped


Scenario = Callable[[Both], Coroutine[Any, Any, None]]


def scenario(**settings: Any) -> Callable[[Scenario], Callable[[], None]]:
    def made(body: Scenario) -> Callable[[], None]:
        async def run() -> None:
            async with served(**settings) as both:
                await asyncio.wait_for(body(both), 60)

        def test() -> None:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                runner.run(run())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return made
