"""Disaggregated prefill: one vLLM computes prompts, another one generates; kvloom's shared tier is between them.

    vllm serve MODEL --port 8100 --kv-transfer-config '{"kv_connector": "KVLoomConnector", "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"config": "examples/gpu_disk.yaml"}}'
    vllm serve MODEL --port 8200 --kv-transfer-config '{... "kv_role": "kv_consumer" ...}'
    python examples/vllm/disaggregated.py --prefill http://localhost:8100 --decode http://localhost:8200 --port 8000

A chat or completion goes to the first with `max_tokens: 1`, and then, as the client wrote it, to the second, which
waits a little for KV that is still being written. Whatever does not come is computed there: the answer is the same,
also while the first is down. Everything else under /v1/, and /health, /ping, /version, /tokenize and /detokenize, goes
to the second alone. Its errors reach the client as they are.

It speaks HTTP without TLS, on 127.0.0.1 unless `--host` says otherwise. It needs aiohttp, which vLLM brings along.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import resource
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

log = logging.getLogger("disaggregated")

GENERATING = {"/v1/completions", "/v1/chat/completions"}
PASSED_ON = ("/v1/", "/health", "/ping", "/version", "/tokenize", "/detokenize")
OF_ONE_CONNECTION = {
    "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
FILES_OF_ITS_OWN = 64
MOST_VALUES = 1 << 20
"""Maximum number of values in a request's JSON. Parsing as many takes a second, in which no stream goes on."""
ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "stream": False, "n": 1}
NOT_FOR_PREFILL = (
    "max_completion_tokens", "min_tokens", "stream_options", "best_of", "use_beam_search", "logprobs", "top_logprobs",
    "prompt_logprobs", "echo",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    prefill: str
    decode: str
    wait: float = 5.0
    """Seconds that the second waits at most for KV of the first."""
    connect_timeout: float = 5.0
    prefill_timeout: float = 120.0
    """Seconds that a prompt may take; then the second engine computes it."""
    silence: float = 5.0
    """Seconds after which an engine for prefill that still computes is asked whether it is alive, and that it has for
    its answer."""
    timeout: float = 600.0
    """Seconds between two pieces of an answer, or before the first."""
    retry_after: float = 5.0
    """Seconds for which an engine for prefill that could not be reached is not tried again; then by one request."""
    client_timeout: float = 30.0
    """Seconds that a client may take to send a request, to take a piece of an answer, and between two requests."""
    max_body: int = 32 << 20
    max_requests: int = 512
    max_bodies: int = 1 << 30
    """Bytes of all requests together. One that does not say its size counts as the largest."""
    max_connections: int = 1024
    """Fewer where the process may open few files."""


class Proxy:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._most_connections = affordable(settings.max_connections)
        self._session: aiohttp.ClientSession | None = None
        self._prefill_down_until = 0.0
        self._requests = self._bytes = 0
        self._active: dict[Any, float] = {}
        """Time of the last activity of each connection; infinity while it is working."""
        self._transports: dict[Any, Any] = {}
        """Also of those that aiohttp has closed, which end when the client has taken the rest of its answer."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self.settings.max_body)
        app.cleanup_ctx.append(self._connected)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=self.settings.connect_timeout)
        # An engine closes idle connections, perhaps just when one is used again: each request has its own.
        connector = aiohttp.TCPConnector(limit=2 * self._most_connections, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent"),
        ) as self._session:  # fmt: skip
            yield

    # -- a request -----------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if not request.path.startswith(PASSED_ON) or ".." in request.path:
            return problem(404, "not_found_error", f"{request.path} is not passed on")
        size = self._size(request)
        if self._requests >= self.settings.max_requests or self._bytes + size > self.settings.max_bodies:
            return problem(503, "overloaded_error", "too many requests at once", {"Retry-After": "1"})
        self._requests += 1
        self._bytes += size
        self._active[request.protocol] = float("inf")
        try:
            return await self._answer(request)
        finally:
            self._requests -= 1
            self._bytes -= size
            self._active[request.protocol] = asyncio.get_running_loop().time()

    def _size(self, request: web.Request) -> int:
        """Bytes of a request, at most."""
        most = self.settings.max_body
        if not request.can_read_body:
            return 0
        if request.content_length is None or "Content-Encoding" in request.headers:
            return most
        return min(request.content_length, most)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self.settings.client_timeout):
                data = await request.read()
        except TimeoutError:
            return problem(408, "timeout_error", "the request did not come in time")
        except web.HTTPRequestEntityTooLarge:
            text = f"the request is larger than {self.settings.max_body} bytes"
            return problem(413, "invalid_request_error", text)
        except web.RequestPayloadError:
            return problem(400, "invalid_request_error", "the request is not in its Content-Encoding, or is cut off")
        headers = passed_on(request.headers)
        headers.popall("Content-Encoding", None)  # aiohttp has undone it
        if request.method == "POST" and request.path in GENERATING:
            bodies = bodies_of(data, self.settings.wait)
            if bodies is not None and await self._prefill(request.path_qs, headers, bodies.prefill):
                data = bodies.decode
        return await self._decode(request, headers, data)

    async def _prefill(self, path: str, headers: CIMultiDict[str], data: bytes) -> bool:
        """Compute a prompt; whether its KV is on its way."""
        assert self._session is not None
        now = asyncio.get_running_loop().time()
        if now < self._prefill_down_until:
            return False
        if self._prefill_down_until:  # this request tries it, the others do not wait for that
            self._prefill_down_until = now + 2 * self.settings.silence + self.settings.retry_after
        computing = asyncio.create_task(self._compute(path, headers, data))
        try:
            status = await self._in_time(computing)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._prefill_down_until = asyncio.get_running_loop().time() + self.settings.retry_after
            log.warning("%s: %s: %s", self.settings.prefill, type(error).__name__, error)
            return False
        finally:
            computing.cancel()
        self._prefill_down_until = 0.0
        if status is None:  # a prompt that takes too long does not keep others from it
            log.warning("%s: a prompt took more than %g s", self.settings.prefill, self.settings.prefill_timeout)
        elif status >= 500 or 300 <= status < 400:  # no redirection is followed; the second engine says the rest, too
            log.warning("%s: status %d", self.settings.prefill, status)
        return status == 200

    async def _in_time(self, computing: asyncio.Task[int]) -> int | None:
        """The status of the answer; None for a prompt that takes too long. Raises TimeoutError if the engine is silent,
        and what else comes of asking it."""
        try:
            async with asyncio.timeout(self.settings.prefill_timeout) as patience:
                while not (await asyncio.wait({computing}, timeout=self.settings.silence))[0]:
                    await self._ask_whether_alive(computing)
        except TimeoutError:
            if not patience.expired():
                raise
            await self._ask_whether_alive(computing)  # it may have gone since it was last asked
        return computing.result() if computing.done() else None

    async def _compute(self, path: str, headers: CIMultiDict[str], data: bytes) -> int:
        """The status of the answer."""
        assert self._session is not None
        url = self.settings.prefill + path
        async with self._session.post(url, data=data, headers=headers, allow_redirects=False) as answer:
            async for _ in answer.content.iter_any():  # nobody wants it, however long it is
                pass
            return answer.status

    async def _ask_whether_alive(self, computing: asyncio.Task[int]) -> None:
        """A long prompt keeps vLLM's server from no question. Raises TimeoutError if it does not answer."""
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(self.settings.silence),
                self._session.get(f"{self.settings.prefill}/health", allow_redirects=False),
            ):
                pass
        except TimeoutError:
            if not computing.done():
                raise TimeoutError(f"no answer from /health in {self.settings.silence:g} s") from None

    async def _decode(self, request: web.Request, headers: CIMultiDict[str], data: bytes) -> web.StreamResponse:
        assert self._session is not None
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, self.settings.decode + request.path_qs, data=data or None, headers=headers,
                timeout=aiohttp.ClientTimeout(None, None, self.settings.timeout, self.settings.connect_timeout),
                allow_redirects=False,
            ) as answer:  # fmt: skip
                response = web.StreamResponse(status=answer.status, headers=passed_on(answer.headers))
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await self._send(request, response.write(piece))
                await self._send(request, response.write_eof())
                return response
        except (aiohttp.ClientConnectionResetError, ConnectionResetError):
            if response is not None:
                return response  # the client has gone
            return problem(502, "upstream_error", "the engine closed the connection")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("%s: %s: %s", self.settings.decode, type(error).__name__, error)
            status, text = (504, "did not answer in time") if isinstance(error, TimeoutError) else (502, "failed")
            if response is None:
                return problem(status, "upstream_error", f"the engine {text}")
            return await broken_off(request, response, f"the engine {text}")

    async def _send(self, request: web.Request, sending: Awaitable[None]) -> None:
        """Raises ConnectionResetError for a client that does not take it in time."""
        try:
            async with asyncio.timeout(self.settings.client_timeout):
                await sending
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not take its answer") from None

    # -- connections ---------------------------------------------------------------------------------------------------

    async def serve(self, host: str, port: int, *, ready: Any = None) -> None:
        """Until it is cancelled. ready: called with the port."""
        runner = web.AppRunner(
            self.app(), handler_cancellation=True, keepalive_timeout=self.settings.client_timeout, access_log=None
        )
        await runner.setup()
        server = runner.server
        assert server is not None

        def accepted() -> asyncio.BaseProtocol:
            return server() if len(server.connections) < self._most_connections else Refused()

        listening = await asyncio.get_running_loop().create_server(accepted, host, port)
        try:
            if ready is not None:
                ready(listening.sockets[0].getsockname()[1])
            while True:
                await asyncio.sleep(self.settings.client_timeout / 4)
                self._close_idle(server)
        finally:
            listening.close()
            await runner.cleanup()

    def _close_idle(self, server: web.Server) -> None:
        """Also those that have not sent a whole request yet, which aiohttp would wait for, and those that do not take
        the rest of an answer, which a close would wait for."""
        now = asyncio.get_running_loop().time()
        self._active = {connection: self._active.get(connection, now) for connection in server.connections}
        self._transports = {each: each.transport or self._transports.get(each) for each in self._active}
        for connection, since in self._active.items():
            transport = self._transports[connection]
            if now - since > self.settings.client_timeout and transport is not None:
                transport.abort()


