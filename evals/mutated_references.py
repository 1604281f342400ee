"""Changes one thing at a time in the reference components, and looks whether the kit's requirements notice.

    python evals/mutated_references.py [REFERENCE ...] [--sample COUNT] [--seed SEED] [--jobs JOBS] [--out FOLDER]

The changes are those of cosmic-ray's operators: another number, comparison or arithmetic operator, `not`, a loop that
is not entered, another exception, a decorator less. What survives is either the same behaviour in other words, and then
`WHY` says so, or something that the kit lacks. If all are tried, writes mutated_references.json and .md. Ends with
status 1 if something survives without a reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import textwrap
from pathlib import Path
from typing import Any

from mechanical_mutants import KIT, REFERENCES, Mutant, components_of, mutants_of, tried

WHY: dict[str, tuple[str, ...]] = {
    "A component may claim less than it does": ("persistent = False", "shared = False", "by_layer = False"),
    "What is counted of events is the observer's own affair": ("[event.name] += 0", "[event.name] += 2"),
    "Which models it is for is the serializer's own affair; what it takes meets S02": (
        'dtype > "float16"',
        'dtype >= "float16"',
        'dtype is "float16"',
        "if spec is None and",
        "if not spec is not None and",
        "is_floating_point and spec",
    ),
    "`view` may always be None": ("blob.nbytes is not like.nbytes",),
    "`map` may always be None": ("st_size is most_bytes",),
    "Settings mean what the component says they mean: the kit names a directory that is there": ("parents=False",),
    "Bytes are read in other portions, and are the same": ("buffering= -1", "buffering= 1"),
    "Never more is read than there is room for: both are the same": ("while done != len(into)",),
    "Each flag is a bit of its own: both are the same": ("LOCK_EX + ", "LOCK_EX ^ "),
    "There is one object of each dtype and each member of an enum: both are the same": (
        "dtype is not self.spec.torch_dtype",
        "dtype is not torch.int64",
        "format != MemoryFormat.KV_BLOB",
    ),
    "The number of tokens is not looked at in what comes back": ("blob_shape( 2)", "blob_shape( 0)"),
    "One slot without a dimension is too few of them, which is refused": ("slots.dim() > 1",),
    "Whether each number is a slot that there is need not be looked at: on a device that takes as long as the copy": (
        "!= pool.shape[2]",
        "<= pool.shape[2]",
        "is not pool.shape[2]",
    ),
    "There is a chunk for each segment, and a row for each buffer, where `zip` says so": ("strict=False",),
    "No more tokens are selected than were handed on: both are the same": ("len(local) != len(self._going)",),
    "Where nothing was left out, it may be said all the same where requests start": (
        "len(local) <= len(self._going)",
        "len(local) is not len(self._going)",
    ),
    "-1 is the last token of the batch, which is the end of the last request": ("query_start_loc[ 0:]",),
    "There is one dimension, which is the last one too": ("index_fill( -1",),
    "Less is found, or at other places of a text, and at least half: how much is the retriever's own affair": (
        "PIECE = 15",
        "PIECE = 17",
        "PIECE - 1",
        "PIECE * 1",
        "PIECE ** 1",
        "PIECE << 1",
        "PIECE >> 1",
        "PIECE ^ 1",
        "PIECE + 0",
        "tuple(tokens[start : start | PIECE]",
        "tuple(tokens[start : start ^ PIECE]",
        "tuple(tokens[place : place | PIECE]",
        "tuple(tokens[place : place ^ PIECE]",
        "place + PIECE < end",
        "range( 1, len",
        "range( -1, len",
    ),
    "More pieces are kept that are shorter than all that are looked for, and never found": (
        "PIECE // 1",
        "PIECE % 1",
        "PIECE | 1",
        "PIECE + 2",
        "len(tokens) + PIECE",
        "len(tokens) * PIECE",
        "len(tokens) | PIECE",
        "len(tokens) ^ PIECE",
    ),
    "The last tokens are in no segment where they just fill one: where segments end is the database's own affair": (
        "numel() - 1",
        "numel() * 1",
        "numel() // 1",
        "numel() ** 1",
        "numel() | 1",
        "numel() ^ 1",
        "numel() + 0",
    ),
}
"""Why no requirement can notice, or should, and the changes: what is in `before -> after`, and not in what was before.
Not by reference: who moves a class need not touch this."""


def why(mutant: Mutant) -> str:
    """The reason why it may survive; empty if there is none."""
    for reason, changes in WHY.items():
        if any(fits(change, mutant) for change in changes):
            return reason
    return ""


def fits(change: str, mutant: Mutant) -> bool:
    """Return whether the mutant has this change."""
    return change in f"{mutant.before} -> {mutant.after}" and change not in mutant.before


def results_of(found: dict[Mutant, str]) -> list[dict[str, Any]]:
    results = []
    for reference in dict.fromkeys(mutant.reference for mutant in found):
        mine = [mutant for mutant in found if mutant.reference == reference]
        survivors = sorted((one for one in mine if not found[one]), key=lambda one: (one.before, one.after))
        rows = [{"before": one.before, "after": one.after, "why": why(one)} for one in survivors]
        results.append({"reference": reference, "mutants": len(mine), "survivors": rows})
    return sorted(results, key=lambda one: str(one["reference"]))


def report(results: list[dict[str, Any]]) -> str:
    """The results for people."""
    said = (
        f"{(__doc__ or '').splitlines()[0]} A mutant is caught if a requirement fails on it, or it does not load. "
        "Written by `python evals/mutated_references.py`, which makes the changes with cosmic-ray's operators."
    )
    lines = ["# Mechanical mutants of the reference components", "", *textwrap.wrap(said, 120)]
    lines += ["", "| reference | mutants | caught | surviving |", "|---|---:|---:|---:|"]
    for one in results:
        survive = len(one["survivors"])
        lines.append(f"| {one['reference']} | {one['mutants']} | {one['mutants'] - survive} | {survive} |")
    total, survive = sum(one["mutants"] for one in results), sum(len(one["survivors"]) for one in results)
    lines += [f"| all | {total} | {total - survive} | {survive} |", "", "## What survives, and why"]
    for one in results:
        if one["survivors"]:
            lines += ["", f"### {one['reference']}"]
        for reason in dict.fromkeys(row["why"] for row in one["survivors"]):
            lines += ["", *textwrap.wrap(f"{reason or 'No reason is known'}:", 120), "", "```diff"]
            for row in one["survivors"]:
                if row["why"] == reason:
                    lines += [f"{mark} {row[field]}" for mark, field in (("-", "before"), ("+", "after")) if row[field]]
            lines.append("```")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    files = sorted((KIT / REFERENCES).glob("*.py"))
    names = [file.stem for file in files if components_of(file.stem)]
    parser.add_argument("references", nargs="*", metavar="REFERENCE", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--sample", type=int, metavar="COUNT", help="try so many of the mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the results go")
    asked = parser.parse_args()
    mutants = [mutant for name in asked.references or names for mutant in mutants_of(name)]
    if asked.sample is not None:
        mutants = random.Random(asked.seed).sample(mutants, min(asked.sample, len(mutants)))
    found = tried(mutants, asked.jobs, why)
    results = results_of(found)
    if not asked.references and asked.sample is None:
        survivors = [mutant for mutant, said in found.items() if not said]
        for change in (change for changes in WHY.values() for change in changes):
            if not any(fits(change, mutant) for mutant in survivors):
                print(f"nothing survives any more that this is the reason for: {change}")
        path = asked.out / "mutated_references.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text(report(results))
    unargued = [mutant for mutant, said in found.items() if not said and not why(mutant)]
    for mutant in unargued:
        print(f"{mutant.reference}: {mutant.operator}\n- {mutant.before}\n+ {mutant.after}")
    print(
        f"{len(found)} mutants, of which {sum(not said for said in found.values())} survive, {len(unargued)} unargued"
    )
    sys.exit(bool(unargued))


if __name__ == "__main__":
    main()
