#include "core/prune.h"

#include <algorithm>
#include <functional>

#include "support/check.h"

namespace dart {

bool BestRanks::offer(NodeRank rank) {
  if (!full()) {
    heap_.push_back(rank);
    std::ranges::push_heap(heap_, std::greater{});
    return true;
  }
  if (rank <= heap_.front()) return false;
  // The least rank leaves; the new one sinks from the front to its place.
  const size_t size = heap_.size();
  size_t hole = 0;
  for (size_t child; (child = 2 * hole + 1) < size; hole = child) {
    if (child + 1 < size && heap_[child + 1] < heap_[child]) ++child;
    if (rank <= heap_[child]) break;
    heap_[hole] = heap_[child];
  }
  heap_[hole] = rank;
  return true;
}

std::span<const NodeRank> BestRanks::sort_best_first() {
  std::ranges::sort(heap_, std::greater{});
  return heap_;
}

std::span<const NodeRank> BestRanks::sort_by_index() {
  std::ranges::sort(heap_, {}, rank_index);
  return heap_;
}

void prune(const LedgerSpan& ledger, float depth_bonus, const TreeSpan& tree, BestRanks& best,
           std::vector<int32_t>& place) {
  best.reset(tree.width() - 1);
  for (size_t node = 1; node < ledger.score.size(); ++node) {
    if (!(ledger.score[node] > kUnused)) continue;
    const float score = keep_score(ledger.score[node], ledger.depth[node], depth_bonus);
    best.offer(node_rank(score, static_cast<uint32_t>(node)));
  }
  TreeWriter writer(tree, ledger.token[0], ledger.score.size(), place);
  for (const NodeRank rank : best.sort_by_index()) {
    const uint32_t node = rank_index(rank);
    writer.add(node, ledger.token[node], ledger.parent[node], ledger.depth[node],
               ledger.score[node]);
  }
  writer.pad();
}

TreeWriter::TreeWriter(const TreeSpan& tree, int64_t root_token, size_t nodes,
                       std::vector<int32_t>& place)
    : tree_(tree), place_(place) {
  place_.assign(nodes, -1);
  write(root_token, -1, 0, 0.0f);
  place_[0] = 0;
}

void TreeWriter::add(size_t node, int64_t token, int32_t parent, int32_t depth, float score) {
  DART_CHECK(parent >= 0 && static_cast<size_t>(parent) < node, "ledger node ", node,
             " has parent ", parent, "; expected an earlier node");
  DART_CHECK(place_[parent] >= 0, "ledger node ", node, " outranks its parent ", parent,
             "; scores must not rise along a path, nor depth_bonus be above 0");
  place_[node] = size_;
  write(token, place_[parent], depth, score);
}

void TreeWriter::pad() {
  while (size_ < tree_.width()) write(0, -1, 0, kUnused);
}

void TreeWriter::write(int64_t token, int32_t parent, int32_t depth, float score) {
  tree_.token[size_] = token;
  tree_.parent[size_] = parent;
  tree_.depth[size_] = depth;
  tree_.score[size_] = score;
  ++size_;
}

}  // namespace dart
