// Makes an n-gram model smaller and keeps what changes lookups most.
#pragma once

#include <cstdint>
#include <string>

#include "core/ngram_model.h"
#include "core/ngram_writer.h"
#include "core/progress.h"

namespace dart {

struct PruneOptions {
  // n-grams counted less often are dropped.
  uint32_t min_count = 1;
  // Limits of the result, the root included; 0 sets none.
  uint64_t max_nodes = 0;
  uint64_t max_bytes = 0;
  // Holds scratch files ("": memory): 4 bytes a node beside the result.
  std::string folder;
  std::string metadata = "{}";
  Progress progress;
};

// Drops n-grams whose loss changes the model least: an n-gram's utility is its count times the
// change in log-probability when a lookup must back off from it. Kept nodes keep their counts, and
// a kept node's path is kept, so probabilities stay counts' ratios and never exceed 1.
// Verifies the model first. Throws std::invalid_argument if a limit is too small for any model.
// Source: Stolcke, "Entropy-based Pruning of Backoff Language Models" (1998), for a back-off
// without weights.
NgramLevels prune(const NgramModel& model, const PruneOptions& options);

}  // namespace dart
