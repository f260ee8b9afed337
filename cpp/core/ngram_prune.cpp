#include "core/ngram_prune.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "support/check.h"

namespace dart {
namespace {

// What an unseen n-gram counts as, as in the scores of the tree search.
constexpr float kUnseen = 1e-10f;
// Utilities are told apart by the upper bits of their float32: 256 steps between powers of two.
constexpr uint32_t kBins = 1u << 16;
constexpr float kDropped = -1.0f;
constexpr uint32_t kProgressStep = 1024;

uint32_t bin_of(float utility) { return std::bit_cast<uint32_t>(utility) >> 15; }

class Pruner {
 public:
  Pruner(const NgramModel& model, const PruneOptions& options) : model_(model), options_(options) {
    for (int l = 1; l <= model.order(); ++l) {
      utility_.emplace_back(options.folder).resize(model.level_size(l));
      histogram_[l - 1].resize(kBins);
    }
  }

  NgramLevels run();

 private:
  float rate(int level, uint32_t node, const NgramModel::Context& context);
  void rate_children(int level, uint32_t node, const NgramModel::Context& context);
  uint32_t choose_threshold() const;
  NgramHeader kept_above(uint32_t threshold) const;
  bool fits(const NgramHeader& header) const;
  void keep(int level, uint32_t node, NgramLevels& out) const;
  bool is_kept(int level, uint32_t node) const {
    const float utility = utility_[level - 1][node];
    return utility >= 0 && bin_of(utility) >= threshold_;
  }

  const NgramModel& model_;
  const PruneOptions& options_;
  // The highest utility of the node and all below it, so that a node never outlasts its parent.
  std::vector<ScratchArray<float>> utility_;
  std::array<std::vector<uint64_t>, kMaxOrder> histogram_;
  uint32_t threshold_ = 0;
};

// Sets the utility of the children alone, that of their subtrees not yet included.
void Pruner::rate_children(int level, uint32_t node, const NgramModel::Context& context) {
  constexpr uint32_t kBatch = 64;
  const auto [begin, end] = model_.children(level, node);
  const float reciprocal = 1.0f / static_cast<float>(model_.count(level, node));
  // What a lookup falls back to once the child is gone.
  NgramModel::Context shorter = context;
  shorter.node[level - 1] = NgramModel::kAbsent;
  std::array<int32_t, kBatch> token;
  std::array<float, kBatch> fallback;
  for (uint32_t start = begin; start < end; start += kBatch) {
    const uint32_t n = std::min(kBatch, end - start);
    for (uint32_t i = 0; i < n; ++i) token[i] = model_.token(level + 1, start + i);
    model_.probability(shorter, {token.data(), n}, {fallback.data(), n}, {});
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t count = model_.count(level + 1, start + i);
      const auto seen = static_cast<float>(count);
      const float change =
          std::log(std::max(seen * reciprocal, kUnseen)) - std::log(std::max(fallback[i], kUnseen));
      utility_[level][start + i] = count < options_.min_count ? kDropped : seen * std::abs(change);
    }
  }
}

// Completes the utility of a node whose own is set, and of all below it.
float Pruner::rate(int level, uint32_t node, const NgramModel::Context& context) {
  float& utility = utility_[level - 1][node];
  if (level < model_.order() && utility >= 0) {
    const auto [begin, end] = model_.children(level, node);
    if (begin < end) rate_children(level, node, context);
    for (uint32_t child = begin; child < end; ++child) {
      const bool deepest = level + 1 == model_.order();
      utility = std::max(
          utility,
          rate(level + 1, child,
               deepest ? context : model_.extend(context, model_.token(level + 1, child))));
    }
  }
  if (utility >= 0) ++histogram_[level - 1][bin_of(utility)];
  return utility;
}

NgramHeader Pruner::kept_above(uint32_t threshold) const {
  NgramHeader header = model_.header();
  header.metadata_bytes = static_cast<uint32_t>(options_.metadata.size());
  for (int d = 0; d < model_.order(); ++d) {
    uint64_t size = 0;
    for (uint32_t bin = threshold; bin < kBins; ++bin) size += histogram_[d][bin];
    header.level_size[d] = static_cast<uint32_t>(size);
  }
  return header;
}

bool Pruner::fits(const NgramHeader& header) const {
  uint64_t nodes = 1;
  for (const uint32_t size : header.level_size) nodes += size;
  return (options_.max_nodes == 0 || nodes <= options_.max_nodes) &&
         (options_.max_bytes == 0 || layout_of(header).file_bytes <= options_.max_bytes);
}

uint32_t Pruner::choose_threshold() const {
  DART_CHECK(fits(kept_above(kBins)), "no model fits into ", options_.max_nodes, " nodes and ",
             options_.max_bytes, " bytes (0: no limit); raise the limit");
  uint32_t low = 0;
  uint32_t high = kBins;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (fits(kept_above(middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

void Pruner::keep(int level, uint32_t node, NgramLevels& out) const {
  out.push_back(level, model_.token(level, node));
  const uint64_t place = out.size(level) - 1;
  out.set_count(level, place, model_.count(level, node));
  if (level == model_.order()) return;
  out.info(level, place).first_child = static_cast<uint32_t>(out.size(level + 1));
  const auto [begin, end] = model_.children(level, node);
  for (uint32_t child = begin; child < end; ++child) {
    if (is_kept(level + 1, child)) keep(level + 1, child, out);
  }
}

NgramLevels Pruner::run() {
  model_.verify();
  const uint32_t roots = model_.level_size(1);
  for (uint32_t node = 0; node < roots; ++node) {
    // A single token is never looked up; it is worth what stands below it.
    utility_[0][node] = model_.count(1, node) < options_.min_count ? kDropped : 0.0f;
    rate(1, node, model_.extend(model_.empty_context(), model_.token(1, node)));
    if (node % kProgressStep == 0 && options_.progress) options_.progress(node, 2 * roots);
  }
  threshold_ = choose_threshold();
  NgramLevels out(model_.order(), options_.folder);
  out.set_token_bound(uint64_t{1} << (31 - model_.header().count_bits));
  out.vocabulary = {model_.header().vocab_size, model_.header().tokenizer_sha256};
  out.total = model_.header().total;
  out.metadata = options_.metadata;
  for (uint32_t node = 0; node < roots; ++node) {
    if (is_kept(1, node)) keep(1, node, out);
    if (node % kProgressStep == 0 && options_.progress) options_.progress(roots + node, 2 * roots);
  }
  return out;
}

}  // namespace

NgramLevels prune(const NgramModel& model, const PruneOptions& options) {
  return Pruner(model, options).run();
}

}  // namespace dart
