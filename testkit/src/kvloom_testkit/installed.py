"""The tests that `pytest --kvloom KIND:TYPE` adds: one class for each component that is named."""

from __future__ import annotations

from kvloom_testkit import subjects

for _number, _subject in enumerate(subjects.chosen):
    globals()[f"Test{_number or ''}_{_subject.kind.title().replace(' ', '')}_{_subject.type}"] = _subject.tests()
