#!/usr/bin/env bash
# Serve a target with DART. Further words go to the server, for example --port 30001.
# TARGET and DRAFTER name folders or hub ids; by default they are the demo's small models.
set -euo pipefail
PYTHON=${PYTHON:-python}
if [[ -z ${TARGET:-} || -z ${DRAFTER:-} ]]; then
  models=$HOME/.cache/sglang-dart/models
  made=$("$PYTHON" -m sglang_dart.demo --prepare "$models/smollm2-135m-instruct" | tail -n 1)
  TARGET=$("$PYTHON" -c 'import json, sys; print(json.loads(sys.argv[1])["target"])' "$made")
  DRAFTER=$("$PYTHON" -c 'import json, sys; print(json.loads(sys.argv[1])["drafter"])' "$made")
fi
exec "$PYTHON" -m sglang.launch_server --model-path "$TARGET" \
  --speculative-algorithm DART --speculative-draft-model-path "$DRAFTER" "$@"
