"""Bringing a configuration of LMCache over: field by field, and for each what became of it."""

from kvloom.migration.draft import Imported as Imported
from kvloom.migration.fields import Row as Row
from kvloom.migration.lmcache import import_config as import_config
from kvloom.migration.lmcache import import_environment as import_environment
