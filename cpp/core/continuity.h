// What an n-gram model adds to the score of a path.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/ngram_model.h"
#include "core/tree.h"

namespace dart {

// A path that is to be extended.
struct FrontierPath {
  int32_t node;
  int32_t origin;  // position of its parent in the frontier before
};

// Follows the paths of one request's frontier through the model. Holds the working memory.
class Continuity {
 public:
  struct Options {
    float weight;     // of the log of the n-gram probability; >= 0
    float epsilon;    // added to the probability; > 0
    int first_level;  // levels before it are scored without
  };

  // Begins a tree after these committed tokens: oldest first, the root last, -1 where there are
  // fewer. `model` outlives the tree.
  void start(const NgramModel& model, const Options& options, std::span<const int64_t> tail);

  bool applies_at(int level) const { return level >= options_.first_level; }

  // weight * ln(P + epsilon) for each token, were it to follow the path at `position` of the
  // frontier. Never above 0: P + epsilon counts as at most 1. Valid until the next call.
  std::span<const float> score(int position, std::span<const int32_t> token);

  // Goes on to the next frontier.
  void advance(std::span<const FrontierPath> frontier, std::span<const Node> nodes);

 private:
  const NgramModel* model_;
  Options options_;
  float unseen_;                                             // the score of P = 0
  std::vector<NgramModel::Context> context_, last_context_;  // of each path of the frontier
  std::vector<int32_t> tail_;
  std::vector<float> score_;
};

}  // namespace dart
