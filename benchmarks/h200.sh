#!/usr/bin/env bash
# The speed tables, measured again on the GPU of this host; `make bench` calls it where there is one.
#   benchmarks/h200.sh [FOLDER_OF_RESULTS]
# 1. Round times of Qwen3-8B shapes, random weights: DART at 60 nodes and DARTREE at 64, beside
#    SGLang's own algorithms at their published accept lengths.
# 2. The same with nothing ever accepted.
# 3. SmolLM2-135M with its drafters on prompt sets, if DATA names a folder of them, and DART and
#    DARTREE the drafters' folders or hub ids.
# Started again, it goes on where it was left. FlashInfer, EAGLE3 and DFLASH compile at first use:
# minutes, kept in ~/.cache.
set -euo pipefail
PYTHON=${PYTHON:-python}
out=${1:-docs/benchmarks}
mkdir -p "$out"
failed=0
sweep() { "$PYTHON" -m sglang_dart.sweep "$@" || failed=$?; }

BATCHES=${BATCHES:-1,4,16,32,64}
REPEATS=${REPEATS:-3}
rounds=(--shapes "${SHAPES:-Qwen3-8B}" --concurrency "$BATCHES" --repeats "$REPEATS")

sweep "${rounds[@]}" --out "$out/h200-rounds.jsonl" \
  --arm plain \
  --arm "DART --speculative-num-draft-tokens 61" \
  --arm "DARTREE --speculative-num-draft-tokens 65" \
  --arm "NGRAM --speculative-num-draft-tokens 64" \
  --arm "EAGLE3" \
  --arm "DFLASH"

sweep "${rounds[@]}" --out "$out/h200-rejected.jsonl" --accept-length 1 \
  --arm plain --arm DART --arm DARTREE

if [[ -n ${DATA:-} ]]; then
  sets=()
  for file in "$DATA"/*.jsonl; do sets+=(--data "$file"); done
  target=$("$PYTHON" -m sglang_dart.demo --prepare "$HOME/.cache/sglang-dart/models/smollm2-135m-instruct" |
    tail -n 1 | "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["target"])')
  sweep --model "$target" --out "$out/h200-smollm2.jsonl" "${sets[@]}" --max-samples 40 \
    --concurrency 1,4,16 --repeats "$REPEATS" \
    --arm plain --arm "DART=${DART:?a drafter}" --arm "DARTREE=${DARTREE:?a drafter}" --arm NGRAM \
    -- --max-running-requests 64
fi
exit "$failed"
