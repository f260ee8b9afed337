#!/usr/bin/env bash
# Make data with SmolLM2-135M-Instruct and train its DART head, on one GPU, within a time budget.
# Options as of train_smollm2.sh, for example:
#   examples/train_smollm2_dart.sh --data-minutes 7 --dart-minutes 8 --exclude EVALUATION_SET.jsonl
exec bash "$(dirname "$0")/train_smollm2.sh" --stages data,dart "$@"
