#!/usr/bin/env bash
# Make data with SmolLM2-135M-Instruct and train its Domino drafter, on one GPU, within a time budget:
# 2 layers, blocks of 16, shifted labels, a file of 25.2 MB. Options as of train_smollm2.sh.
exec bash "$(dirname "$0")/train_smollm2.sh" --stages data,domino "$@"
