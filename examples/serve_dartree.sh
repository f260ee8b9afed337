#!/usr/bin/env bash
# Serve a target with DARTREE. Further words go to the server, for example --port 30001.
# TARGET and DRAFTER name folders or hub ids; by default they are the demo's small models.
# VARIANT is pruned, fixed, chain or marginal; by default what suits the drafter.
set -euo pipefail
PYTHON=${PYTHON:-python}
if [[ -z ${TARGET:-} || -z ${DRAFTER:-} ]]; then
  models=$HOME/.cache/sglang-dart/models
  made=$("$PYTHON" -m sglang_dart.demo --algorithm DARTREE \
    --prepare "$models/smollm2-135m-instruct" | tail -n 1)
  TARGET=$("$PYTHON" -c 'import json, sys; print(json.loads(sys.argv[1])["target"])' "$made")
  DRAFTER=$("$PYTHON" -c 'import json, sys; print(json.loads(sys.argv[1])["drafter"])' "$made")
fi
if [[ -n ${VARIANT:-} ]]; then
  export SGLANG_DART_CONFIG="{\"variant\": \"$VARIANT\"}"
fi
exec "$PYTHON" -m sglang.launch_server --model-path "$TARGET" \
  --speculative-algorithm DARTREE --speculative-draft-model-path "$DRAFTER" "$@"
