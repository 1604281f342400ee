"""The proxy of `examples/vllm/disaggregated.py`, between the client of OpenAI and engines that are pretended."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from disaggregated_support import MESSAGES, PIECE, Both, disaggregated, openai, scenario


@scenario()
async def test_a_chat_is_computed_by_one_and_answered_by_the_other(both: Both) -> None:
    options: Any = {"n": 2, "max_completion_tokens": 50, "logprobs": True, "top_logprobs": 3, "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {}}}]}  # fmt: skip
    answer = await both.client.chat.completions.create(
        model="m", messages=MESSAGES, extra_body={"min_tokens": 5, "cache_salt": "s"}, **options
    )
    assert [choice.message.content for choice in answer.choices] == ["decode", "decode"]
    (asked,), (answered,) = both.prefill.bodies, both.decode.bodies
    assert answered.pop("kv_transfer_params") == {"kvloom_wait_seconds": 5.0}
    assert answered == {"model": "m", "messages": MESSAGES, "min_tokens": 5, "cache_salt": "s", **options}
    assert asked == {"model": "m", "messages": MESSAGES, "cache_salt": "s", "tools": options["tools"], "n": 1,
                     "max_tokens": 1, "stream": False}  # fmt: skip
    for engine in (both.prefill, both.decode):
        assert engine.headers[0]["Authorization"] == "Bearer secret" and engine.paths == ["/v1/chat/completions"]


@scenario()
async def test_streams_and_their_usage_arrive(both: Both) -> None:
    for ask, more in (
        (both.client.chat.completions, {"messages": MESSAGES}),
        (both.client.completions, {"prompt": "x"}),
    ):
        stream = await ask.create(model="m", stream=True, stream_options={"include_usage": True}, **more)
        events = [event async for event in stream]
        assert len(events) == 4 and events[-1].usage.completion_tokens == 3
    assert events[0].choices[0].text == "decode0 "
    assert len(both.prefill.bodies) == 2 and "stream_options" not in both.prefill.bodies[0]


@scenario()
async def test_a_completion_of_several_with_echo(both: Both) -> None:
    answer = await both.client.completions.create(model="m", prompt=[1, 2, 3], best_of=3, n=2, echo=True, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["decode", "decode"]
    assert both.prefill.bodies == [{"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "stream": False, "n": 1}]


@pytest.mark.parametrize(("params", "expected"), [
    (None, {"kvloom_wait_seconds": 5.0}), ({"a": 1, "kvloom_wait_seconds": 2}, {"a": 1, "kvloom_wait_seconds": 2}),
    ("x", "x"),
])  # fmt: skip
def test_parameters_of_the_client(params: Any, expected: Any) -> None:
    @scenario()
    async def one(both: Both) -> None:
        await both.client.completions.create(model="m", prompt="x", extra_body={"kv_transfer_params": params})
        assert both.decode.bodies[0]["kv_transfer_params"] == expected

    one()


@scenario()
async def test_without_prefill_the_other_computes(both: Both) -> None:
    await both.servers["prefill"].close()
    for _ in range(2):
        answer = await both.client.completions.create(model="m", prompt="x")
        assert answer.choices[0].text == "decode"
    assert "kv_transfer_params" not in both.decode.bodies[0], "there is nothing to wait for"


@pytest.mark.parametrize("fault", ["500", "503", "400", "hangs"])
def test_prefill_that_fails_fails_nobody(fault: str) -> None:
    @scenario(prefill_timeout=5 if fault == "hangs" else 60)
    async def one(both: Both) -> None:
        both.prefill.fault = fault
        answer = await both.client.completions.create(model="m", prompt="x")
        assert answer.choices[0].text == "decode" and "kv_transfer_params" not in both.decode.bodies[0]
        asked = len(both.prefill.bodies)
        await both.client.completions.create(model="m", prompt="x")
        assert len(both.prefill.bodies) == asked + (fault != "hangs"), "who does not answer is left alone for a while"

    one()


@scenario(silence=5, retry_after=1)
async def test_a_silent_engine_for_prefill_costs_a_moment_and_is_tried_by_one(both: Both) -> None:
    both.prefill.fault = "hangs"
    answer = await both.client.completions.create(model="m", prompt="x")
    assert answer.choices[0].text == "decode" and "kv_transfer_params" not in both.decode.bodies[0]
    await asyncio.sleep(2)
    del both.prefill.bodies[:]
    await asyncio.gather(*(both.client.completions.create(model="m", prompt="x") for _ in range(4)))
    assert sum(body is not None for body in both.prefill.bodies) == 1
    await asyncio.sleep(2)
    both.prefill.fault = ""
    for _ in range(2):
        await both.client.completions.create(model="m", prompt="x")
        assert "kv_transfer_params" in both.decode.bodies[-1], "it is back"


@scenario(silence=5)
async def test_an_engine_that_computes_for_long_is_waited_for(both: Both) -> None:
    both.prefill.fault = "computes"
    await both.client.completions.create(model="m", prompt="x")
    assert "/health" in both.prefill.paths and "kv_transfer_params" in both.decode.bodies[0]


@scenario(silence=2, prefill_timeout=5, retry_after=60)
async def test_a_prompt_that_takes_too_long_does_not_keep_others_from_prefill(both: Both) -> None:
    both.prefill.fault = "never ends"
    await both.client.completions.create(model="m", prompt="x")
    assert "/health" in both.prefill.paths and "kv_transfer_params" not in both.decode.bodies[0]
    both.prefill.fault = ""
    await both.client.completions.create(model="m", prompt="x")
    assert "kv_transfer_params" in both.decode.bodies[1]


@scenario(silence=10, prefill_timeout=5, retry_after=60)
async def test_one_that_is_never_asked_before_a_prompt_takes_too_long_is_asked_then(both: Both) -> None:
    both.prefill.fault = "never ends"
    await both.client.completions.create(model="m", prompt="x")
    assert both.prefill.paths.count("/health") == 1
    both.prefill.fault = ""
    await both.client.completions.create(model="m", prompt="x")
    assert "kv_transfer_params" in both.decode.bodies[1]


@scenario(silence=4, prefill_timeout=5, retry_after=60)
async def test_one_that_dies_while_a_prompt_takes_too_long_is_left_alone_for_a_while(both: Both) -> None:
    both.prefill.fault = "dies"
    await both.client.completions.create(model="m", prompt="x")
    assert both.prefill.paths.count("/health") == 2
    both.prefill.fault = ""
    await both.client.completions.create(model="m", prompt="x")
    assert "kv_transfer_params" not in both.decode.bodies[1]


def test_a_redirection_of_prefill_is_logged_and_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    @scenario()
    async def one(both: Both) -> None:
        both.prefill.fault = "307"
        answer = await both.client.completions.create(model="m", prompt="x")
        assert answer.choices[0].text == "decode" and "kv_transfer_params" not in both.decode.bodies[0]

    one()
    assert [one.getMessage().rpartition(": ")[2] for one in caplog.records if one.name == "disaggregated"] == [
        "status 307"
    ]


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_errors_are_passed_on(status: int) -> None:
    @scenario()
    async def one(both: Both) -> None:
        both.decode.fault = str(status)
        for stream in (False, True):
            with pytest.raises(openai().APIStatusError) as error:
                await both.client.chat.completions.create(model="m", messages=MESSAGES, stream=stream)
            assert error.value.status_code == status and "as the test says" in error.value.message

    one()


@scenario()
async def test_what_is_no_json_is_the_engines_to_refuse(both: Both) -> None:
    both.decode.fault = "400"
    async with aiohttp.ClientSession() as session:
        for data in (b"[]", b"[" * 100_000):
            async with session.post(f"{both.address}/v1/completions", data=data) as answer:
                assert answer.status == 400
    assert both.prefill.bodies == []


@scenario()
async def test_no_engine_is_an_error_of_its_own(both: Both) -> None:
    await both.servers["decode"].close()
    with pytest.raises(openai().InternalServerError) as error:
        await both.client.completions.create(model="m", prompt="x")
    assert error.value.status_code == 502 and error.value.body["type"] == "upstream_error"


@scenario(timeout=5)
async def test_an_engine_that_hangs_is_an_error(both: Both) -> None:
    both.decode.fault = "hangs"
    with pytest.raises(openai().InternalServerError) as error:
        await both.client.completions.create(model="m", prompt="x")
    assert error.value.status_code == 504


@pytest.mark.parametrize("fault", ["breaks off", "stalls"])
def test_a_stream_that_ends_early_is_not_taken_for_whole(fault: str) -> None:
    @scenario(timeout=20 if fault == "stalls" else 60)
    async def one(both: Both) -> None:
        both.decode.fault = fault
        stream = await both.client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        found: list[Any] = []

        async def read() -> None:
            async for event in stream:
                found.append(event)

        with pytest.raises(openai().APIError):
            await read()
        assert [event.choices[0].delta.content for event in found] == ["decode0 "]

    one()


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_client_that_goes_is_not_worked_for(name: str) -> None:
    @scenario()
    async def one(both: Both) -> None:
        engine = getattr(both, name)
        engine.fault = "hangs"
        asking = asyncio.create_task(both.client.completions.create(model="m", prompt="x"))
        while not engine.bodies:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait_for(engine.cancelled.wait(), 30)

    one()


@scenario()
async def test_the_rest_of_the_api_is_the_second_engines(both: Both) -> None:
    models = await both.client.models.list()
    assert [model.id for model in models.data] == ["decode"]
    async with aiohttp.ClientSession() as session:
        for path in ("/sleep", "/metrics", "/v1/%2e%2e/sleep"):
            async with session.post(f"{both.address}{path}") as answer:
                assert answer.status == 404
    assert both.decode.paths == ["/v1/models"] and both.prefill.paths == []


@scenario(max_body=1000)
async def test_a_request_that_is_too_large(both: Both) -> None:
    with pytest.raises(openai().APIStatusError) as error:
        await both.client.completions.create(model="m", prompt="x" * 2000)
    assert error.value.status_code == 413 and not both.decode.bodies and not both.prefill.bodies


@scenario(max_requests=1)
async def test_too_many_at_once(both: Both) -> None:
    both.decode.fault = "hangs"
    first = asyncio.create_task(both.client.completions.create(model="m", prompt="x"))
    while not both.decode.bodies:
        await asyncio.sleep(0)
    with pytest.raises(openai().InternalServerError) as error:
        await both.client.completions.create(model="m", prompt="x")
    assert error.value.status_code == 503 and error.value.response.headers["Retry-After"] == "1"
    first.cancel()


@scenario(max_bodies=5000, max_body=3000)
async def test_requests_are_bounded_together(both: Both) -> None:
    both.decode.fault = "hangs"
    first = asyncio.create_task(both.client.completions.create(model="m", prompt="x" * 2800))
    while not both.decode.bodies:
        await asyncio.sleep(0)
    large: list[dict[str, Any]] = [
        {"data": b"x" * 2800}, {"data": pieces()}, {"data": b"{}", "headers": {"Content-Encoding": "gzip"}},
    ]  # fmt: skip
    async with aiohttp.ClientSession() as session:
        for sent in large:
            async with session.post(f"{both.address}/v1/completions", **sent) as answer:
                assert answer.status == 503 and "too many requests" in await answer.text()
        both.decode.fault = ""
        async with session.get(f"{both.address}/v1/models") as answer:
            assert answer.status == 200, "it has no body"
    first.cancel()
    await asyncio.wait_for(both.decode.cancelled.wait(), 30)
    answered = await both.client.completions.create(model="m", prompt="x" * 2800)
    assert answered.choices[0].text == "decode"


async def pieces() -> AsyncIterator[bytes]:
    """A body that does not say its size."""
    yield b"{}"


@scenario(max_connections=2, client_timeout=20)
async def test_connections_are_bounded_and_do_not_idle(both: Both) -> None:
    port = int(both.address.rpartition(":")[2])
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    idle[1][1].write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")  # and no more
    for reader, writer in idle:
        assert not await asyncio.wait_for(reader.read(), 30)
        writer.close()
    answer = await both.client.completions.create(model="m", prompt="x")
    assert answer.choices[0].text == "decode"


@scenario(client_timeout=20)
async def test_a_client_that_does_not_take_its_answer_holds_no_connection(both: Both) -> None:
    both.decode.fault = "goes on"
    _, writer = await asyncio.open_connection("127.0.0.1", int(both.address.rpartition(":")[2]), limit=1 << 10)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    while not both.proxy._active:
        await asyncio.sleep(1)
    while both.proxy._active:
        await asyncio.sleep(1)
    assert not both.proxy._requests
    writer.close()


def test_an_engine_that_closes_its_connections_loses_no_request() -> None:
    """It does so after some seconds without a request, perhaps while one is on its way."""

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)  # of the next request, or the end
        writer.close()

    @scenario()
    async def one(both: Both) -> None:
        async with await asyncio.start_server(once, "127.0.0.1", 0) as engine, aiohttp.ClientSession() as session:
            port = engine.sockets[0].getsockname()[1]
            both.proxy.settings = replace(both.proxy.settings, decode=f"http://127.0.0.1:{port}")
            for _ in range(2):
                async with session.post(f"{both.address}/v1/embeddings", json={}) as answer:
                    assert answer.status == 200

    one()


@scenario()
async def test_a_body_that_is_not_what_its_header_says(both: Both) -> None:
    async with (
        aiohttp.ClientSession(headers={"Content-Encoding": "gzip"}) as session,
        session.post(f"{both.address}/v1/completions", data=b"no gzip") as answer,
    ):
        assert answer.status == 400 and "Content-Encoding" in (await answer.json())["error"]["message"]


@scenario()
async def test_what_prefill_answers_is_not_kept(both: Both) -> None:
    both.prefill.fault, both.prefill.pieces = "goes on", 64
    tracemalloc.start()
    try:
        answer = await both.client.completions.create(model="m", prompt="x")
        assert tracemalloc.get_traced_memory()[1] < 32 * len(PIECE)
    finally:
        tracemalloc.stop()
    assert answer.choices[0].text == "decode"


@scenario()
async def test_what_is_nested_too_deeply_is_the_engines_to_refuse(both: Both) -> None:
    """Some depths can be read, and not be written where the stack is a little deeper."""
    found = set()
    async with aiohttp.ClientSession() as session:
        for depth in range(850, 1000, 3):
            body = b'{"x": %s}' % (b"[" * depth + b"]" * depth)
            async with session.post(f"{both.address}/v1/completions", data=body) as answer:
                found.add(answer.status)
    assert found == {200, 400}


def test_what_has_too_many_values_is_not_read() -> None:
    """Reading it would keep everybody waiting for seconds."""
    most = disaggregated.MOST_VALUES
    body = b'{"x": [' + b"1," * most + b"1]}"
    assert disaggregated.bodies_of(body, 1.0) is None and disaggregated.bodies_of(body[: most // 2] + b"1]}", 1.0)


@pytest.mark.parametrize("words", [["--timeout", "0"], ["--timeout", "nan"], ["--wait", "inf"], ["--max-body", "0"]])
def test_numbers_that_bound_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    addresses = ["--prefill", "http://a:1", "--decode", "http://b:1"]
    monkeypatch.setattr(sys, "argv", ["disaggregated.py", *addresses, *words])
    monkeypatch.setattr(disaggregated.asyncio, "run", lambda running: running.close())
    with pytest.raises(SystemExit):
        disaggregated.main()
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_connections_leave_files_for_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 + 6, 4096))
    scenario(client_timeout=20)(_three_connect)()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, 4096))
    assert disaggregated.affordable(1024) == 1024


async def _three_connect(both: Both) -> None:
    port = int(both.address.rpartition(":")[2])
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    assert not await asyncio.wait_for(idle[2][0].read(), 30) and not idle[0][0].at_eof()
    for _, writer in idle:
        writer.close()


@scenario(client_timeout=20)
async def test_a_body_that_does_not_come(both: Both) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(both.address.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 408 ")
    writer.close()


@pytest.mark.parametrize(
    ("prefill", "port", "said"),
    [
        ("localhost:8100", "0", "'localhost:8100' is not an address; write http://HOST:PORT"),
        ("http://localhost:x", "0", "is not an address"),
        ("http://user:word@localhost:8100", "0", "is not an address"),
        ("http://localhost:8100?a=b", "0", "is not an address"),
        ("http://localhost:8100/", "taken", "cannot listen on 127.0.0.1, port"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prefill: str, port: str, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1]) if port == "taken" else port
        words = ["disaggregated.py", "--prefill", prefill, "--decode", "http://localhost:8200", "--port", port]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            disaggregated.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err
