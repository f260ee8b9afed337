#!/usr/bin/env bash
# Everything for SmolLM2-135M-Instruct on one GPU: data, n-gram model, DART head, Domino drafter,
# evaluation. Each stage has a time limit, goes on where it was stopped, and prints its time.
#   examples/train_smollm2.sh [--stages data,ngram,dart,domino,eval] [--tokens 40000000]
#       [--data-minutes 8] [--ngram-minutes 3] [--dart-minutes 8] [--domino-minutes 9]
#       [--eval-minutes 8] [--sets QUESTIONS.jsonl]... [--exclude QUESTIONS.jsonl]...
# Stages joined by + run at the same time, each with a log in RUN: a training step of so small a
# target leaves the GPU idle between kernels, and the n-gram model needs none. For example:
#   examples/train_smollm2.sh --stages data,ngram+dart+domino,eval --sets QUESTIONS.jsonl
# --sets: measured by stage eval (first turns) and kept out of the data; --exclude: only kept out.
# TARGET names the target's folder (by default the demo's), RUN the folder for everything made.
# DATA_FLAGS, DART_FLAGS, DOMINO_FLAGS and EVAL_FLAGS are added to a stage's command; SERVER_FLAGS
# go to the servers of parity gates and evaluation. To go on from drafters that were trained before:
#   DART_FLAGS='--start OLD/dart/head --lr 3e-4' RUN=NEW examples/train_smollm2.sh --stages dart
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RUN=${RUN:-runs/smollm2-135m}
stages=data,ngram,dart,domino,eval tokens=40000000 exclude=() sets=()
declare -A minutes=([data]=8 [ngram]=3 [dart]=8 [domino]=9 [eval]=8)
while (($#)); do
  [[ $# -ge 2 ]] || { echo "error: $1 needs a value" >&2 && exit 2; }
  case $1 in
    --stages) stages=$2 ;;
    --tokens) tokens=$2 ;;
    --data-minutes | --ngram-minutes | --dart-minutes | --domino-minutes | --eval-minutes)
      name=${1#--} && minutes[${name%-minutes}]=$2 ;;
    --sets) sets+=(--data "$2") exclude+=(--exclude "$2") ;;
    --exclude) exclude+=(--exclude "$2") ;;
    *) echo "error: unknown option $1" >&2 && exit 2 ;;
  esac
  shift 2
done
if [[ -z ${TARGET:-} ]]; then
  TARGET=$HOME/.cache/sglang-dart/models/smollm2-135m-instruct
  "$PYTHON" -c 'from sglang_dart.demo_target import prepare_target; prepare_target()'
fi
# FlashInfer would first compile for minutes; the memory is shared with what else runs.
read -ra server <<<"${SERVER_FLAGS---attention-backend triton --mem-fraction-static 0.3}"
mkdir -p "$RUN"

data() {
  # An engine is limited by its scheduler process, which is Python: several share the GPU.
  read -ra more <<<"${DATA_FLAGS:-}"
  "$PYTHON" -m sglang_dart.train data --model "$TARGET" --out "$RUN/data" \
    --tokens "$tokens" --minutes "${minutes[data]}" --openings examples/openings.txt \
    --temperature 0 --temperature 0 --temperature 0.7 --max-new-tokens 256 --max-length 1024 \
    --engine sglang --replicas 8 --concurrent 256 "${exclude[@]}" "${more[@]}"
}

ngram() {
  # The shards are free of the evaluation sets already.
  if [[ ! -f $RUN/ngram/3gram-whole.ngram ]]; then
    mkdir -p "$RUN/ngram"
    timeout "${minutes[ngram]}m" "$PYTHON" -m sglang_dart.ngram build "$RUN/data" --token-ids \
      --tokenizer "$TARGET" --order 3 --output "$RUN/ngram/3gram-whole.ngram"
  fi
  "$PYTHON" -m sglang_dart.ngram prune "$RUN/ngram/3gram-whole.ngram" "$RUN/ngram/3gram.ngram" \
    --max-size 6MB
}

