"""A server that speaks MCP badly: it prints next to its messages, and its results are none."""

from __future__ import annotations

import json
import signal
import sys
import time

STUBBORN = sys.argv[1:] == ["stubborn"]  # it has to be killed
if STUBBORN:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
SCHEMA = {"type": "object", "properties": {}}
print("starting ...", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    method = asked["method"]
    if method == "initialize":
        answer["result"] = {
            "protocolVersion": asked["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "raw", "version": "1"},
        }
    elif method == "tools/list" and not asked.get("params", {}).get("cursor"):
        answer["result"] = {
            "tools": [{"name": "odd", "inputSchema": SCHEMA}],
            "nextCursor": "2",
        }
    elif method == "tools/list":
        answer["result"] = {"tools": [{"name": "text", "inputSchema": SCHEMA}]}
    elif method == "tools/call" and asked["params"]["name"] == "odd":
        answer["result"] = {"content": 7}
    elif method == "tools/call":
        print('{"jsonrpc": "2.0", "id"', flush=True)
        answer["result"] = {"content": [{"type": "text", "text": "well"}]}
    else:
        answer["error"] = {"code": -32601, "message": f"no method {method}"}
    print(json.dumps(answer), flush=True)
while STUBBORN:  # nor does it end when it is not spoken to any more
    time.sleep(1)
