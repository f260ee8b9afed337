#include "core/continuity.h"

#include <algorithm>
#include <cmath>

namespace dart {

void Continuity::start(const NgramModel& model, const Options& options,
                       std::span<const int64_t> tail) {
  model_ = &model;
  options_ = options;
  unseen_ = std::log(options.epsilon) * options.weight;
  const size_t most = static_cast<size_t>(model.order() - 1);
  tail_.clear();
  for (const int64_t token : tail.last(std::min(most, tail.size()))) {
    if (token >= 0) tail_.push_back(static_cast<int32_t>(token));
  }
  context_.assign(1, model.find(tail_));
}

std::span<const float> Continuity::score(int position, std::span<const int32_t> token) {
  score_.resize(token.size());
  model_->probability(context_[position], token, score_, {});
  for (float& value : score_) {
    value =
        value > 0 ? std::log(std::min(value + options_.epsilon, 1.0f)) * options_.weight : unseen_;
  }
  return score_;
}

void Continuity::advance(std::span<const FrontierPath> frontier, std::span<const Node> nodes) {
  std::swap(context_, last_context_);
  context_.clear();
  for (const FrontierPath& path : frontier) {
    context_.push_back(model_->extend(last_context_[path.origin], nodes[path.node].token));
  }
}

}  // namespace dart
