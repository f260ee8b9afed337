// Level-by-level growth of one request's draft tree.
//
// Every level scores the children of the frontier's paths, enters nodes into the ledger, and
// chooses the next frontier. The result is the tree that keeping the whole ledger and pruning it
// once would give, ties included. What cannot be among the best `budget` nodes is only left out
// early, which is safe because scores never rise along a path.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/continuity.h"
#include "core/prune.h"
#include "core/tree.h"

namespace dart {

// Which paths are extended, and which nodes may be kept.
struct Recipe {
  // Paths extended at each level; 0 takes an equal share of what is left of the budget, unused
  // candidates counted like others.
  int frontier;
  // Whether every scored child enters the ledger, or only those that are extended next.
  bool every_child;
  // Whether paths that end the answer are extended only where others leave room.
  bool ends_last;
  // Added to a node's score for each level when nodes are kept; <= 0.
  float depth_bonus;
  // What a step at each level counts, >= 0; as many as there are levels.
  std::vector<float> level_weight;

  int levels() const { return static_cast<int>(level_weight.size()); }
};

// Throws std::invalid_argument for a setting out of bounds, no levels, or a shared budget where
// every child enters.
void check_recipe(const Recipe& recipe);

// A ledger has at most this many nodes.
inline constexpr int64_t kMaxLedger = 1 << 30;

// What may follow the paths of a frontier of P paths.
struct Children {
  // [K], the same under every path, or [P * K].
  std::span<const int32_t> token;
  std::span<const float> step;   // score of the step, unweighted; -inf where a rank is unused
  std::span<const uint8_t> end;  // 1 where the token ends the answer
  int count;                     // K
  bool shared;                   // the same under every path
  bool sorted;                   // `step` never rises with rank
};

class Growth {
 public:
  // Begins a tree; the memory of the last one is reused. budget >= 0. `recipe` outlives the tree.
  // `shared`: whether every level's children will be.
  void start(const Recipe& recipe, int budget, int32_t root_token, bool shared);

  // The level that is scored next, from 0.
  int level() const { return level_; }
  // The paths to extend, best first. Empty when no node that is still unscored could be kept.
  std::span<const FrontierPath> frontier() const { return frontier_; }
  // Node 0 is the root.
  std::span<const Node> nodes() const { return nodes_; }

  // Scores the frontier's children and chooses the next frontier.
  // `continuity`, if given, is added to every step.
  void extend(const Children& children, Continuity* continuity);

  // Writes the root and the best nodes.
  void finish(const TreeSpan& tree);

 private:
  void score_children(int position, const Children& children, Continuity* continuity);
  // Ranks, from the best one, that could enter if continuity added nothing.
  int count_promising(const Node& parent, int flat, const Children& children) const;
  bool may_enter(float score, int flat, bool end) const;
  void enter(float score, int flat, bool end, int position, int32_t token);
  void choose_frontier(const Children& children, int64_t most_ends);
  int take_quota(int count);

  NodeRank keep_rank(float score, size_t index) const {
    return node_rank(keep_score(score, level_ + 1, recipe_->depth_bonus),
                     static_cast<uint32_t>(index));
  }
  NodeRank extend_rank(float score, size_t index, bool end) const {
    return node_rank(score, static_cast<uint32_t>(index), end && recipe_->ends_last);
  }

  const Recipe* recipe_;
  int budget_;
  int level_;
  // Whether nodes out of reach are left out. Not where they would take room from paths that end
  // the answer and their number is only known by scoring them.
  bool drops_;
  // Paths that the frontier would have if nothing were left out.
  int64_t full_frontier_;
  // Of a shared budget: what the last frontier and all frontiers have taken.
  int share_, taken_;

  std::vector<Node> nodes_;
  std::vector<FrontierPath> frontier_, last_frontier_;
  // First node of this level's, and the frontier position of each one's parent.
  size_t level_begin_;
  std::vector<int32_t> origin_;
  BestRanks kept_;      // nodes
  BestRanks extended_;  // children of this level: nodes, or flat positions in [P, K]
  std::vector<int32_t> place_;
};

}  // namespace dart