class Refused(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: Any) -> None:
        transport.close()


def affordable(connections: int) -> int:
    """Maximum number of clients, if each needs a connection to either engine, and the process some files of its own."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or 3 * connections <= files - FILES_OF_ITS_OWN:
        return connections
    most = max(1, (files - FILES_OF_ITS_OWN) // 3)
    log.warning("%d connections at most: the process may open %d files (ulimit -n)", most, files)
    return most


def passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    left_out = OF_ONE_CONNECTION | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


class Bodies(NamedTuple):
    """A request as the two engines get it."""

    prefill: bytes
    decode: bytes


def bodies_of(data: bytes, seconds: float) -> Bodies | None:
    """None for no JSON object, nesting too deep, or too many values: the engine says what is wrong with it."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        return None
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            return None
        prompt = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL} | ONE_TOKEN
        return Bodies(json.dumps(prompt).encode(), json.dumps(awaiting(body, seconds)).encode())
    except (ValueError, RecursionError):
        return None


def awaiting(body: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
    """The same request, willing to wait for its KV."""
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        return body
    return {**body, "kv_transfer_params": {"kvloom_wait_seconds": seconds, **(params or {})}}


def problem(status: int, kind: str, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the form of OpenAI's API."""
    return web.json_response(error_of(text, kind, status), status=status, headers=headers)


def error_of(text: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


async def broken_off(request: web.Request, response: web.StreamResponse, text: str) -> web.StreamResponse:
    """End an answer that has begun so that nobody takes it for whole."""
    with contextlib.suppress(OSError, TimeoutError):
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            event = json.dumps(error_of(text, "upstream_error", 502))
            async with asyncio.timeout(1):
                await response.write(f"data: {event}\n\n".encode())
    if request.transport is not None:
        request.transport.close()  # without the chunk that ends an answer
    return response


def address(text: str) -> str:
    """An engine's, without a slash at the end."""
    try:
        parts = urlsplit(text)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if whole and not (parts.username or parts.password or {*text} & {*"?#@ "}) and text.isprintable():
            return text.rstrip("/")
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not an address; write http://HOST:PORT")


def seconds(text: str) -> float:
    """Parse a time limit: more than 0 and at most a day."""
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not more than 0 and at most 86400 seconds")
    return value


def waiting(text: str) -> float:
    """Parse `--wait`: a time limit, or 0 for no waiting."""
    return 0.0 if text in ("0", "0.0") else seconds(text)


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, type=address, help="of the vLLM with kv_role kv_producer")
    parser.add_argument("--decode", required=True, type=address, help="of the vLLM with kv_role kv_consumer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    plain = Settings("", "")
    for name in ("wait", "timeout", "prefill_timeout", "silence", "max_body", "max_requests", "max_bodies",
                 "max_connections"):  # fmt: skip
        default = getattr(plain, name)
        kind = waiting if name == "wait" else seconds if isinstance(default, float) else count
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help="%(default)s")
    given = vars(parser.parse_args())
    host, port = given.pop("host"), given.pop("port")
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(Proxy(Settings(**given)).serve(host, port))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        parser.error(f"cannot listen on {host}, port {port}: {error.strerror or error}")


if __name__ == "__main__":
    main()
