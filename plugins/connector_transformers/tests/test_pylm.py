"""The trained model of the repository is what its digests say, and loads."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvloom_connector_transformers import spec_of

ROOT = Path(__file__).parents[3]
WEIGHTS = ROOT / "evals" / "pylm" / "weights"

pytestmark = pytest.mark.skipif(not WEIGHTS.is_dir(), reason="evals/pylm is not here")


def test_digests() -> None:
    listed = dict(reversed(line.split()) for line in (WEIGHTS / "SHA256SUMS").read_text().splitlines())
    files = {path.name: path for path in WEIGHTS.iterdir() if path.name != "SHA256SUMS"}
    assert listed.keys() == files.keys()
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == listed


def test_it_is_plain_and_speaks() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(WEIGHTS), AutoTokenizer.from_pretrained(WEIGHTS)
    spec = spec_of(model)
    assert (spec.num_layers, spec.num_kv_heads, spec.head_size, spec.dtype) == (8, 2, 64, "bfloat16")
    inputs = tokenizer("The :mod:`json` module provides", return_tensors="pt")
    assert set(inputs) == {"input_ids", "attention_mask"}
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0])
    assert text.startswith("The :mod:`json` module provides a")


@pytest.mark.slow
def test_the_example_hits_on_its_second_run(tmp_path: Path) -> None:
    pytest.importorskip("kvloom_backend_disk", reason="the disk tier is not installed")
    environment = os.environ | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = ROOT / "examples" / "transformers_generate.py"
    hits = []
    for _ in range(2):
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        hits.append(int(re.findall(r"hit_tokens=(\d+),", done.stdout)[0]))
    assert hits[0] == 0 and hits[1] > 1000 and hits[1] % 256, "with the prompt's tail"
