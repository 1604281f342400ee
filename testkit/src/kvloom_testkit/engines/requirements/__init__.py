"""The requirements of whole connectors."""

from __future__ import annotations

from kvloom_testkit.engines.requirements.cost import Cost
from kvloom_testkit.engines.requirements.hits import Hits
from kvloom_testkit.engines.requirements.lifetime import Lifetime
from kvloom_testkit.engines.requirements.models import Models
from kvloom_testkit.engines.requirements.ranks import Ranks
from kvloom_testkit.engines.requirements.separation import Separation
from kvloom_testkit.engines.requirements.trouble import Trouble


class EngineConformance(Hits, Lifetime, Separation, Trouble, Models, Cost, Ranks):
    """A connector, as its engine loads it: `kvloom check engine vllm --connector MODULE:CLASS --extra '{...}'`.

    The engine, its scheduler and its worker are real, the models are tiny and random, and the tests know nothing of the
    connector but the engine's own interface. Answers are compared with the engine's own prefix cache, which has as many
    tokens of the prompt.
    """
