#!/usr/bin/env bash
# Make data with SmolLM2-135M-Instruct and train its DART head, on one GPU, within a time budget.
#   examples/train_smollm2_dart.sh [--stage all|data|head] [--data-minutes 7] [--head-minutes 8]
#       [--tokens 40000000] [--exclude EVALUATION_SET.jsonl]... [-- words for `train dart`]
# TARGET names the target's folder (by default the demo's), RUN the folder for everything made.
# Each stage goes on where it was stopped: data by shard, the head from its last checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
RUN=${RUN:-runs/smollm2-135m-dart}
stage=all data_minutes=7 head_minutes=8 tokens=40000000 exclude=()
while (($#)); do
  case $1 in
    --stage) stage=$2 && shift 2 ;;
    --data-minutes) data_minutes=$2 && shift 2 ;;
    --head-minutes) head_minutes=$2 && shift 2 ;;
    --tokens) tokens=$2 && shift 2 ;;
    --exclude) exclude+=(--exclude "$2") && shift 2 ;;
    --) shift && break ;;
    *) echo "error: unknown option $1" >&2 && exit 2 ;;
  esac
done
if [[ -z ${TARGET:-} ]]; then
  TARGET=$HOME/.cache/sglang-dart/models/smollm2-135m-instruct
  "$PYTHON" -c 'from sglang_dart.demo_target import prepare_target; prepare_target()'
fi

if [[ $stage != head ]]; then
  # One engine is limited by its scheduler process, which is Python: four share the GPU.
  "$PYTHON" -m sglang_dart.train data --model "$TARGET" --out "$RUN/data" \
    --tokens "$tokens" --minutes "$data_minutes" --openings examples/openings.txt \
    --temperature 0 --temperature 0 --temperature 0.7 --max-new-tokens 256 --max-length 1024 \
    --engine sglang --replicas 4 --concurrent 512 "${exclude[@]}"
fi
if [[ $stage != data ]]; then
  # 8192 tokens of vocabulary and the target's own MLP width make a file of 19.7 MB.
  "$PYTHON" -m sglang_dart.train dart --model "$TARGET" --data "$RUN/data" --out "$RUN/head" \
    --minutes "$head_minutes" --epochs 100 --draft-vocab-size 8192 --max-length 1024 \
    --batch-tokens 16384 "$@"
fi
