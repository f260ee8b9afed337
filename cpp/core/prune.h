// The best nodes of a ledger.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tree.h"

namespace dart {

// Keeps the `capacity` greatest of the ranks that it is offered.
class BestRanks {
 public:
  void reset(int capacity) {
    capacity_ = capacity;
    heap_.clear();
  }

  // A rank at or below the floor would not be kept. 0 while there is room.
  NodeRank floor() const { return full() ? heap_.front() : 0; }
  bool full() const { return static_cast<int>(heap_.size()) == capacity_; }

  // Returns whether `rank` is kept for now.
  bool offer(NodeRank rank);

  // Best first; the object must be reset before the next offer.
  std::span<const NodeRank> sort_best_first();
  // In the order of index; the object must be reset before the next offer.
  std::span<const NodeRank> sort_by_index();

 private:
  int capacity_ = 0;
  // A heap with the least rank in front.
  std::vector<NodeRank> heap_;
};

// What decides which nodes are kept: score + depth_bonus * depth, rounded to float32 twice.
inline float keep_score(float score, int depth, float depth_bonus) {
  return score + depth_bonus * static_cast<float>(depth);
}

// One request's ledger; all of size S. Node 0 is the root, parents stand before their children,
// score is -inf where a place is unused and never rises along a path.
struct LedgerSpan {
  std::span<const int64_t> token;
  std::span<const int32_t> parent;
  std::span<const int32_t> depth;
  std::span<const float> score;
};

// Writes the root and the tree.width() - 1 best other nodes of `ledger`.
// `best` and `place` are working memory. Throws std::invalid_argument if a kept node's parent is
// not kept, which a score that rises along a path, or a depth_bonus > 0, can cause.
void prune(const LedgerSpan& ledger, float depth_bonus, const TreeSpan& tree, BestRanks& best,
           std::vector<int32_t>& place);

// Renumbers kept nodes, given in the order of index, into a tree.
class TreeWriter {
 public:
  // Writes the root. `nodes` bounds the indices to come; `place` is working memory.
  TreeWriter(const TreeSpan& tree, int64_t root_token, size_t nodes, std::vector<int32_t>& place);

  // Throws std::invalid_argument unless `parent` has been added before.
  void add(size_t node, int64_t token, int32_t parent, int32_t depth, float score);
  // Fills what is left of the tree.
  void pad();

 private:
  void write(int64_t token, int32_t parent, int32_t depth, float score);

  const TreeSpan tree_;
  std::vector<int32_t>& place_;  // node -> its index in the tree, or -1
  int size_ = 0;
};

}  // namespace dart
