#include "core/batch.h"

#include <algorithm>
#include <limits>

#include "core/pack.h"
#include "support/check.h"

namespace dart {
namespace {

size_t row_size(std::span<const int64_t> array, int rows) {
  return rows > 0 ? array.size() / rows : 0;
}

TreeSpan tree_of(const TreeBatch& trees, int index) {
  return {row(trees.token, index, trees.width), row(trees.parent, index, trees.width),
          row(trees.depth, index, trees.width), row(trees.score, index, trees.width)};
}

void pack_one(const TreeBatch& trees, int index) {
  const size_t width = trees.width;
  pack(row(trees.parent, index, width), row(trees.depth, index, width),
       trees.length.empty() ? 0 : trees.length[index],
       {row(trees.position, index, width), row(trees.first_child, index, width),
        row(trees.next_sibling, index, width), row(trees.mask, index, width * width),
        row(trees.mask_bits, index, width * mask_words(trees.width))});
}

}  // namespace

void prune_batch(ThreadPool& pool, int requests, const LedgerBatch& ledgers, float depth_bonus,
                 const TreeBatch& trees) {
  pool.for_each(requests, [&](int index, int) {
    BestRanks best;
    std::vector<int32_t> place;
    prune({row(ledgers.token, index, ledgers.size), row(ledgers.parent, index, ledgers.size),
           row(ledgers.depth, index, ledgers.size), row(ledgers.score, index, ledgers.size)},
          depth_bonus, tree_of(trees, index), best, place);
  });
}

void pack_batch(ThreadPool& pool, int requests, const TreeBatch& trees) {
  pool.for_each(requests, [&](int index, int) { pack_one(trees, index); });
}

void ChildrenBuffer::assign(std::span<const int64_t> token, std::span<const float> log_prob,
                            float logit_weight, std::span<const int64_t> end) {
  token_.resize(token.size());
  step_.resize(token.size());
  end_.resize(token.size());
  sorted_ = true;
  for (size_t i = 0; i < token.size(); ++i) {
    const bool used = log_prob[i] > kUnused;
    DART_CHECK(!used || (token[i] >= 0 && token[i] <= std::numeric_limits<int32_t>::max()),
               "candidate token ", token[i], " is outside [0, 2^31)");
    token_[i] = used ? static_cast<int32_t>(token[i]) : 0;
    step_[i] = used ? log_prob[i] * logit_weight : kUnused;
    end_[i] = used && std::ranges::find(end, token[i]) != end.end();
    sorted_ = sorted_ && (i == 0 || step_[i] <= step_[i - 1]);
  }
}

Children ChildrenBuffer::shared() const {
  return {token_, step_, end_, static_cast<int>(token_.size()), true, sorted_};
}

Children ChildrenBuffer::each(int count) const {
  return {token_, step_, end_, count, false, false};
}

void Grower::grow(const Recipe& recipe, const RequestBatch& requests,
                  const CandidateBatch& candidates, const TreeBatch& trees) {
  const size_t levels = candidates.levels, count = candidates.count;
  const size_t ends = row_size(requests.end, requests.size);
  const size_t tail = row_size(requests.tail, requests.size);
  pool_.for_each(requests.size, [&](int index, int worker) {
    auto& [growth, continuity, children] = workers_[worker];
    growth.start(recipe, trees.width - 1, static_cast<int32_t>(requests.root[index]), true);
    if (continuity_.model) {
      continuity.start(*continuity_.model, continuity_.options, row(requests.tail, index, tail));
    }
    for (size_t level = 0; level < levels && !growth.frontier().empty(); ++level) {
      const size_t at = (index * levels + level) * count;
      children.assign(candidates.token.subspan(at, count), candidates.log_prob.subspan(at, count),
                      logit_weight_[level], row(requests.end, index, ends));
      growth.extend(children.shared(), continuity_.model ? &continuity : nullptr);
    }
    growth.finish(tree_of(trees, index));
    pack_one(trees, index);
  });
}

void StagedGrower::start(const Recipe& recipe, const RequestBatch& requests, int budget) {
  recipe_ = recipe;
  budget_ = budget;
  requests_.resize(requests.size);
  const size_t ends = row_size(requests.end, requests.size);
  const size_t tail = row_size(requests.tail, requests.size);
  for (int index = 0; index < requests.size; ++index) {
    Request& request = requests_[index];
    request.growth.start(recipe_, budget, static_cast<int32_t>(requests.root[index]), false);
    const auto end = row(requests.end, index, ends);
    request.end.assign(end.begin(), end.end());
    if (continuity_.model) {
      request.continuity.start(*continuity_.model, continuity_.options,
                               row(requests.tail, index, tail));
    }
  }
}

int StagedGrower::width() const {
  size_t width = 0;
  for (const Request& request : requests_) {
    width = std::max(width, request.growth.frontier().size());
  }
  return static_cast<int>(width);
}

void StagedGrower::frontier(std::span<int64_t> token, std::span<int64_t> origin,
                            std::span<int64_t> count) const {
  std::ranges::fill(token, 0);
  std::ranges::fill(origin, 0);
  const size_t width = this->width();
  for (size_t index = 0; index < requests_.size(); ++index) {
    const Growth& growth = requests_[index].growth;
    count[index] = static_cast<int64_t>(growth.frontier().size());
    size_t at = index * width;
    for (const FrontierPath& path : growth.frontier()) {
      token[at] = growth.nodes()[path.node].token;
      origin[at] = path.origin;
      ++at;
    }
  }
}

void StagedGrower::extend(std::span<const int64_t> token, std::span<const float> step, int count) {
  const size_t width = this->width();
  pool_.for_each(size(), [&](int index, int) {
    auto& [growth, continuity, children, end] = requests_[index];
    const size_t used = growth.frontier().size() * count, at = index * width * count;
    if (used == 0) return;
    children.assign(token.subspan(at, used), step.subspan(at, used), 1.0f, end);
    growth.extend(children.each(count), continuity_.model ? &continuity : nullptr);
  });
}

void StagedGrower::finish(const TreeBatch& trees) {
  pool_.for_each(size(), [&](int index, int) {
    requests_[index].growth.finish(tree_of(trees, index));
    pack_one(trees, index);
  });
}

}  // namespace dart
