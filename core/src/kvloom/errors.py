"""Everything kvloom raises: start-up and misuse raise these, serving never does."""

from __future__ import annotations

from collections.abc import Iterable


class KVLoomError(Exception):
    """The root of every error that kvloom raises on purpose."""


class ConfigError(KVLoomError, ValueError):
    """A configuration that cannot work. The message starts with the YAML path of the setting at fault."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}" if path else problem)

    @classmethod
    def of_all(cls, problems: Iterable[tuple[str, str]]) -> ConfigError:
        """One error for several problems, a line each. problems: path and text of each, at least one."""
        (path, text), *rest = dict.fromkeys(problems)
        return cls(path, "\n".join([text, *(f"{path}: {text}" if path else text for path, text in rest)]))


class PluginError(KVLoomError):
    """A plugin or component type that is missing, broken, blocked, incompatible or provided twice."""


class BackendError(KVLoomError):
    """A tier failed while running: counted, reported as an event and served as a miss."""


class DeadlineExceeded(BackendError):
    """A backend call outlived its deadline and was abandoned."""


class PartDownError(BackendError):
    """The part of a store that a key belongs to does not answer, while others do: the store itself has not failed."""


class IncompleteListingError(BackendError):
    """The end of a listing that went on past places which cannot be read, though blobs may lie there."""


class CorruptBlobError(KVLoomError):
    """A blob whose bytes are not those stored under its key: a miss, and removed or overwritten."""


class UnreadableBlobError(KVLoomError):
    """An intact blob that this process has no reader for (later version, other serializer): a plain miss."""


class LaterVersionError(UnreadableBlobError):
    """An intact blob of a later release, which is left as it is."""
