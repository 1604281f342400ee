"""Requests and responses of HTTP/1.1, from and to bytes."""

from __future__ import annotations

import http.client
import io
from http import HTTPStatus
from typing import NamedTuple

_MAX_DIGITS = 15
"""Maximum number of digits of a Content-Length."""


class Request(NamedTuple):
    """A request with its body."""

    method: str
    target: str
    headers: http.client.HTTPMessage
    body: bytes = b""


class Response(NamedTuple):
    """A response; the headers Content-Length and Connection are added to it."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class RequestError(Exception):
    """The reason for refusing a request, and the status to answer with."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def parse(head: bytes) -> Request:
    """The request that `head` says, without its body. Raises RequestError."""
    line, _, rest = head.partition(b"\r\n")
    words = line.decode("latin-1").split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[0].isalpha():
        raise RequestError(400, "not a request of HTTP/1.1")
    try:
        headers = http.client.parse_headers(io.BytesIO(rest))
    except http.client.HTTPException as error:
        raise RequestError(431, f"headers: {error}") from None
    return Request(words[0], words[1], headers)


def content_length(headers: http.client.HTTPMessage, most: int) -> int:
    """Length of the body that follows, `most` bytes at most. Raises RequestError."""
    said = headers.get_all("Content-Length") or ["0"]
    text = said[0].strip()
    if "Transfer-Encoding" in headers:
        raise RequestError(411, "Transfer-Encoding is not supported; send Content-Length")
    if len(said) > 1 or not (text.isascii() and text.isdigit()):
        raise RequestError(400, "Content-Length: not a number")
    if len(text) > _MAX_DIGITS or int(text) > most:
        raise RequestError(413, f"Content-Length: a body has {most} bytes at most")
    return int(text)


def head_of(response: Response) -> bytes:
    """The status line and the headers."""
    phrase = HTTPStatus(response.status).phrase
    fields = (*response.headers, ("Content-Length", str(len(response.body))), ("Connection", "close"))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"HTTP/1.1 {response.status} {phrase}\r\n{lines}\r\n".encode("latin-1")


def plain_error(status: int, text: str) -> Response:
    return Response(status, f"{text}\n".encode(), (("Content-Type", "text/plain; charset=utf-8"),))
