"""Long histories of single steps against a dictionary that takes the same ones."""

from __future__ import annotations

import random

from kvloom_testkit.backends.base import BackendRequirements, Open, again, content, contents
from kvloom_testkit.keys import Namespace

SEEDS = (1, 2)
STEPS = 300
KEYS = 5


class HistoryRequirements(BackendRequirements):
    """Sequences."""

    def test_B32_any_history_equals_that_of_a_dictionary(self, names: Namespace, opened: Open) -> None:
        """After any sequence of puts, deletes and re-openings the store equals a dictionary.

        Why: each call depends on the state that earlier calls left.

        Usually: something that happens now and then: a compaction, a full page, a table that grows.
        """
        for seed in SEEDS:
            random_ = random.Random(seed)
            keys = [names.named(f"-/{seed}-{number}") for number in range(KEYS)]
            model: dict[str, bytes] = {}
            backend, history = opened(), []
            for step in range(STEPS):
                key, verb = random_.choice(keys), random_.random()
                if verb < 0.4:
                    blob = random_.randbytes(random_.choice((1, 10, 1000, 9000)))
                    cut = random_.randrange(len(blob) + 1)
                    backend.put(key, [blob[:cut], blob[cut:]])
                    model[key] = blob
                elif verb < 0.55:
                    backend.delete(key)
                    model.pop(key, None)
                elif verb < 0.57:
                    backend = again(backend, opened)
                history.append((round(verb, 2), keys.index(key)))
                assert content(backend.get(key)) == model.get(key), f"seed {seed}, step {step}: {history[-10:]}"
                assert bool(backend.contains(key)) == (key in model), f"seed {seed}, step {step}: {history[-10:]}"
            assert contents(backend.get_many(keys)) == [model.get(key) for key in keys], f"seed {seed}, at the end"
            opened.close(backend)
