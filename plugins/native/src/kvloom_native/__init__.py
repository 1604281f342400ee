"""Native code that several packages of kvloom use. The core finds the library itself: see `kvloom.native.load_own`."""

from kvloom_native import resp
from kvloom_native.files import NOT_A_FILE, TOO_SHORT, Files, library
from kvloom_native.mapping import MappedFile, are_current, is_memory, map_files

__all__ = ["NOT_A_FILE", "TOO_SHORT", "Files", "MappedFile", "are_current", "is_memory", "library", "map_files", "resp"]