dart() {
  # 8192 tokens of vocabulary and the target's own MLP width make a file of 19.7 MB.
  read -ra more <<<"${DART_FLAGS:-}"
  "$PYTHON" -m sglang_dart.train dart --model "$TARGET" --data "$RUN/data" --out "$RUN/dart" \
    --minutes "${minutes[dart]}" --epochs 100 --draft-vocab-size 8192 --max-length 1024 \
    --batch-tokens 16384 --chunk 2048 --gate-prompts 8 "${more[@]}" -- "${server[@]}"
}

domino() {
  # Numbers: fc 5 * 576 * 576 = 1.66 M; each of 2 layers 576 * (576 + 192 + 192 + 576) for attention
  # and 3 * 576 * 1536 for its MLP = 3.54 M; GRU 3 * 256 * (576 + 256) = 0.64 M; correction
  # 64 * (576 + 256 + 49152) = 3.20 M. Together 12.58 M of 2 bytes, a file of 25.2 MB.
  read -ra more <<<"${DOMINO_FLAGS:-}"
  "$PYTHON" -m sglang_dart.train domino --model "$TARGET" --data "$RUN/data" --out "$RUN/domino" \
    --minutes "${minutes[domino]}" --epochs 100 --layers 2 --taps 1,8,14,20,27 --block-size 16 \
    --emb-dim 64 --gru-hidden-dim 256 --lr 1e-3 --max-length 1024 --batch-tokens 16384 --anchors 32 \
    --chunk 8192 --gate-prompts 8 "${more[@]}" -- "${server[@]}"
}

evaluate() {
  if ((${#sets[@]} == 0)); then
    echo "error: stage eval needs --sets" >&2 && return 2
  fi
  # Paths of files that servers open must not depend on where those start. A tree of full width is
  # what a drafter is judged by, whatever the load.
  local model dart domino
  model=$(realpath "$RUN/ngram/3gram.ngram") dart=$RUN/dart/head domino=$RUN/domino/head
  read -ra more <<<"${EVAL_FLAGS:-}"
  timeout "${minutes[eval]}m" "$PYTHON" -m sglang_dart.eval --model "$TARGET" "${sets[@]}" \
    --first-turns --max-new-tokens 128 --dtype bfloat16 --concurrency 16 --slots \
    --out "$RUN/eval.jsonl" "${more[@]}" \
    --arm "dart:DART=$dart SGLANG_DART_CONFIG='{\"adaptive\": false}'" \
    --arm "dart+ngram:DART=$dart SGLANG_DART_CONFIG='{\"adaptive\": false, \"ngram\": \"$model\"}'" \
    --arm "domino-chain:DARTREE=$domino SGLANG_DART_CONFIG='{\"adaptive\": false, \"variant\": \"chain\"}'" \
    --arm "domino-fixed:DARTREE=$domino SGLANG_DART_CONFIG='{\"adaptive\": false, \"variant\": \"fixed\"}'" \
    --arm "domino-pruned:DARTREE=$domino SGLANG_DART_CONFIG='{\"adaptive\": false, \"variant\": \"pruned\"}'" \
    -- "${server[@]}"
}

run() {
  local began=$SECONDS code=0
  case $1 in
    data | ngram | dart | domino) "$1" || code=$? ;;
    eval) evaluate || code=$? ;;
  esac
  echo "stage $1: $((SECONDS - began)) s" >&2
  return "$code"
}

for stage in ${stages//[,+]/ }; do
  [[ $stage =~ ^(data|ngram|dart|domino|eval)$ ]] ||
    { echo "error: no stage $stage" >&2 && exit 2; }
done
failed=()
# Stages in the background do not hear Ctrl-C.
trap 'trap - INT TERM; kill 0' INT TERM
for group in ${stages//,/ }; do
  # A gate that fails must not cost the stages after it.
  if [[ $group != *+* ]]; then
    run "$group" || failed+=("$group")
    continue
  fi
  declare -A started=()
  for stage in ${group//+/ }; do
    run "$stage" >"$RUN/$stage.log" 2>&1 &
    started[$stage]=$!
  done
  for stage in "${!started[@]}"; do
    wait "${started[$stage]}" || failed+=("$stage")
    tail -n 2 "$RUN/$stage.log"
  done
done
if ((${#failed[@]})); then
  echo "error: failed: ${failed[*]}" >&2 && exit 1
fi
