"""Turns errors of stores into one line with the remedy."""

from __future__ import annotations

import re

from kvloom import one_line
from kvloom_backend_fsspec.config import Place

_NO_BUCKET = ("NoSuchBucket", "The specified bucket does not exist", "ContainerNotFound")
_BEYOND = ("416 ", "InvalidRange", "Requested range was invalid", "range started at", "Wanted range starting at")
_NOT_THIS_ONE = re.compile(r"DeleteObjects request failed for key .*\(code: (UnknownError|InternalError)\)")
_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")
# A presigned or SAS query could be in a URL that a server quotes.
_QUERY = re.compile(r"(?<=\S)\?[^\s>]*")

_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (_NO_BUCKET, "there is no such bucket: make it, or name another one in `url`"),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthenticationFailed"),
        "the credentials are not the store's: set others in the environment, or give the machine a role",
    ),
    (
        ("not found in known_hosts",),
        "its key is not known: see that it is the server's, and add what `ssh-keyscan` prints to ~/.ssh/known_hosts, "
        "or to a file of its own: `options: {known_hosts: file}`",
    ),
    (("Host key for server",), "it has another key than known_hosts says: is it still the same server?"),
    (
        ("Authentication failed", "No authentication methods", "Permission denied (publickey"),
        "it takes none of the keys: put one into ~/.ssh or the agent, or set `options: {key_filename: file}`",
    ),
    (("size mismatch in put",), "it did not take all of it: is its disk full?"),
    (
        ("object with invalid path",),
        "no listing gets past a name like that: remove the object, or name a prefix in `url` that is kvloom's alone",
    ),
    (("QuotaExceeded", "507 "), "the store is full: raise its quota, or set `capacity` below it"),
    (
        ("AccessDenied", "403 Forbidden", "PermissionDenied", "Permission denied"),
        "these credentials have no right to do this: docs/use/object-stores.md lists the rights that are needed",
    ),
    (("EntityTooLarge", "413 "), "the store takes no object of that size: lower `chunk_tokens`"),
    (("NotPartial", "Received non-partial"), "the server ignores the header Range, which kvloom needs"),
    (
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "301 Moved", "Received redirect"),
        "the bucket is in another region: set `options: {region: ...}`",
    ),
    (
        ("169.254.169.254", "metadata.google.internal", "nstance metadata"),
        "no credentials were found: set them in the environment, or run where the machine has a role",
    ),
    (
        ("InvalidCertificate", "UnknownIssuer", "CERTIFICATE_VERIFY_FAILED"),
        "its certificate is not trusted: set `options: {root_certificate: ca.pem}`",
    ),
    (
        ("InvalidContentType", "CorruptMessage", "WRONG_VERSION_NUMBER", "wrong version number"),
        "it does not speak TLS: is `endpoint` right?",
    ),
    (("timed out", "TimedOut", "TimeoutError"), "it did not answer in time: is it up? Else raise `timeout`"),
    (
        ("error sending request", "Connection refused", "ConnectError", "Unable to connect"),
        "it cannot be reached: is it up, and are host and port right?",
    ),
)

_OF_WEBDAV: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Redirect response",), "it is elsewhere: name in `url` where it redirects to"),
    (("CERTIFICATE_VERIFY_FAILED",), "its certificate is not trusted: set `options: {verify: ca.pem}`"),
    (("WRONG_VERSION_NUMBER", "wrong version number"), "it does not speak TLS: set `allow_http: true`"),
)
"""Instead of what those above say."""


def explained(error: BaseException, place: Place) -> str:
    """One line with the store, its error and the remedy."""
    text = str(error) or type(error).__name__
    said = one_line(_QUERY.sub("?...", text.partition("\n")[0]).strip()) or type(error).__name__
    if code := _CODE.search(text):
        said = f"{said.partition(': <?xml')[0]} ({code[1]})"
    remedy = remedy_of(text, place.scheme)
    return f"{place.scheme}://{place.host}: {said}" + (f"; {remedy}" if remedy else "")


def remedy_of(text: str, scheme: str) -> str:
    """The remedy for a store's error text; empty for an unknown error."""
    remedies = (*(_OF_WEBDAV if scheme in ("webdav", "dav") else ()), *_REMEDIES)
    return next((remedy for signs, remedy in remedies if any(sign in text for sign in signs)), "")


def says_no_bucket(text: str) -> bool:
    """Return whether the bucket is missing, which is a store that is not there rather than a miss."""
    return any(sign in text for sign in _NO_BUCKET)


def is_beyond_the_end(text: str) -> bool:
    """Return whether the requested range begins behind the end of the object."""
    return any(sign in text.partition("\n")[0] for sign in _BEYOND)


def failed_for_one(text: str) -> bool:
    """Return whether a server that answered a delete request could not delete one of the objects.

    Ceph does this for objects that are replaced meanwhile, in up to half of the requests, but never for a single
    object.
    """
    return _NOT_THIS_ONE.search(text) is not None


def was_not_sent(text: str) -> bool:
    """Return whether a request ended on its way: servers close idle connections just when one is used."""
    return "error sending request" in text
