"""Disaggregated prefill: one vLLM computes prompts, another one generates; kvloom's shared tier is between them.

    vllm serve MODEL --port 8100 --kv-transfer-config '{"kv_connector": "KVLoomConnector", "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"config": "examples/gpu_disk.yaml"}}'
    vllm serve MODEL --port 8200 --kv-transfer-config '{... "kv_role": "kv_consumer" ...}'
    python examples/vllm/disaggregated.py --prefill http://localhost:8100 --decode http://localhost:8200 --port 8000

A request to this proxy goes to the first with `max_tokens: 1`, and then to the second, which waits a little for KV that
is still being written. Whatever does not come is computed there: the answer is the same. Only the standard library is
used; a production proxy would balance load, too.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_SECONDS = 5.0


def post(address: str, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(address + path, data, {"Content-Type": "application/json"}))


class Proxy(BaseHTTPRequestHandler):
    prefill = decode = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with post(self.prefill, self.path, {**body, "max_tokens": 1, "min_tokens": 1, "stream": False}) as answer:
            answer.read()
        wait = {**body.get("kv_transfer_params", {}), "kvloom_wait_seconds": WAIT_SECONDS}
        with post(self.decode, self.path, {**body, "kv_transfer_params": wait}) as answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            for line in answer:
                self.wfile.write(line)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    Proxy.prefill, Proxy.decode = arguments.prefill, arguments.decode
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Proxy).serve_forever()


if __name__ == "__main__":
    main()
