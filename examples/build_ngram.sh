#!/usr/bin/env bash
# Count the n-grams of texts for a target, keep the most useful, ask them, and show how to serve.
#   examples/build_ngram.sh [TEXT_FILE_OR_FOLDER]...
# TARGET names a folder or hub id, by default the demo's small target; OUT the folder to write to.
# Without texts, this repository's documentation is counted.
set -euo pipefail
PYTHON=${PYTHON:-python} OUT=${OUT:-ngram}
mkdir -p "$OUT"
if [[ -z ${TARGET:-} ]]; then
  models=$HOME/.cache/sglang-dart/models
  made=$("$PYTHON" -m sglang_dart.demo --prepare "$models/smollm2-135m-instruct" | tail -n 1)
  TARGET=$("$PYTHON" -c 'import json, sys; print(json.loads(sys.argv[1])["target"])' "$made")
fi
if [[ $# -eq 0 ]]; then
  "$PYTHON" - "$(dirname "$0")/../docs" > "$OUT/docs.jsonl" <<'END'
import json, pathlib, sys

for page in sorted(pathlib.Path(sys.argv[1]).glob("*.md")):
    print(json.dumps({"text": page.read_text()}))
END
  set -- "$OUT/docs.jsonl"
fi
tool() { "$PYTHON" -m sglang_dart.ngram "$@"; }
tool build "$@" -o "$OUT/3gram.ngram" --tokenizer "$TARGET" --memory 2GB
tool prune "$OUT/3gram.ngram" "$OUT/small.ngram" --min-count 2
tool inspect "$OUT/small.ngram" --verify
tool query "$OUT/small.ngram" --context "The n-gram" --tokenizer "$TARGET" --top 5
echo "serve with it: SGLANG_DART_CONFIG='{\"ngram\": \"$OUT/small.ngram\"}' examples/serve_dart.sh"
