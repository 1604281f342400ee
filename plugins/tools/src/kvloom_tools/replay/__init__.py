"""Replaying a trace of requests against a configuration: what would have been a hit, without moving a byte of KV.

`trace` reads the lines, `sizes` says what a chunk takes up in each tier, `memory` and `stored` keep to the rules by
which tiers admit and evict, in chunks that are no more than numbers, and `stack` moves them as an engine would.
"""

from kvloom_tools.replay.sizes import TierPlan, plan_tiers
from kvloom_tools.replay.stack import Replay
from kvloom_tools.replay.trace import Broken, Line, Trace

__all__ = ["Broken", "Line", "Replay", "TierPlan", "Trace", "plan_tiers"]
